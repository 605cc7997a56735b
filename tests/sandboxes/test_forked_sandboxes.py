"""A process of one sandbox in another, memory and all: as sealed there as if it had been started there."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked_sandboxes import ForkedSandboxes, SandboxedProcess, nesting_provider
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, read_to_end, read_until, run, usable

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import ForkableProvider, ForkedSandbox, Identity, Limits
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.namespace import hardening, namespaces, trial
from belljar.sandboxes.namespace import provider as namespace_provider
from belljar.sandboxes.namespace import sandbox as namespace_sandbox
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox
from belljar.sandboxes.seccomp import Filter
from waiting import until_blocking

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]
is_root = hasattr(os, "geteuid") and os.geteuid() == 0
for_root = pytest.mark.skipif(not is_root, reason="only root can give sessions users of their own")

PROCESSES = "answer = sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())"
NAMESPACES = "answer = {kind: os.readlink(f'/proc/self/ns/{kind}') for kind in sorted(os.listdir('/proc/self/ns'))}"
KINDS = {"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"}


def processes_in(sandboxed: SandboxedProcess) -> set[int]:
    """Who is in the pid namespace of a sandbox's process, by the host's numbers."""
    wanted = namespace_of(sandboxed.pid)
    return {pid for pid in pids() if namespace_of(pid) == wanted}


def holding(sandboxed: SandboxedProcess) -> set[int]:
    """What holds its sandbox open."""
    assert isinstance(sandboxed.sandbox, NamespaceSandbox)
    holder = sandboxed.sandbox.holder()
    return {holder.first_pid, holder.command_pid()}


def pids() -> set[int]:
    """Return the pids of all processes that are not zombies; reaping is their init's task."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and lives(entry)}


def lives(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def namespace_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


# What is inside


async def test_a_nested_sandbox_has_the_memory_of_its_parent_and_files_of_its_own(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    await parent.ask("kept = ['from the parent']")
    one, other = await forks.nested(parent), await forks.nested(parent)
    await one.ask("kept.append('one'); open('made', 'w').write('x')")
    assert await one.ask("answer = kept, sorted(os.listdir('.')), os.getcwd()") == [
        ["from the parent", "one"],
        ["made", one.spec.session_id],
        "/mnt/data",
    ]
    assert await other.ask("answer = kept, os.listdir('.')") == [["from the parent"], [other.spec.session_id]]
    assert (one.spec.workspace / "made").read_text() == "x"


async def test_every_namespace_is_its_own(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    sandboxed_processes = [parent, await forks.nested(parent), await forks.nested(parent)]
    sandboxed_processes.append(await forks.nested(sandboxed_processes[1]))
    seen = [await sandboxed.ask(NAMESPACES) for sandboxed in sandboxed_processes]
    for kind in KINDS:
        found = {str(namespaces[kind]) for namespaces in seen if isinstance(namespaces, dict)}
        assert len(found | {str(Path(f"/proc/self/ns/{kind}").readlink())}) == 5, kind


async def test_nothing_of_any_privilege_is_left_and_the_filter_holds(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    nested = await forks.nested(parent)
    code = "answer = [line.split()[1] for line in open('/proc/self/status') if line[:3] == 'Cap' or 'NoNew' in line]"
    for sandboxed in (parent, nested, await forks.nested(nested)):
        assert await sandboxed.ask(code) == ["0" * 16] * 5 + ["1"]
        assert await sandboxed.ask("answer = libc.unshare(0x10000000)") == -1
        assert await sandboxed.ask("answer = libc.setns(os.pidfd_open(os.getpid()), 0x7e020000)") == -1
    assert "Error" in str(await nested.ask("os.setuid(0)"))


async def test_no_process_of_another_sandbox_is_seen(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one, _ = await forks.nested(parent), await forks.nested(parent)
    # bubblewrap, what holds the sandbox open, and the process itself.
    assert await one.ask(PROCESSES) == [1, 2, 3]
    clone = await forks.nested(one)
    assert await clone.ask(PROCESSES) == [1, 2, 3]


@for_root
async def test_a_nested_sandbox_of_roots_is_a_user_of_its_own(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one, other = await forks.nested(parent), await forks.nested(parent)
    uids = [sandboxed.spec.workspace.stat().st_uid for sandboxed in (parent, one, other)]
    assert len({0, *uids}) == 4
    await one.ask("open('made', 'w').close()")
    assert (one.spec.workspace / "made").stat().st_uid == uids[1]
    assert await one.ask("answer = os.getresuid(), os.getresgid(), os.getgroups()") == [
        [uids[1]] * 3,
        [uids[1]] * 3,
        [],
    ]
    clone = await forks.nested(one)
    assert clone.spec.workspace.stat().st_uid == uids[1]


async def test_what_it_inherits_is_limited_as_the_nested_sandbox_is(forks: ForkedSandboxes) -> None:
    sandboxed = await forks.nested(await forks.parent())
    code = "import resource; answer = resource.getrlimit(7), resource.getrlimit(4), len(os.sched_getaffinity(0))"
    assert await sandboxed.ask(code) == [[256, 256], [0, 0], 1]


@pytest.mark.parametrize("joins", [True, False], ids=["by itself", "moved"])
async def test_who_enters_is_in_the_control_groups_of_the_nested_sandbox(forks: ForkedSandboxes, joins: bool) -> None:
    _need_groups()
    parent = await forks.parent()
    sandboxed = await forks.nested(parent, joins=joins)
    group = sandboxed.sandbox._enforcement.group  # type: ignore[attr-defined]
    assert group.has(sandboxed.pid)
    assert (
        await sandboxed.ask("answer = [line for line in open('/proc/self/cgroup') if line.strip()[-2:] != ':/']") == []
    )


async def test_the_memory_of_a_nested_sandbox_is_limited(forks: ForkedSandboxes) -> None:
    _need_groups()
    sandboxed = await forks.nested(await forks.parent())
    other = await forks.nested(sandboxed)
    assert await sandboxed.ask("much = bytearray(512 * 1024 * 1024)") is None
    (incident,) = sandboxed.sandbox.incidents()
    assert incident.kind == "out_of_memory"
    assert other.sandbox.incidents() == []
    assert await other.ask("answer = 1") == 1


def _need_groups() -> None:
    if Enforcer().warning:
        pytest.skip("control groups cannot be written here")


# What the host looks like from a sandbox that is nested


async def test_the_code_of_a_parent_sees_nothing_of_the_host_while_nested_sandboxes_are_made(
    forks: ForkedSandboxes,
) -> None:
    """What makes a nested sandbox is a process of its pid namespace: a child looks into each one as soon as it is
    there."""
    sandboxed = await forks.nested(await forks.parent())
    secret = forks.folder.parent / "secret"
    secret.write_text("of the host")
    named = f"of-the-host-{os.getpid()}"
    host = socket.socket(socket.AF_UNIX)
    host.bind(f"\0{named}")
    code = f"""
reading, writing = os.pipe()
watcher = os.fork()
if watcher == 0:
    os.close(reading)
    known, found = set(map(str, (1, 2, os.getpid(), os.getppid()))), set()
    signal.signal(signal.SIGTERM, lambda *_: (os.write(writing, repr(sorted(found)).encode()), os._exit(0)))
    os.write(writing, b'!')
    while True:
        for name in os.listdir('/proc'):
            if name.isdecimal() and name not in known:
                for path in ({str(secret)!r}, {str(forks.folder)!r} + '/session-0', '/boot', '/etc/shadow'):
                    if os.path.lexists('/proc/' + name + '/root' + path):
                        found.add(path)
                try:
                    if 'hunter' in open('/proc/' + name + '/environ').read():
                        found.add('environ')
                    if '@{named}' in open('/proc/' + name + '/net/unix').read():
                        found.add('sockets')
                except OSError:
                    pass
os.close(writing)
os.read(reading, 1)
"""
    with host:
        assert f"@{named}" in Path("/proc/net/unix").read_text()
        assert await sandboxed.ask(code) is None
        for _ in range(5):
            await forks.open_nested(sandboxed.sandbox)
    assert await sandboxed.ask("os.kill(watcher, signal.SIGTERM); answer = os.read(reading, 9999).decode()") == "[]"


async def test_only_what_is_in_a_nested_sandbox_stays_in_sight_of_its_parent(forks: ForkedSandboxes) -> None:
    sandboxed = await forks.nested(await forks.parent())
    own = await sandboxed.ask(PROCESSES)
    assert isinstance(own, list)
    await forks.open_nested(sandboxed.sandbox)
    shown: object = []
    async with asyncio.timeout(30):
        # Its own, and the first process of the nested sandbox with its command, which is there a moment later.
        while not isinstance(shown, list) or len(shown) < len(own) + 2:
            shown = await sandboxed.ask(PROCESSES)
    assert len(shown) == len(own) + 2
    assert not await sandboxed.ask(f"answer = [n for n in {shown} if os.path.lexists(f'/proc/{{n}}/root/boot')]")


# Ends


async def test_killing_a_nested_sandbox_ends_all_of_it_and_nothing_else(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one, other = await forks.nested(parent), await forks.nested(parent)
    await one.ask("os.fork() or (os.setsid(), os.fork() or signal.pause())")
    inside = processes_in(one)
    await one.sandbox.kill()
    assert await one.is_gone()
    assert not inside & pids()
    assert await one.process.wait() == -signal.SIGKILL
    assert await other.ask("answer = 1") == 1
    assert await parent.ask("answer = 1") == 1


async def test_a_parent_that_is_closed_first_leaves_its_nested_sandboxes_alone(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    clone = await forks.nested(one)
    await parent.sandbox.aclose()
    assert await parent.is_gone()
    await one.sandbox.aclose()
    await one.sandbox.aclose()
    assert await one.is_gone()
    assert await clone.ask(PROCESSES) == [1, 2, 3]
    await clone.sandbox.aclose()
    assert await clone.is_gone()
    assert await parent.process.wait() == -signal.SIGKILL


async def test_a_sandbox_of_which_some_are_spared_stays_open_for_them(forks: ForkedSandboxes) -> None:
    sandboxed = await forks.nested(await forks.parent())
    code = "answer = [p for p in (os.fork() for _ in range(3)) if p or signal.pause()]"
    children = await sandboxed.ask(code)
    assert isinstance(children, list)
    inside = processes_in(sandboxed)
    (spared,) = [pid for pid in inside if _number(pid) == children[1]]
    await sandboxed.sandbox.kill([spared])
    assert inside & pids() == {spared, *holding(sandboxed)}
    await sandboxed.sandbox.kill()
    assert not inside & pids()


async def test_a_spared_process_can_still_be_nested_in(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    copy = await forks.copy(one)
    await one.sandbox.kill([copy.pid])
    assert await one.is_gone()
    clone = await forks.nested(copy)
    assert await clone.ask("answer = 6 * 7") == 42
    assert await parent.ask("answer = 1") == 1


async def test_a_relay_of_the_command_outlives_what_is_killed_but_not_the_sandbox(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    reading, writing = os.pipe()
    nested = await forks.provider.open_nested(forks.spec(), parent.sandbox)
    forks.opened.append(nested)
    relay = f"""
import os, signal
if os.fork():
    os.closerange(0, 100)
    os.execvp("sleep", ["sleep", "infinity"])
os.setsid()
os.write({writing}, b"relaying")
signal.pause()
"""
    process = await forks.hold(nested, [PYTHON, "-I", "-S", "-c", relay], [writing])
    os.close(writing)
    sandboxed = await forks.enter(parent, nested, process, forks.spec())
    assert await read_until(reading, b"relaying") == b"relaying"
    copy = await forks.copy(sandboxed)
    await nested.kill([copy.pid])
    assert await sandboxed.is_gone()
    assert await copy.ask(PROCESSES.replace("answer =", "answer = len(") + ")") == 4
    await nested.kill()
    assert await read_to_end(reading) == ""


async def test_processes_that_replace_each_other_are_ended(forks: ForkedSandboxes) -> None:
    sandboxed = await forks.nested(await forks.parent())
    copy = await forks.copy(sandboxed)
    replace_each_other = """
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)
            os.sched_yield()
"""
    await sandboxed.ask(replace_each_other)
    await sandboxed.sandbox.kill([copy.pid])
    assert processes_in(copy) == {copy.pid, *holding(copy)}
    assert await copy.ask("answer = os.waitpid(os.fork() or os._exit(7), 0)[1]") == 7 << 8
    assert copy.sandbox.incidents() == []


async def test_the_death_of_a_parent_is_the_end_of_all(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    clone = await forks.nested(one)
    assert isinstance(parent.sandbox, NamespaceSandbox)
    os.kill(parent.sandbox.holder().first_pid, signal.SIGKILL)
    for sandboxed in (parent, one, clone):
        assert await sandboxed.is_gone()
        assert await sandboxed.process.wait() == -signal.SIGKILL
    with pytest.raises(SandboxUnavailable):
        await forks.nested(parent)


async def test_a_killed_sandbox_can_be_opened_again(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    await one.sandbox.kill()
    assert isinstance(one.sandbox, ForkedSandbox)
    process = await forks.hold(one.sandbox)
    again = await forks.enter(parent, one.sandbox, process, one.spec)
    assert await again.ask("answer = os.listdir('.')") == [one.spec.session_id]


async def test_many_at_once_leave_nothing_behind(forks: ForkedSandboxes) -> None:
    async def cycle(parent: SandboxedProcess) -> None:
        sandboxes = await asyncio.gather(*(forks.open_nested(parent.sandbox) for _ in range(4)))
        one = await forks.nested(parent)
        clone = await forks.nested(one)
        for nested in (one.sandbox, clone.sandbox, *(nested for nested, _ in sandboxes)):
            await nested.aclose()
        for peer in forks.peers[2:]:
            peer.close()

    at_first = _children()
    parent = await forks.parent()
    await cycle(parent)
    before = _left(parent)
    await cycle(parent)
    assert _left(parent) == before
    await parent.sandbox.aclose()
    assert _children() == at_first


def _children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def _left(parent: SandboxedProcess) -> object:
    assert isinstance(parent.sandbox, NamespaceSandbox)
    group = parent.sandbox._enforcement.group
    groups = {folder.parent for folder in group.folders.values()} if group else set[Path]()
    return (
        {entry.name for entry in Path("/proc/self/fd").iterdir()},
        _children(),
        {folder: len([entry for entry in folder.iterdir() if entry.is_dir()]) for folder in groups},
        [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(parent.spec.workspace) in line],
    )


async def test_a_spawn_that_is_cancelled_leaves_nothing(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    await forks.nested(parent)
    before = _left(parent)
    nested = await forks.provider.open_nested(forks.spec(), parent.sandbox)
    task = asyncio.get_running_loop().create_task(forks.hold(nested))
    async with asyncio.timeout(DEADLINE_S):
        # `until` could look too late: the spawn may be over some milliseconds after it begins.
        while not nested._processes:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nested.aclose()
    assert _left(parent) == before


async def test_the_death_of_the_server_is_the_end_of_all(forks: ForkedSandboxes) -> None:
    """What makes the sandboxes is killed, not asked."""
    reading, writing = os.pipe()
    sources = Path(namespaces.__file__).parents[2]
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
    assert await read_until(reading, b"xx") == b"xx"
    os.kill(server.pid, signal.SIGKILL)
    assert await read_to_end(reading) == ""


SERVER = """
import asyncio, os, pathlib, sys
from forked_sandboxes import PYTHON, ForkedSandboxes
from belljar.sandboxes.base import Limits
from belljar.sandboxes.namespace.provider import NamespaceProvider

async def main():
    pipe, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2]) / "within"
    folder.mkdir(mode=0o711)
    forks = ForkedSandboxes(NamespaceProvider(), folder, Limits())
    outer = await forks.parent()
    for parent in (outer, await forks.nested(outer)):
        nested = await forks.provider.open_nested(forks.spec(), parent.sandbox)
        holding = f"import os, signal; os.write({pipe}, b'x'); signal.pause()"
        await forks.hold(nested, [PYTHON, "-I", "-S", "-c", holding], [pipe])
    os.close(pipe)
    await asyncio.Event().wait()

asyncio.run(main())
"""


# What is refused, and what the host must have


async def test_a_nested_sandbox_that_would_be_too_deep_is_refused(
    forks: ForkedSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await forks.parent()
    assert isinstance(parent.sandbox, NamespaceSandbox)
    one = await forks.nested(parent)
    assert isinstance(one.sandbox, NamespaceSandbox)
    monkeypatch.setattr(namespaces, "MAX_LEVELS", one.sandbox.level.depth + 1)
    with pytest.raises(SandboxUnavailable, match="deep"):
        await forks.nested(one)
    assert not one.sandbox._nested


async def test_as_deep_as_is_allowed_works(forks: ForkedSandboxes) -> None:
    sandboxed = await forks.parent()
    while sandboxed.sandbox.level.depth + 2 <= namespaces.MAX_LEVELS:  # type: ignore[attr-defined]
        sandboxed = await forks.nested(sandboxed)
    with pytest.raises(SandboxUnavailable, match=f"Linux nests {namespaces.MAX_LEVELS}"):
        await forks.nested(sandboxed)
    assert await sandboxed.ask("answer = 1") == 1


async def test_sessions_whose_folders_are_not_below_tmp_are_forked_too() -> None:
    """Folders of the tests are below /tmp, those of users are not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        forks = ForkedSandboxes(nesting_provider(), Path(folder), Limits())
        try:
            one = await forks.nested(await forks.parent())
            await one.ask("kept = 1")
            clone = await forks.nested(one)
            assert await clone.ask("answer = kept") == 1
            # Inside, /var/tmp is a link to /tmp, unless something that a session has to see lies below it.
            shown = Path(folder, "shown")
            shown.mkdir()
            (shown / "file").write_text("content")
            shown.chmod(0o755)
            other = await forks.parent(readable=[shown])
            assert await other.ask(f"answer = open('{shown}/file').read()") == "content"
        finally:
            await forks.aclose()


async def test_an_ordinary_sandbox_cannot_be_nested_in(forks: ForkedSandboxes) -> None:
    sandbox = await forks.provider.open(forks.spec())
    forks.opened.append(sandbox)
    with pytest.raises(SandboxUnavailable, match="no parent"):
        await forks.provider.open_nested(forks.spec(), sandbox)


@for_root
async def test_a_nested_sandbox_of_a_session_is_the_same_user(forks: ForkedSandboxes) -> None:
    one = await forks.nested(await forks.parent())
    with pytest.raises(SandboxUnavailable, match="cannot run as user 70000"):
        await forks.provider.open_nested(forks.spec(Identity(70000, 70000)), one.sandbox)


@for_root
async def test_trees_below_folders_of_roots_alone_are_shown(forks: ForkedSandboxes, tmp_path: Path) -> None:
    tree = tmp_path / "private" / "deeper" / "tree"
    tree.mkdir(parents=True)
    (tree / "file").write_text("shown")
    (tmp_path / "private" / "hidden").write_text("hidden")
    (tree.parent.parent).chmod(0o700)
    (tmp_path / "link").symlink_to(tree.parent)
    parent = await forks.parent(readable=[tree, tmp_path / "link" / "tree"])
    one = await forks.provider.open_nested(forks.spec(readable=[tree, tmp_path / "link" / "tree"]), parent.sandbox)
    forks.opened.append(one)
    code = f"print(*(open(path + '/file').read() for path in ({str(tree)!r}, {str(tmp_path / 'link' / 'tree')!r})))"
    assert (await run(one, code)).output == "shown shown\n"
    assert (await run(one, f"import os; print(os.listdir({str(tree.parent.parent)!r}))")).output == "['deeper']\n"


@for_root
async def test_folders_that_no_sandbox_gets_through_are_named(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    spec = forks.spec()
    spec.workspace.parent.chmod(0o700)
    with pytest.raises(SandboxUnavailable) as refusal:
        await forks.provider.open_nested(spec, parent.sandbox)
    assert str(spec.workspace.parent) in refusal.value.message
    assert refusal.value.hint == f"chmod o+x {spec.workspace.parent}"
    forks.folder.chmod(0o700)
    with pytest.raises(SandboxUnavailable, match=str(forks.folder)):
        await forks.provider.open_forkable(replace(forks.spec(), nested_folder=forks.folder))


def test_a_provider_that_nested_sandboxes_says_so() -> None:
    assert isinstance(NamespaceProvider(), ForkableProvider)
    assert not isinstance(usable("process"), ForkableProvider)


def _without_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hardening, "load_filter", lambda: Filter(complaint="libseccomp cannot be loaded (none)"))


def _without_tool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trial, "find_tool", lambda name: "" if name == "nsenter" else f"/usr/bin/{name}")


def _on_an_old_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trial.platform, "release", lambda: "5.4.0-generic")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_filter, "system calls are not filtered: libseccomp cannot be loaded"),
        (_without_tool, "nsenter is not installed"),
        (_on_an_old_kernel, "Linux 5.4.0-generic is older than 5.8"),
    ],
)
def test_what_the_host_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    usable("namespace")
    spoil(monkeypatch)
    assert words in NamespaceProvider().no_nesting_reason()


def test_what_a_trial_finds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespace")
    monkeypatch.setattr(namespace_sandbox, "ALL_NAMESPACES", 0x7E020000 ^ 0x00020000)
    assert "setns: Operation not permitted" in NamespaceProvider().no_nesting_reason()


def test_a_host_that_was_too_busy_for_the_trial_is_tried_again_in_the_background_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usable("namespace")
    answers = iter([trial.NO_ANSWER, ""])
    monkeypatch.setattr(namespace_provider, "try_nested", lambda _: next(answers))
    monkeypatch.setattr(namespace_provider, "gap_of_host", lambda: "")
    monkeypatch.setattr(namespace_provider, "_RETRY_S", 0.0)
    caplog.set_level("WARNING", "belljar")
    provider = NamespaceProvider()
    assert provider.no_nesting_reason() == trial.NO_ANSWER
    until_blocking(lambda: provider.no_nesting_reason() == "")
    assert ["for now" in caplog.messages[0], "from now on" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


@for_root
async def test_root_without_users_for_its_sessions_nested_sandboxes_or_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable("namespace")
    monkeypatch.setattr(hardening, "find_host_users", lambda: None)
    provider = NamespaceProvider()
    assert provider.take_identity() is None
    assert provider.no_nesting_reason() == ""


def _number(pid: int) -> int:
    """Its pid as its own namespace counts."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid")]
    return int(line.split()[-1])
