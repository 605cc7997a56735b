"""The process that makes the sandboxes of forks in bubblewrap's place: what it makes is the same, and when it fails
bubblewrap takes over."""

import asyncio
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import cast

import pytest
from forked_sandboxes import ForkedSandboxes, SandboxedProcess, nesting_provider
from trials import ENVIRONMENT, read_to_end, read_until, usable

from belljar.sandboxes.base import HOLD, HostFolder, Limits
from belljar.sandboxes.namespace import namespaces, sandbox_maker
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox
from belljar.sandboxes.namespace.sandbox_maker import SandboxMaker

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0,
        reason="bubblewrap makes all sandboxes of a server that root does not run",
    ),
]
by_maker = pytest.mark.parametrize("forks", ["maker"], indirect=True)

# What a session can see of its sandbox, without what differs from one to the next.
VIEW = """
import hashlib, os, socket, stat
def look(path):
    found = os.lstat(path)
    kind = stat.filemode(found.st_mode)
    target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
    return [path, kind, found.st_uid, found.st_rdev, target]
def content(path):
    try:
        text = open(path, "rb").read()
        return text.decode() if len(text) < 300 else hashlib.sha256(text).hexdigest()
    except OSError as error:
        return error.strerror
def options(line):
    left, _, right = line.partition(" - ")
    where, flags, kind = left.split()[4], left.split()[5], right.split()[0]
    sizes = sorted(word for word in right.split()[2].split(",") if word.startswith(("size", "mode", "ptmx")))
    return [where, flags, kind, sizes if kind in ("tmpfs", "devpts") else []]
files = []
levels = {"/": 1, "/dev": 3, "/etc": 1, "/sys": 9, "/run": 1, "/home": 2, "/var": 2, "/mnt": 1}
for top, names in levels.items():
    for folder, below, inside in os.walk(top):
        depth = folder.rstrip("/").count("/") - top.rstrip("/").count("/")
        files += [look(folder), *(look(os.path.join(folder, name)) for name in sorted(below + inside))]
        below[:] = sorted(below) if depth + 1 < names else []
def loopback():
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        return True
answer = {
    "files": sorted(map(list, {tuple(file) for file in files})),
    "etc": {name: content("/etc/" + name) for name in sorted(os.listdir("/etc"))},
    "mounts": sorted(map(options, open("/proc/self/mountinfo"))),
    "proc": [content(path) for path in ("/proc/meminfo", "/proc/keys")],
    "name": socket.gethostname(),
    "loopback": loopback(),
    "groups": open("/proc/self/cgroup").read().count("\\n"),
    "writable": [path for path in ("/", "/etc", "/dev", "/proc/sys/kernel/hostname", "/usr") if os.access(path, 2)],
    "shared": open("/mnt/shared/of-the-user").read(),
    "read only": os.statvfs("/mnt/shared").f_flag & 1,
}
"""


def holder_of(sandboxed: SandboxedProcess) -> Path:
    """The first process of its sandbox, as the host sees it."""
    assert isinstance(sandboxed.sandbox, NamespaceSandbox)
    return Path(f"/proc/{sandboxed.sandbox.holder().first_pid}")


def maker_of(parent: SandboxedProcess) -> SandboxMaker:
    assert isinstance(parent.sandbox, NamespaceSandbox)
    maker = parent.sandbox.holder().maker
    assert maker is not None
    return maker


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted of sandboxes that a maker could not make."""
    notes: list[str] = []
    note = SandboxMaker.note

    def noting(maker: SandboxMaker, complaint: str) -> None:
        notes.extend([complaint] if complaint else [])
        note(maker, complaint)

    monkeypatch.setattr(SandboxMaker, "note", noting)
    return notes


@by_maker
async def test_a_sandbox_that_is_only_held_open_is_made_without_bubblewrap(
    forks: ForkedSandboxes, refused: list[str]
) -> None:
    sandboxed = await forks.nested(await forks.parent())
    holder = holder_of(sandboxed)
    assert (holder / "cmdline").read_bytes() == b"sleep\0infinity\0"
    assert refused == []
    # Nothing of the host's is left to it, and it has no rights.
    assert list((holder / "fd").iterdir()) == []
    status = (holder / "status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


@by_maker
async def test_a_session_sees_what_it_sees_where_bubblewrap_made_it(forks: ForkedSandboxes, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "of-the-user").write_text("theirs")
    forks.folders = [HostFolder("shared", str(shared))]
    parent = await forks.parent()
    seen: list[dict[str, str]] = []
    for holding in (HOLD, ("sleep", "infinity")):
        spec = forks.spec()
        nested = await forks.provider.open_nested(spec, parent.sandbox)
        forks.opened.append(nested)
        sandboxed = await forks.enter(parent, nested, await forks.hold(nested, holding), spec)
        view = cast(dict[str, object], await sandboxed.ask(VIEW))
        own = str(sandboxed.spec.workspace.stat().st_uid)
        texts = {name: repr(what).replace(spec.session_id, "session") for name, what in view.items()}
        seen.append({name: text.replace(own, "own") for name, text in texts.items()})
    made, by_bubblewrap = seen
    assert made == by_bubblewrap


@by_maker
async def test_the_code_that_forks_cannot_look_into_the_maker(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    await forks.nested(parent)
    secret = forks.folder.parent / "secret"
    secret.write_text("of the host")
    code = f"""
found = []
for name in os.listdir('/proc'):
    if name.isdecimal() and b'sandbox_maker' in open('/proc/' + name + '/cmdline', 'rb').read():
        for path in ('root' + {str(secret)!r}, 'mem', 'environ', 'fd/0'):
            try:
                open('/proc/' + name + '/' + path, 'rb').read(1)
            except OSError as error:
                found.append(error.strerror)
            else:
                found.append(path)
answer = found
"""
    assert await parent.ask(code) == ["Permission denied"] * 4


@by_maker
async def test_sandboxes_outlive_a_maker_that_is_killed_and_the_next_one_has_another(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    first = maker_of(parent)
    os.kill(first.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while not first.has_ended:
            await asyncio.sleep(0)
    other = await forks.nested(parent)
    assert maker_of(parent) is not first
    for sandboxed in (one, other):
        assert (holder_of(sandboxed) / "comm").read_text() == "sleep\n"
        assert await sandboxed.ask("answer = 6 * 7") == 42
    await one.sandbox.aclose()
    assert await one.is_gone()


@by_maker
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("428, 429, 442", "428, 429, 9999"), id="an older Linux"),
        pytest.param(("_enter(mounts)", "raise OSError(1, 'no')"), id="a host that lets it enter nothing"),
        pytest.param(
            ("        _drop_privileges(seccomp)", "        os._exit(1)"),
            id="a first process that ends",
        ),
        pytest.param(("    root = RootFolder(descriptors)", "    os._exit(1)"), id="a maker that ends"),
    ],
)
async def test_where_it_cannot_make_a_sandbox_bubblewrap_does(
    forks: ForkedSandboxes,
    refused: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: tuple[str, str],
) -> None:
    monkeypatch.setattr(sandbox_maker, "PROCESS", changed(tmp_path, *change))
    parent = await forks.parent()
    for _ in range(2):
        sandboxed = await forks.nested(parent)
        assert (holder_of(sandboxed) / "comm").read_text() == "bwrap\n"
        assert await sandboxed.ask("answer = 6 * 7") == 42


@by_maker
async def test_a_maker_that_does_not_answer_is_not_waited_for_twice(
    forks: ForkedSandboxes, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    maker = maker_of(parent)
    (child,) = Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGSTOP)
    monkeypatch.setattr(sandbox_maker, "MAKING_S", 0.2)
    for _ in range(2):
        nested, _ = await forks.open_nested(parent.sandbox)
        assert isinstance(nested, NamespaceSandbox)
        assert Path(f"/proc/{nested.holder().first_pid}/comm").read_text() == "bwrap\n"
    assert refused == ["no answer in 0.2 s"]
    assert await one.ask("answer = 6 * 7") == 42
    os.kill(int(child), signal.SIGCONT)


@by_maker
async def test_a_sandbox_that_is_closed_before_it_is_made_is_ended(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    maker = maker_of(parent)
    (child,) = Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_text().split()
    nested = await forks.provider.open_nested(forks.spec(), parent.sandbox)
    os.kill(int(child), signal.SIGSTOP)
    task = asyncio.ensure_future(forks.hold(nested))
    while not maker._waiting:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nested.aclose()
    os.kill(int(child), signal.SIGCONT)
    other = await forks.nested(parent)  # its answer comes after that of the other one
    holders = {holder_of(sandboxed).name for sandboxed in (one, other)}
    async with asyncio.timeout(30):
        while set(Path(f"/proc/{child}/task/{child}/children").read_text().split()) != holders:
            await asyncio.sleep(0)


@by_maker
async def test_a_burst_needs_few_descriptors(forks: ForkedSandboxes, refused: list[str]) -> None:
    """More requests at once than fit into a socket, on a server that may open few files."""
    parent = await forks.parent()
    before = len(list(Path("/proc/self/fd").iterdir()))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60 * 8 + 250, limits[1]))
    try:
        await asyncio.gather(*(forks.open_nested(parent.sandbox) for _ in range(60)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused == []


@by_maker
async def test_a_killed_server_leaves_nothing_that_it_made(forks: ForkedSandboxes) -> None:
    reading, writing = os.pipe()
    sources = Path(namespaces.__file__).parents[3]
    sandbox = await usable("process").open(forks.spec())
    forks.opened.append(sandbox)
    server = await sandbox.spawn(
        [sys.executable, "-c", SERVER, str(writing), str(forks.folder)],
        environment={
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(sources), str(Path(__file__).parent), *sys.path]),
        },
        stdout=writing,
        stderr=writing,
        pass_fds=[writing],
    )
    os.close(writing)
    said = await read_until(reading, b"\n")
    holders = [int(word) for word in said.split()]
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in holders] == ["sleep\n"] * 2
    watched = [os.pidfd_open(pid) for pid in holders]
    os.kill(server.pid, signal.SIGKILL)
    assert await read_to_end(reading) == ""
    loop = asyncio.get_running_loop()
    for pidfd in watched:
        ended = loop.create_future()
        loop.add_reader(pidfd, lambda ended=ended: ended.done() or ended.set_result(None))
        async with asyncio.timeout(30):
            await ended
        loop.remove_reader(pidfd)
        os.close(pidfd)


SERVER = """
import asyncio, os, pathlib, sys
from forked_sandboxes import ForkedSandboxes
from belljar.sandboxes.base import HOLD, Limits
from belljar.sandboxes.namespace.provider import NamespaceProvider

async def main():
    pipe, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2]) / "within"
    folder.mkdir(mode=0o711)
    forks = ForkedSandboxes(NamespaceProvider(), folder, Limits(), HOLD)
    parent = await forks.parent()
    nested = [await forks.nested(parent), await forks.nested(parent)]
    print(*(one.sandbox.holder().first_pid for one in nested), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def changed(folder: Path, before: str, after: str) -> Path:
    """A copy of the maker's program, changed in one of its files."""
    copy = shutil.copytree(
        sandbox_maker.PROCESS, folder / "sandbox_maker", ignore=shutil.ignore_patterns("__pycache__")
    )
    (file,) = (file for file in copy.iterdir() if before in file.read_text())
    file.write_text(file.read_text().replace(before, after))
    return copy


def test_a_provider_is_there_for_these_tests() -> None:
    """Else all of them would be skipped where makers are meant to work."""
    assert nesting_provider().name == "namespace"
    assert Limits().memory_mb == 0
