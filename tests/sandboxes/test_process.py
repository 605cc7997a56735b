"""What only the process provider has: a loud warning, and processes that must be found before they can be ended."""

import os
import signal
from pathlib import Path

import pytest
from trials import ENVIRONMENT, PYTHON, Opener, read_to_end, read_until, run, usable

from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.sandboxes import data_path
from belljar.sandboxes.data_path import DataPath
from belljar.sandboxes.process import ProcessProvider

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


LOOK = """
import os
open('/mnt/data/own', 'a').close()
for folder in ('/mnt/data', '.'): print(sorted(os.listdir(folder)))
"""


@pytest.mark.anyio
async def test_each_session_sees_its_own_folder_at_the_path_that_clients_write(open_sandbox: Opener) -> None:
    provider = usable("process")
    assert isinstance(provider, ProcessProvider)
    if not provider.shows_workspace:
        pytest.skip("nothing can be mounted here")
    before = Path("/mnt/data").exists()
    for name in ("one", "two"):
        sandbox, folders = await open_sandbox(provider)
        (folders.workspace / name).touch()
        outcome = await run(sandbox, LOOK)
        assert (outcome.status, outcome.output) == (0, f"{sorted([name, 'own'])}\n" * 2)
    assert Path("/mnt/data").exists() == before


@pytest.mark.anyio
async def test_where_nothing_can_be_mounted_a_link_is_for_one_session_at_a_time(
    open_sandbox: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    monkeypatch.setattr(data_path, "WORKSPACE", str(path))
    monkeypatch.setattr(DataPath, "_can_mount", False)
    assert not DataPath().is_shown
    provider = ProcessProvider(data_path=DataPath(is_for_one=True))
    assert provider.shows_workspace
    first, folders = await open_sandbox(provider)
    assert path.readlink() == folders.workspace
    await open_sandbox(provider)
    assert path.readlink() == folders.workspace
    await first.aclose()
    assert not path.is_symlink()
    # As a server leaves it that was killed.
    path.symlink_to(folders.workspace)
    _, others = await open_sandbox(provider)
    assert path.readlink() == others.workspace


@pytest.mark.anyio
async def test_a_folder_with_files_of_somebody_elses_is_never_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_path, "WORKSPACE", str(tmp_path))
    assert DataPath(is_for_one=True).is_shown == (os.geteuid() == 0)
    (tmp_path / "theirs").touch()
    assert not DataPath(is_for_one=True).is_shown


@pytest.mark.anyio
async def test_a_command_that_cannot_start_is_named(open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(usable("process"))
    with pytest.raises(SandboxUnavailable, match="/nowhere/python: No such file"):
        await run(sandbox, "", command=["/nowhere/python"])
    with pytest.raises(InvalidArgument, match="null byte"):
        await run(sandbox, "", environment={"NAME": "x\0y"})
