"""Sessions in environments of other Pythons, which have no IPython of their own: real ones, where the host has any.

The runner is held to the syntax and the library of the oldest one by `vermin`, whichever the host has.
"""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belljar.environments import Environment, open_environment
from belljar.environments.selection import OLDEST_PYTHON
from belljar.errors import EnvironmentBroken
from belljar.kernels.base import Kernel
from belljar.kernels.launch import RUNNER
from belljar.settings import EnvironmentEntry, Settings
from cells import ForkingPlace, Place, interrupt_when_started, open_forking_place, run
from other_pythons import other_python
from shared_environment import shared_settings

IS_FORKED = "'belljar_runner.zygote' in __import__('sys').modules"


@pytest.fixture(scope="module", params=["3.9", "3.10", "3.13"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A bare virtual environment of another Python. IPython for it is kept with the default environment."""
    python = other_python(request.param)
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([python, "-I", "-m", "venv", "--without-pip", folder], check=True)
    entry = EnvironmentEntry(kind="venv", path=str(folder))
    return shared_settings().model_copy(update={"environment": "other", "environments": {"other": entry}})


@pytest.fixture(scope="module")
async def other(settings: Settings, anyio_backend: str) -> Environment:
    try:
        return await open_environment(settings)
    except EnvironmentBroken as error:
        if "could not be fetched" not in error.message:
            raise
        pytest.skip(f"no package index in reach: {error.message}")


@pytest.fixture(scope="module")
async def place(
    other: Environment, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    flags = {"environment": settings.environment, "environments": settings.environments}
    async with open_forking_place(other, tmp_path_factory.mktemp("forks"), **flags) as place:
        yield place


@pytest.fixture(scope="module")
async def kernel(place: ForkingPlace) -> AsyncIterator[Kernel]:
    async with place.open(session_id="origin") as kernel:
        yield kernel


async def said(kernel: Kernel, code: str) -> str:
    outcome = await run(kernel, code)
    assert outcome.is_ok, outcome.events
    return outcome.stdout.strip()


@pytest.mark.anyio
async def test_since_3_12_what_every_cell_uses_is_immortal_and_what_a_session_makes_is_not(
    kernel: Kernel, other: Environment
) -> None:
    code = "import sys\nmine = object()\nprint(sys.getrefcount(type(get_ipython()).run_cell), sys.getrefcount(mine))"

    shared, own = map(int, (await said(kernel, code)).split())

    assert (shared > 1 << 30) == (tuple(map(int, other.version.split(".")[:2])) >= (3, 12))
    assert own < 10


@pytest.mark.anyio
async def test_it_is_forked_and_runs_cells_with_an_ipython_that_comes_last(kernel: Kernel, other: Environment) -> None:
    release = ".".join(other.version.split(".")[:2])
    version = "'.'.join(map(str, sys.version_info[:2]))"

    told = await said(kernel, f"import sys, IPython\nprint({version}, {IS_FORKED}, sys.path[-1], IPython.__file__)")

    assert told == f"{release} True {other.support} {other.support}/IPython/__init__.py"
    assert (await run(kernel, "1 / 0")).error.name == "ZeroDivisionError"
    assert (await run(kernel, "import asyncio\nx = await asyncio.sleep(0, 7)\nx")).result == {"text/plain": "7"}
    assert await said(kernel, "!python -c 'import sys; print(sys.version_info[1])'") == release.split(".")[1]
    assert (await run(kernel, "input()", allow_input=False)).error.name == "EOFError"
    assert (await kernel.complete("import asynci", 13)).matches == ["asyncio"]


@pytest.mark.anyio
async def test_an_interrupt_keeps_its_variables(kernel: Kernel) -> None:
    code = "kept = 1\nimport time\nprint('started', flush=True)\nwhile True: time.sleep(0.01)"

    assert (await interrupt_when_started(kernel, code)).error.name == "KeyboardInterrupt"
    assert await said(kernel, "print(kept)") == "1"


@pytest.mark.anyio
async def test_it_can_be_copied_and_kept_on_disk(kernel: Kernel, place: ForkingPlace) -> None:
    from belljar.kernels.ipython import IPythonKernel

    assert isinstance(kernel, IPythonKernel)
    await said(kernel, "class Dog:\n    def bark(self): return 'woof'\nrex, number = Dog(), 42")

    after = place.folders("copy", fork_of="origin")
    after.make()
    copy, _ = await place.starter.fork(kernel, place.folders("origin"), after)
    try:
        assert await said(copy, "print(rex.bark(), number)") == "woof 42"
    finally:
        await copy.aclose()
    report = await kernel.save_state(f"{kernel.scratch}/state")
    assert not report.lost
    await said(kernel, "del rex, number, Dog")
    assert not (await kernel.load_state(f"{kernel.scratch}/state")).lost
    assert await said(kernel, "print(rex.bark(), number)") == "woof 42"
    checkpoint = await kernel.fork_checkpoint()
    await said(kernel, "number += 1")
    earlier = await kernel.restore(checkpoint)
    try:
        assert await said(earlier, "print(rex.bark(), number)") == "woof 42"
    finally:
        await earlier.aclose()


@pytest.mark.anyio
async def test_it_starts_cold_just_as_well(place: ForkingPlace, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    cold = Place(place.provider, place.environment, tmp_path)

    async with cold.open("ipython") as kernel:
        assert await said(kernel, f"print({IS_FORKED})") == "False"


def test_the_runner_does_with_the_syntax_and_library_of_the_oldest_python() -> None:
    target = f"-t={'.'.join(map(str, OLDEST_PYTHON))}-"
    options = [target, "--no-tips", "--violations", "--eval-annotations", str(RUNNER)]
    command = [sys.executable, "-c", "from vermin import main; main()", *options]
    judged = subprocess.run(command, capture_output=True, text=True)

    assert judged.returncode == 0, judged.stdout + judged.stderr
