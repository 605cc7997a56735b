"""Limits of a sandbox, hit from inside: what is refused, what is told, and that nothing stays behind."""

import os
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from anyio import run_process
from trials import PYTHON, READABLE, run, usable

from belljar.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.server_groups import PREFIX
from belljar.sandboxes.limits.systemd_scope import find_control_groups
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.sandboxes.process import ProcessProvider

pytestmark = pytest.mark.anyio

EAT = "held = []\nwhile len(held) < 100: held.append(bytearray(b'x' * (10 << 20)))\nprint('ate all')"
FORK = """
import os, signal
children, error = [], None
try:
    while len(children) < 500:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError as refusal:
    error = refusal.errno
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(len(children), error)
"""
FILL = """
for path in {paths}:
    try:
        with open(path, 'wb') as file:
            for _ in range(40):
                file.write(bytes(1 << 20))
                file.flush()
        print(path, 'full size')
    except OSError as error:
        print(path, error.errno)
"""

OF_A_SERVICE = """
import asyncio, os, subprocess, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from belljar.sandboxes.base import Limits
from belljar.sandboxes.limits.enforcement import Enforcer

async def main():
    enforcement = Enforcer().enforce("s", Limits(memory_mb=4000))
    eater = [sys.executable, "-c", "print(len(bytes(b'x' * (200 << 20))))"]
    died = subprocess.run(enforcement.limited_command(eater)).returncode
    print(died, [incident.detail for incident in enforcement.incidents()])
    await enforcement.release()

asyncio.run(main())
"""

Open = Callable[[Provider, Limits], Awaitable[Sandbox]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    sandboxes: list[Sandbox] = []

    async def open_(provider: Provider, limits: Limits) -> Sandbox:
        folder = tmp_path / f"session-{len(sandboxes)}"
        for name in ("workspace", "scratch", "home"):
            (folder / name).mkdir(parents=True)
        spec = SandboxSpec(
            folder.name, folder / "workspace", folder / "scratch", folder / "home", READABLE, limits=limits
        )
        sandboxes.append(await provider.open(spec))
        return sandboxes[-1]

    yield open_
    for sandbox in sandboxes:
        await sandbox.aclose()


@pytest.fixture(params=["namespace", "process"])
def grouped(request: pytest.FixtureRequest) -> Provider:
    """A provider on a host whose control groups can be written."""
    if {*find_control_groups().usable()} != {"memory", "cpu", "pids"}:
        pytest.skip("control groups cannot be written here")
    return usable(request.param)


@pytest.fixture(params=["namespace", "process"])
def groupless(request: pytest.FixtureRequest) -> Provider:
    """A provider that finds no control groups."""
    usable(request.param)
    kinds = {"namespace": NamespaceProvider, "process": ProcessProvider}
    return kinds[request.param](Enforcer(ControlGroups("none")))


async def test_want_of_memory_kills_and_is_told_with_limit_and_peak(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(memory_mb=96))
    outcome = await run(sandbox, EAT)
    assert (outcome.status, outcome.output) == (-9, "")
    (incident,) = sandbox.incidents()
    assert (incident.kind, incident.detail) == ("out_of_memory", "used 96 MB, the limit is 96 MB")
    assert sandbox.incidents() == []
    assert sandbox.memory_peak_mb() > 90
    assert (await run(sandbox, "print('again')")).output == "again\n"
    assert sandbox.memory_peak_mb() < 60


async def test_sessions_stay_within_the_limit_that_an_operator_gives_the_server() -> None:
    offer = find_control_groups()
    if offer.is_unified or "memory" not in offer.usable():
        pytest.skip("on control groups v2 systemd gives the server a group, with the limits that it had")
    service = offer.folders["memory"] / f"service-{os.getpid()}"
    service.mkdir()
    try:
        (service / "memory.limit_in_bytes").write_text(str(150 << 20))
        (service / "memory.memsw.limit_in_bytes").write_text(str(150 << 20))
        ran = await run_process([sys.executable, "-c", OF_A_SERVICE, str(service)], check=False)
        assert ran.returncode == 0, ran.stderr.decode()
        assert ran.stdout.decode().startswith("-9 ['used "), ran.stdout
        assert "what it runs in (service, container, machine) had no more" in ran.stdout.decode()
        assert [path for path in service.iterdir() if path.is_dir()] == []
    finally:
        service.rmdir()


async def test_a_greedy_child_is_killed_and_its_parent_lives(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(memory_mb=96))
    code = f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {EAT!r}]).returncode)"
    assert (await run(sandbox, code)).output == "-9\n"
    assert [incident.kind for incident in sandbox.incidents()] == ["out_of_memory"]


async def test_memory_of_all_processes_counts_together(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(memory_mb=96))
    code = (
        "import os\nreading, writing = os.pipe()\n"
        "if os.fork():\n os.close(writing); os.read(reading, 1); held = b'x' * (60 << 20); print('both')\n"
        "else:\n held = b'x' * (60 << 20); os.write(writing, b'.'); import signal; signal.pause()\n"
    )
    await run(sandbox, code)
    assert [incident.kind for incident in sandbox.incidents()] == ["out_of_memory"]


async def test_a_fork_bomb_is_refused_and_the_sandbox_stays_usable(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(processes=24))
    count, error = (await run(sandbox, FORK)).output.split()
    assert 5 < int(count) < 24
    assert int(error) == 11
    (incident,) = sandbox.incidents()
    assert (incident.kind, incident.detail) == (
        "too_many_processes",
        "wanted more than 24 processes and threads, the limit",
    )
    assert (await run(sandbox, "print('again')")).output == "again\n"


async def test_a_share_of_a_processor_is_kept_to(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(cpus=0.25))
    code = (
        "import time\nbegan, used = time.monotonic(), time.process_time()\n"
        "while time.monotonic() - began < 1.0: pass\nprint(time.process_time() - used, time.monotonic() - began)"
    )
    used_s, wall_s = map(float, (await run(sandbox, code)).output.split())
    # A period of 100 ms may be used up at each end.
    assert used_s <= 0.25 * wall_s + 0.06


async def test_code_sees_as_many_processors_as_it_may_use(grouped: Provider, opened: Open) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor only")
    sandbox = await opened(grouped, Limits(cpus=1))
    code = "import os\nprint(os.cpu_count(), len(os.sched_getaffinity(0)), os.sysconf('SC_NPROCESSORS_ONLN'))"
    seen = (await run(sandbox, code)).output.split()
    assert seen[1] == "1"
    if grouped.isolates:
        assert seen == ["1", "1", "1"]


async def test_sandboxes_with_a_processor_each_are_spread(grouped: Provider, opened: Open) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor only")
    code = "import os\nprint(*os.sched_getaffinity(0))"
    places = {(await run(await opened(grouped, Limits(cpus=1)), code)).output for _ in range(2)}
    assert len(places) == 2


async def test_code_sees_as_much_memory_as_it_may_use(opened: Open) -> None:
    sandbox = await opened(usable("namespace"), Limits(memory_mb=512))
    code = "print(*(line.split()[1] for line in open('/proc/meminfo') if line.startswith(('MemT', 'MemA', 'SwapT'))))"
    assert (await run(sandbox, code)).output.split() == [str(512 * 1024), str(512 * 1024), "0"]


async def test_temporary_folders_have_a_size(opened: Open) -> None:
    sandbox = await opened(usable("namespace"), Limits(temporary_mb=8))
    paths = ["/tmp/file", "/dev/shm/file", f"{sandbox.home}/file", "/run/file"]
    outcome = await run(sandbox, FILL.format(paths=paths))
    assert outcome.output == "".join(f"{path} 28\n" for path in paths)


async def test_what_is_in_temporary_folders_counts_as_memory(grouped: Provider, opened: Open) -> None:
    if not grouped.isolates:
        pytest.skip("its temporary folder is on disk")
    sandbox = await opened(grouped, Limits(memory_mb=64, temporary_mb=512))
    await run(sandbox, "with open('/tmp/file', 'wb') as file:\n for _ in range(200): file.write(bytes(1 << 20))")
    assert [incident.kind for incident in sandbox.incidents()] == ["out_of_memory"]


async def test_one_file_cannot_be_larger_than_the_disk_limit(groupless: Provider, opened: Open) -> None:
    sandbox = await opened(groupless, Limits(disk_mb=5))
    assert (await run(sandbox, FILL.format(paths=["big"]))).output == "big 27\n"


async def test_open_files_are_limited(groupless: Provider, opened: Open) -> None:
    sandbox = await opened(groupless, Limits(open_files=64))
    code = (
        "held = []\ntry:\n while len(held) < 500: held.append(open('/dev/null'))\n"
        "except OSError as error: print(error.errno, len(held) < 64)"
    )
    assert (await run(sandbox, code)).output == "24 True\n"


async def test_no_core_is_dumped(groupless: Provider, opened: Open) -> None:
    sandbox = await opened(groupless, Limits())
    assert (await run(sandbox, "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))")).output == "(0, 0)\n"


async def test_without_groups_memory_is_limited_for_each_process(groupless: Provider, opened: Open) -> None:
    sandbox = await opened(groupless, Limits(memory_mb=200))
    outcome = await run(sandbox, EAT)
    assert outcome.status == 1
    assert "MemoryError" in outcome.output
    assert sandbox.incidents() == []


async def test_without_groups_processes_are_counted_where_the_session_has_a_user(opened: Open) -> None:
    usable("namespace")
    sandbox = await opened(NamespaceProvider(Enforcer(ControlGroups("none"))), Limits(processes=24))
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NPROC)[0])"
    limit = int((await run(sandbox, code)).output)
    if limit != 24:
        pytest.skip("the session shares a user with others here")
    count, error = (await run(sandbox, FORK)).output.split()
    assert (int(count) < 24, int(error)) == (True, 11)


async def test_a_daemon_that_leaves_everything_behind_ends_with_its_group(grouped: Provider, opened: Open) -> None:
    sandbox = await opened(grouped, Limits(processes=30))
    reading, writing = os.pipe()
    # Its session, its parent and its environment are all gone; only the group still knows it.
    daemon = f"import os, signal; os.write({writing}, b'up'); signal.pause()"
    code = (
        f"import os\nif os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
        f" os.execve({PYTHON!r}, [{PYTHON!r}, '-c', {daemon!r}], {{}})\nos.wait()"
    )
    await run_passing(sandbox, code, writing)
    os.close(writing)
    # Namespaces end with their first process: there the daemon may not even have come up.
    assert os.read(reading, 10) == b"up" or grouped.isolates
    await sandbox.aclose()
    assert os.read(reading, 10) in (b"", b"up")
    os.close(reading)


async def run_passing(sandbox: Sandbox, code: str, descriptor: int) -> None:
    with Path(os.devnull).open("w") as nowhere:
        process = await sandbox.spawn(
            [PYTHON, "-c", code],
            environment={},
            stdout=nowhere.fileno(),
            stderr=nowhere.fileno(),
            pass_fds=[descriptor],
        )
    await process.wait()


async def test_thirty_sandboxes_leave_no_group_and_no_descriptor(grouped: Provider, opened: Open) -> None:
    limits = Limits(memory_mb=256, cpus=1, processes=50, temporary_mb=8, open_files=64)

    async def cycle() -> None:
        sandbox = await opened(grouped, limits)
        assert (await run(sandbox, "", command=["true"])).status == 0
        await sandbox.aclose()

    def open_here() -> tuple[set[Path], int]:
        """Return the groups of this process, which other tests may have left, and how many descriptors it has."""
        folders = find_control_groups().usable().values()
        groups = {path for folder in folders for path in folder.glob(f"{PREFIX}{os.getpid()}-*")}
        return groups, len(list(Path("/proc/self/fd").iterdir()))

    await cycle()
    before = open_here()
    for _ in range(30):
        await cycle()
    assert open_here() == before


async def test_a_hard_limit_of_the_host_is_never_raised(groupless: Provider, opened: Open) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is none here")
    sandbox = await opened(groupless, Limits(open_files=hard + 1))
    outcome = await run(sandbox, "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert outcome.output == f"{hard} {hard}\n"
