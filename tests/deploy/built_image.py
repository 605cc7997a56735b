"""The image of the root `Dockerfile`, built without any registry: on a base that is made of this host's own files.

The base has this Python at its own path, the programs that the Dockerfile runs, and the libraries that both are linked
with. It is imported once, under a tag of its own content; so is what is built on it.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As few as there is use for: the hosts of these tests may have no right to raise them.
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
_PROGRAMS = (
    *("bash", "dash", "cat", "chmod", "chown", "cp", "env", "id", "ln", "ls", "mkdir", "mv", "rm", "true", "uname"),
    *("du", "find", "getconf", "ldconfig", "mount", "setpriv", "sleep", "test", "touch", "unshare"),
)
_LIBRARY_FOLDER = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or 'x86_64-linux-gnu'}"
_LIBRARIES = (
    *("libseccomp.so.2", "libstdc++.so.6", "libgomp.so.1", "libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2"),
    *("librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1", "libm.so.6", "libresolv.so.2"),
)
_FOLDERS = {"root": 0o700, "home": 0o755, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "etc": 0o755, "opt": 0o755}
_LEFT_OUT = re.compile(r"/(site-packages|test|tests|idlelib|turtledemo|__pycache__|config-[^/]*|share|include)(/|$)")
# Some hosts reach their index through an authority of their own.
_TRUST = ("SSL_CERT_FILE", "PIP_CERT")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/os-release": 'PRETTY_NAME="The files of a test host"\n',
}


def engine(*arguments: str, runtime: str = "runc") -> list[str]:
    """A command line of podman."""
    return ["podman", "--runtime", runtime, "--cgroup-manager", "cgroupfs", *arguments]


@functools.cache
def gap() -> str:
    """Why no image can be built here; empty when one can."""
    if sys.platform != "linux":
        return "containers elsewhere are on a machine of their own"
    try:
        answer = subprocess.run(engine("info"), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no podman: {error}"
    return "" if answer.returncode == 0 else f"podman does not answer: {answer.stderr.strip()[-200:]}"


@functools.cache
def base_image() -> str:
    prefix = Path(sys.base_prefix).resolve()
    files = [*_programs(), *_libraries(prefix), *_certificates(), *_loader_cache()]
    content = "\n".join(f"{path} {path.stat().st_size}" for path in sorted(set(files)))
    name = f"localhost/belljar-base:{_digest(f'{_FOLDERS}{_FILES}{_TRUST}{prefix}{sys.version}{content}3')}"
    if not _exists(name):
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "root.tar"
            _pack(prefix, files, archive)
            changes = [f"ENV {variable}={path}" for variable in _TRUST for path in _certificates()]
            options = [word for change in changes for word in ("--change", change)]
            subprocess.run(engine("import", *options, str(archive), name), check=True, capture_output=True)
    return name


def build(tag: str, **arguments: str) -> str:
    """Build the Dockerfile and return the image's name; one of the same content is used again."""
    base = base_image()
    name = f"localhost/belljar-{tag}:{_digest(f'{base}{sorted(arguments.items())}{_sources()}')}"
    if not _exists(name):
        chosen = {"BASE": base, **arguments}
        command = engine(
            "build",
            *("--network", "host", *LIMITS, "--pull=never", "--tag", name),
            *(word for item in chosen.items() for word in ("--build-arg", "=".join(item))),
            *_index_options(),
            str(ROOT),
        )
        answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert answer.returncode == 0, f"{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    return name


def _exists(name: str) -> bool:
    return subprocess.run(engine("image", "exists", name), capture_output=True, check=False).returncode == 0


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _sources() -> str:
    paths = [ROOT / "Dockerfile", ROOT / "pyproject.toml", *sorted((ROOT / "src").rglob("*.py"))]
    return "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)


def _index_options() -> Iterator[str]:
    """What this host needs to reach its package index, and the cache of what it got from there before."""
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    cache.mkdir(parents=True, exist_ok=True)
    yield from ("--volume", f"{cache}:/root/.cache/uv")
    for path in ("/etc/pip.conf", "/etc/hosts", "/etc/resolv.conf"):
        if Path(path).is_file():
            yield from ("--volume", f"{path}:{path}:ro")


def _programs() -> Iterator[Path]:
    for name in _PROGRAMS:
        for folder in ("/usr/bin", "/usr/sbin"):
            if (path := Path(folder) / name).exists():
                yield path
                break


def _libraries(prefix: Path) -> Iterator[Path]:
    """What the programs, this Python and its modules are linked with, and what packages load by name."""
    modules = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    linked = [*map(str, _programs()), str(prefix / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")]
    folder = Path(_LIBRARY_FOLDER)
    named = [path for name in _LIBRARIES if (path := folder / name).exists()]
    answer = subprocess.run(
        ["ldd", *linked, *map(str, modules.glob("*.so")), *map(str, named)], capture_output=True, text=True, check=False
    )
    found = re.findall(r"^\s+(?:\S+ => )?(/(?:usr/)?lib\S+) \(", answer.stdout, re.MULTILINE)
    yield from (Path("/usr") / path.lstrip("/").removeprefix("usr/") for path in sorted(set(found)))
    yield from named


def _certificates() -> Iterator[Path]:
    path = Path("/etc/ssl/certs/ca-certificates.crt")
    if path.is_file():
        yield path


def _loader_cache() -> Iterator[Path]:
    """By which Python finds libseccomp."""
    path = Path("/etc/ld.so.cache")
    if path.is_file():
        yield path


def _pack(prefix: Path, files: Sequence[Path], archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            if (path := Path("/") / name).is_symlink():
                _add_link(tar, name, str(path.readlink()))
        for name, mode in _FOLDERS.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        for name, text in _FILES.items():
            _add_text(tar, name, text)
        for path in sorted(set(files)):
            tar.add(path.resolve(), str(path).lstrip("/"), recursive=False)
        _add_link(tar, "usr/bin/sh", "dash")
        # Where images of Python have it, and not below /root, which ordinary users cannot enter.
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        tar.add(prefix / "bin" / python, f"usr/local/bin/{python}")
        _add_link(tar, "usr/local/bin/python3", python)
        tar.add(prefix / "lib" / python, f"usr/local/lib/{python}", filter=_without_extras)
        for library in prefix.glob("lib/libpython*.so.*"):
            tar.add(library, f"{_LIBRARY_FOLDER}/{library.name}".lstrip("/"))


def _without_extras(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    inside = entry.name.removeprefix("usr/local/lib")
    if _LEFT_OUT.search(inside) or inside.endswith(".a"):
        return None
    entry.uid = entry.gid = 0
    return entry


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    import io

    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o644
    tar.addfile(entry, io.BytesIO(text.encode()))
