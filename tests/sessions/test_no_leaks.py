"""What sessions take is given back when they are gone: processes, descriptors, groups, mounts, users, folders, rows."""

import asyncio
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime, open_runtime
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from belljar.sessions import checkpoints
from belljar.sessions.session import Session
from belljar.settings import Settings
from waiting import until

pytestmark = [pytest.mark.anyio]

OWNER = "somebody"
PANDAS = "import pandas\npandas.DataFrame({'a': [1, 2]}).describe().shape"
soak = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it"),
]


@dataclass(frozen=True)
class Holdings:
    """What this process holds, as counts."""

    processes: int
    zombies: int
    descriptors: int
    groups: int
    mounts: int
    users: int
    folders: int
    rows: int
    sessions: int
    kinds: dict[str, int] = field(compare=False)
    """What the descriptors are of, to be read when there is one too many."""


def holdings(runtime: Runtime) -> Holdings:
    states = [state_of(pid) for pid in descendants()]
    kinds = descriptor_kinds()
    groups = {
        path for base in read_control_groups().folders.values() for path in base.glob(f"belljar-{os.getpid()}-*/*")
    }
    identities = runtime.provider._hardening.identities  # pyright: ignore
    journal = runtime.sessions.journal
    counts = ("executions", "events", "sessions WHERE state != 'gone'")
    return Holdings(
        processes=len([state for state in states if state not in ("", "Z")]),
        zombies=states.count("Z"),
        descriptors=sum(kinds.values()),
        kinds=kinds,
        groups=len([path for path in groups if path.is_dir()]),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        users=len(identities._taken) if identities else 0,  # pyright: ignore
        folders=len([*(runtime.settings.data_directory / "sessions").iterdir()]),
        rows=sum(next(journal.rows(f"SELECT count(*) FROM {table}"))[0] for table in counts),
        sessions=len(runtime.sessions.all()),
    )


def descriptor_kinds() -> dict[str, int]:
    """How many descriptors of this process are of each kind of thing, or of each file."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that reads the folder is gone by now
            found[re.sub(r":\[\d+\]$", "", str(path.readlink()))] += 1
    # SQLite keeps the descriptor of a connection that is closed beside another one, and gives it to the next.
    return {name: 1 if name.endswith("/journal.sqlite") else count for name, count in found.items()}


def descendants() -> set[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        if (fields := stat_of(int(entry.name))) is not None:
            children[int(fields[1])].append(int(entry.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        new = children[waiting.pop()]
        found.update(new)
        waiting += new
    return found


def stat_of(pid: int) -> list[str] | None:
    """Of a process: its state, its parent, and more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def state_of(pid: int) -> str:
    fields = stat_of(pid)
    return fields[0] if fields else ""


@pytest.fixture
async def runtime(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Runtime]:
    """An engine whose zygote is warm, with no pool and a state kept before every cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        async with open_runtime(settings(default_environment, tmp_path, checkpoints=2, hibernate=True)) as runtime:
            assert await is_warm(runtime)
            yield runtime


def settings(environment: Environment, folder: Path, **chosen: Any) -> Settings:
    folder.chmod(0o755)
    values: dict[str, Any] = {"pool_size": 0, "hibernate": False, "preload": [], **chosen}
    return Settings(environment=str(environment.python), data_directory=folder / "data", **values)


async def is_warm(runtime: Runtime) -> bool:
    gap = getattr(runtime.provider, "no_nesting_reason", lambda: "the sandbox is not namespace")()
    if gap:
        pytest.skip(f"sessions cannot be forked here: {gap}")
    return await runtime.starter.wait_until_warm(runtime.settings.environment)


async def ran(session: Session, code: str) -> str:
    """Run a cell to its end; its result, or how it ended."""
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    told = execution.result()
    return told.result or told.status


# One of each way that a session goes


async def plainly(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    assert await ran(session, "x = 1\nx + 1") == "2"
    await runtime.sessions.clear(session.id, OWNER)


async def unused(runtime: Runtime) -> None:
    await runtime.sessions.clear(runtime.sessions.create(OWNER).id, OWNER)


async def forked(runtime: Runtime) -> None:
    """The first one goes first, and the grandchild last."""
    origin = runtime.sessions.create(OWNER)
    await ran(origin, "x = 1")
    fork, _ = await runtime.sessions.fork(origin.id, OWNER)
    await runtime.sessions.clear(origin.id, OWNER)
    assert await ran(fork, "x + 1") == "2"
    last, _ = await runtime.sessions.fork(fork.id, OWNER)
    await runtime.sessions.clear(fork.id, OWNER)
    assert await ran(last, "x + 1") == "2"
    await runtime.sessions.clear(last.id, OWNER)


async def rewound(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    for number in range(4):
        await ran(session, f"x = {number}")
    await session.rewind(2)
    assert await ran(session, "x + 1") == "2"
    await runtime.sessions.clear(session.id, OWNER)


async def rewound_to_the_beginning(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 1")
    await session.rewind(1)
    assert await ran(session, "'x' in globals()") == "False"
    await runtime.sessions.clear(session.id, OWNER)


async def killed(runtime: Runtime) -> None:
    """By its own hand, twice, with states of the dead kept in between."""
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 1")
    for _ in range(2):
        assert await ran(session, f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})") == "died"
        assert await ran(session, "1 + 1") == "2"
    await runtime.sessions.clear(session.id, OWNER)


async def left_running(runtime: Runtime) -> None:
    """Processes and threads that a cell left behind, in the middle of another cell."""
    session = runtime.sessions.create(OWNER)
    await ran(session, "import subprocess, threading\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)")
    await ran(session, "threading.Thread(target=threading.Event().wait, daemon=True).start()")
    session.submit(make_cell(session.settings, "open('begun', 'w').close()\nthreading.Event().wait()"))
    await until((session.folders.workspace / "begun").exists)
    await runtime.sessions.clear(session.id, OWNER)


async def slept(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 1")
    await runtime.sessions.endings.hibernate(session, "was put to sleep")  # pyright: ignore[reportPrivateUsage]
    woken = runtime.sessions.get(session.id, OWNER)
    assert await ran(woken, "x + 1") == "2"
    await runtime.sessions.clear(session.id, OWNER)


async def not_started(runtime: Runtime) -> None:
    """Cleared while its kernel starts."""
    session = runtime.sessions.create(OWNER)
    session.submit(make_cell(session.settings, "1"))
    await asyncio.sleep(0)
    await runtime.sessions.clear(session.id, OWNER)


async def given_up(runtime: Runtime) -> None:
    """Whoever clears it goes away before it is gone."""
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 1")
    clearing = asyncio.get_running_loop().create_task(runtime.sessions.clear(session.id, OWNER))
    await asyncio.sleep(0)
    clearing.cancel()
    await asyncio.gather(clearing, return_exceptions=True)


WAYS = (
    plainly,
    unused,
    forked,
    rewound,
    rewound_to_the_beginning,
    killed,
    left_running,
    slept,
    not_started,
    given_up,
)


async def test_nothing_is_left_of_sessions_that_are_gone(runtime: Runtime) -> None:
    await rounds(runtime, 1)  # what is made once stays: connections, threads' descriptors, caches
    before = await quiet(runtime)
    for way in WAYS:
        for _ in range(3):
            await way(runtime)
        await expect(runtime, before, way.__name__)
    await asyncio.gather(*(way(runtime) for way in WAYS))
    await expect(runtime, before, "all at once")


async def expect(runtime: Runtime, before: Holdings, after: str) -> None:
    """Wait until the counts are as before, because a process that is killed is gone a moment later."""
    found = before

    def are_as_before() -> bool:
        nonlocal found
        found = holdings(runtime)
        return found == before

    try:
        await until(are_as_before, limit_s=30)
    except AssertionError:
        pytest.fail(f"after {after}: {found} with {found.kinds}, before: {before} with {before.kinds}")


async def rounds(runtime: Runtime, count: int) -> None:
    for _ in range(count):
        for way in WAYS:
            await way(runtime)


async def quiet(runtime: Runtime) -> Holdings:
    """Counts that have not changed for a second, with everything ready that is kept ready and no zombie left."""
    await until(lambda: runtime.sessions.pool.is_full)
    clock = asyncio.get_running_loop().time
    found, since = holdings(runtime), clock()
    async with asyncio.timeout(60):
        while clock() - since < 1 or found.zombies:
            await asyncio.sleep(0.05)
            if (again := holdings(runtime)) != found:
                found, since = again, clock()
    return found


async def test_a_zygote_and_a_pool_are_gone_with_their_engine(default_environment: Environment, tmp_path: Path) -> None:
    processes, descriptors = len(descendants()), len([*Path("/proc/self/fd").iterdir()])
    async with open_runtime(settings(default_environment, tmp_path, pool_size=2)) as runtime:
        assert await is_warm(runtime)
        sessions = [runtime.sessions.create(OWNER) for _ in range(4)]
        for session in sessions:
            await ran(session, "x = 1")
        await runtime.sessions.fork(sessions[0].id, OWNER)
    assert len(descendants()) <= processes
    assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors
    assert [*(runtime.settings.data_directory / "sessions").iterdir()] == []
    groups = [
        path for base in read_control_groups().folders.values() for path in base.glob(f"belljar-{os.getpid()}-*/*")
    ]
    assert groups == []


# For long


@pytest.fixture
async def large_runtime(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Runtime]:
    chosen = {"max_sessions": 400, "hibernate": True, "preload": ["numpy", "pandas", "matplotlib.pyplot"]}
    async with open_runtime(settings(default_environment, tmp_path, **chosen)) as runtime:
        assert await is_warm(runtime)
        yield runtime


def marked(test: Any) -> Any:
    for mark in soak:
        test = mark(test)
    return test


@marked
async def test_nothing_is_left_of_five_hundred_sessions(large_runtime: Runtime) -> None:
    await plainly(large_runtime)
    before = await quiet(large_runtime)
    for number in range(500):
        await plainly(large_runtime)
        if number % 100 == 99:
            await expect(large_runtime, before, f"{number + 1} sessions")


@marked
async def test_two_hundred_idle_sessions_and_a_burst_of_a_hundred_more(large_runtime: Runtime) -> None:
    runtime = large_runtime
    await plainly(runtime)
    before = await quiet(runtime)
    free_mb = available_mb()
    idle = await at_once(4, [started(runtime, PANDAS, "(8, 1)") for _ in range(200)])
    print(f"\n200 idle sessions: {(free_mb - available_mb()) / 200:.1f} MB each; {asdict(holdings(runtime))}")
    began = asyncio.get_running_loop().time()
    more = await asyncio.gather(*(started(runtime, PANDAS, "(8, 1)") for _ in range(100)))
    print(f"100 more in {asyncio.get_running_loop().time() - began:.1f} s")
    for session in (*idle[:3], *more[:3]):
        assert await ran(session, "1 + 1") == "2"
    await at_once(4, [runtime.sessions.clear(session.id, OWNER) for session in (*idle, *more)])
    await expect(runtime, before, "three hundred sessions")
    print(f"after all are cleared: {free_mb - available_mb():.0f} MB less than at first")


async def started(runtime: Runtime, code: str, result: str) -> Session:
    session = runtime.sessions.create(OWNER)
    assert await ran(session, code) == result
    return session


async def at_once(most: int, work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    slots = asyncio.Semaphore(most)

    async def within(one: Coroutine[Any, Any, Any]) -> Any:
        async with slots:
            return await one

    return await asyncio.gather(*map(within, work))


def available_mb() -> float:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) / 1024
