"""A real conda environment without its registry: packages made here, installed by rattler, which pixi is made of."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

PLACEHOLDER = "/a_place_where_packages_are_built_" + 80 * "x"
_SYSTEM = Path("/usr/bin/python3")


class Channel:
    """A folder of packages that installers of conda can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return self._folder.absolute().as_uri()

    def add(
        self,
        name: str,
        version: str,
        files: Mapping[str, bytes],
        *,
        links: Mapping[str, str] = {},
        depends: Sequence[str] = (),
        is_python: bool = False,
        entry_points: Sequence[str] = (),
        claimed: Mapping[str, bytes] = {},
    ) -> None:
        """`PLACEHOLDER` in a file stands for the prefix that it is installed into; what is claimed is not inside."""
        subdir = "noarch" if is_python else "linux-64"
        index = {"name": name, "version": version, "build": "0", "build_number": 0, "depends": [*depends]}
        index |= {"subdir": subdir, "timestamp": 1_700_000_000_000, **({"noarch": "python"} if is_python else {})}
        paths = [
            {"_path": path, "path_type": "hardlink", "sha256": hashlib.sha256(content).hexdigest()}
            | {"size_in_bytes": len(content)}
            | ({"prefix_placeholder": PLACEHOLDER, "file_mode": "text"} if PLACEHOLDER.encode() in content else {})
            for path, content in {**files, **claimed}.items()
        ]
        paths += [{"_path": path, "path_type": "softlink"} for path in links]
        described = {
            "info/index.json": json.dumps(index).encode(),
            "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
            "info/files": "\n".join([*files, *links]).encode(),
        }
        if entry_points:
            link = {"noarch": {"type": "python", "entry_points": [*entry_points]}, "package_metadata_version": 1}
            described["info/link.json"] = json.dumps(link).encode()
        file = self._folder / subdir / f"{name}-{version}-0.tar.bz2"
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:bz2", compresslevel=1) as archive:
            for path, content in {**files, **described}.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(content), 0o755
                archive.addfile(member, io.BytesIO(content))
            for path, target in links.items():
                member = tarfile.TarInfo(path)
                member.type, member.linkname = tarfile.SYMTYPE, target
                archive.addfile(member)

    def add_python(self) -> None:
        """The system's own interpreter as a package; its library stays where every sandbox shows it."""
        if not _SYSTEM.exists():
            pytest.skip(f"no {_SYSTEM} to make a package of")
        code = "import os, platform; print(os.path.dirname(os.__file__), platform.python_version())"
        told = subprocess.run([_SYSTEM, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
        library, version = Path(told[0]), told[1]
        python = f"python{version.rpartition('.')[0]}"
        own = ("site-packages", "dist-packages", "sitecustomize.py", "__pycache__", "EXTERNALLY-MANAGED")
        links = {f"lib/{python}/{entry.name}": str(entry) for entry in library.iterdir() if entry.name not in own}
        # Linux distributions have packages elsewhere than conda has them.
        custom = f"import os, site, sys\nsite.addsitedir(os.path.join(sys.prefix, 'lib/{python}/site-packages'))\n"
        files = {f"bin/{python}": _SYSTEM.resolve().read_bytes(), f"lib/{python}/sitecustomize.py": custom.encode()}
        self.add("python", version, files, links={"bin/python": python, **links})
        self.site_packages = f"lib/{python}/site-packages"

    async def index(self) -> None:
        """Write down what the channel has, as its server would."""
        rattler = pytest.importorskip("rattler", reason="py-rattler is not installed")
        await rattler.index.index_fs(self._folder, write_zst=False, write_shards=False)

    async def install(self, prefix: Path, *specs: str, cache: Path) -> None:
        """Solve and install as pixi does."""
        rattler = pytest.importorskip("rattler", reason="py-rattler is not installed")
        await self.index()
        records = await rattler.solve([self.url], specs, platforms=["linux-64", "noarch"])
        await rattler.install(records, target_prefix=prefix, cache_dir=cache, show_progress=False)


def compiled(source: str, folder: Path, name: str, *options: str) -> bytes:
    """A library out of C, which finds others beside itself as those of conda do."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a library with")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / name), f"-Wl,-soname,{name}", *options]
    subprocess.run([*command, "-Wl,-rpath,$ORIGIN"], input=source, text=True, check=True)
    return (folder / name).read_bytes()


def python_package(name: str, version: str, files: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a package for any Python."""
    information = f"site-packages/{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents = {f"site-packages/{path}": text for path, text in files.items()}
    record = "".join(f"{path},,\n" for path in files)
    contents |= {f"{information}/METADATA": metadata, f"{information}/RECORD": record}
    return {path: text.encode() for path, text in contents.items()}
