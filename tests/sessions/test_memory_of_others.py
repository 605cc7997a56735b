"""What the memory of a session holds of other sessions: nothing, however it began, but for the one it is a fork of."""

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime, open_runtime
from belljar.sessions import checkpoints
from belljar.sessions.session import Session
from belljar.settings import Settings
from waiting import until

pytestmark = pytest.mark.anyio

ADA, BOB = "key:ada", "key:bob"
START = "import os; os.environ['BELLJAR_PACKAGES'], 'zygote' in open('/proc/self/cmdline').read()"
# What each session is given is its paths and the names of its sockets. The patterns do not find themselves.
SEARCH = r"""
def found():
    import re
    names = set()
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
        for line in maps.read().splitlines():
            bounds, rights, _, _, inode, *_ = line.split()
            if not rights.startswith('r') or (inode != '0' and 'w' not in rights): continue
            start, end = (int(bound, 16) for bound in bounds.split('-'))
            memory.seek(start)
            try: content = memory.read(end - start)
            except OSError: continue
            names.update(re.findall(rb'sessions/([a-z]{12,})/', content), re.findall(rb'packages-[0-9a-f]{8}', content))
    return ' '.join(sorted(map(bytes.decode, names)))
found()
"""


@pytest.fixture
async def runtime(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Runtime]:
    tmp_path.chmod(0o755)
    settings = Settings(
        environment=str(default_environment.python), data_directory=tmp_path / "data", pool_size=1, checkpoints=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        async with open_runtime(settings) as runtime:
            if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
                pytest.skip(f"sessions cannot be forked here: {gap}")
            yield runtime


async def ran(session: Session, code: str) -> str:
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    told = execution.result()
    return told.result or f"{told.status} {told.error}"


async def test_no_session_holds_what_another_one_was_given(runtime: Runtime) -> None:
    sessions = runtime.sessions
    given: dict[str, set[str]] = {}
    """By session: its id, which is in all of its paths, and the name of one of its sockets."""

    async def begun(session: Session, *, is_forked: bool) -> Session:
        told = await ran(session, START)
        assert told.endswith(f"{is_forked})"), told
        given.setdefault(session.id, {session.id}).update(re.findall(r"packages-\w+", told))
        return session

    cold = [await begun(sessions.create(owner), is_forked=False) for owner in (ADA, BOB)]
    assert await runtime.starter.wait_until_warm(runtime.settings.environment)
    opened = {"cold": cold[0], "cold too": cold[1]}
    for owner in (ADA, BOB):
        await until(lambda: runtime.sessions.pool.is_full)
        opened[f"pooled for {owner}"] = await begun(sessions.create(owner), is_forked=True)
        opened[f"prepared for {owner}"] = await begun(sessions.create(owner), is_forked=True)
        opened[f"on demand for {owner}"] = await begun(sessions.create(owner), is_forked=True)
    origin = opened[f"pooled for {ADA}"]
    for number in (1, 2):
        fork, _ = await sessions.fork(origin.id, ADA)
        opened[f"fork {number}"] = await begun(fork, is_forked=True)
    last, _ = await sessions.fork(origin.id, ADA, at="1")
    opened["fork of a checkpoint"] = await begun(last, is_forked=True)
    rewound = opened[f"on demand for {BOB}"]
    await ran(rewound, "x = 2")
    await rewound.rewind(1)
    slept = opened[f"on demand for {ADA}"]
    await sessions.endings.hibernate(slept, "was put to sleep")  # pyright: ignore[reportPrivateUsage]
    opened[f"on demand for {ADA}"] = await begun(sessions.get(slept.id, ADA), is_forked=True)

    origins = {f"fork {number}" for number in (1, 2)} | {"fork of a checkpoint"}
    for kind, session in opened.items():
        held = {*(await ran(session, SEARCH)).strip("'").split()}
        assert session.id in held, f"{kind}: the search does not even find its own"
        others = held - given[session.id] - (given[origin.id] if kind in origins else set())
        assert others == set(), kind
