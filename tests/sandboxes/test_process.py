"""What only the process provider has: a loud warning, and processes that must be found before they can be ended."""

import os
import signal
from pathlib import Path

import pytest
from trials import ENVIRONMENT, PYTHON, Opener, read_to_end, read_until, run, usable

from belljar.errors import InvalidArgument, SandboxUnavailable

DAEMON = """
import os, signal
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.write({fd}, b"%d " % os.getpid())
signal.pause()
"""


def test_it_says_loudly_that_it_does_not_isolate() -> None:
    provider = usable("process")
    assert not provider.isolates
    assert "NOT isolate" in provider.warning


@pytest.mark.anyio
async def test_one_sandbox_ends_its_own_daemons_only(open_sandbox: Opener) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("finds daemons on Linux only")
    daemons: list[int] = []
    sandboxes = [(await open_sandbox(usable("process")))[0] for _ in range(2)]
    readings: list[int] = []
    for sandbox in sandboxes:
        reading, writing = os.pipe()
        readings.append(reading)
        process = await sandbox.spawn(
            [PYTHON, "-c", DAEMON.format(fd=writing)],
            environment=ENVIRONMENT,
            stdout=writing,
            stderr=writing,
            pass_fds=[writing],
        )
        os.close(writing)
        daemons.append(int(await read_until(reading, b" ")))
        assert await process.wait() == 0
    await sandboxes[0].aclose()
    assert await read_to_end(readings[0]) == ""
    os.kill(daemons[1], signal.SIGCONT)
    await sandboxes[1].aclose()
    assert await read_to_end(readings[1]) == ""


@pytest.mark.anyio
async def test_a_command_that_cannot_start_is_named(open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(usable("process"))
    with pytest.raises(SandboxUnavailable, match="/nowhere/python: No such file"):
        await run(sandbox, "", command=["/nowhere/python"])
    with pytest.raises(InvalidArgument, match="null byte"):
        await run(sandbox, "", environment={"NAME": "x\0y"})
