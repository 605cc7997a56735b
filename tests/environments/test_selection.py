import subprocess
import sys
from pathlib import Path

import pytest

from belljar.environments import Environment, check_environments, open_environment
from belljar.errors import EnvironmentBroken, InvalidArgument
from shared_environment import settings_with

pytestmark = pytest.mark.anyio


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with nothing in it."""
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


async def test_the_default_environment_has_what_sessions_are_promised(default_environment: Environment) -> None:
    code = (
        "import IPython, pandas, numpy, matplotlib, seaborn, plotly, kaleido, sympy, scipy, sklearn, PIL, openpyxl, "
        "pyarrow, tqdm, jinja2, tabulate, requests, ipykernel, sys; print(sys.prefix)"
    )
    result = subprocess.run([str(default_environment.python), "-I", "-c", code], capture_output=True, text=True)

    assert (result.stdout.strip(), result.stderr) == (str(default_environment.python.parent.parent), "")


async def test_a_folder_and_its_interpreter_mean_the_same(default_environment: Environment) -> None:
    folder = str(default_environment.python.parent.parent)

    by_folder = await open_environment(settings_with(environment=folder))
    by_interpreter = await open_environment(settings_with(environment=f"{folder}/bin/python"))

    assert by_folder.python == by_interpreter.python == default_environment.python
    assert by_folder.readable == by_interpreter.readable == default_environment.readable
    assert by_folder.name == folder


async def test_a_path_that_the_settings_do_not_name_is_never_run(venv: Path, tmp_path: Path) -> None:
    trap = tmp_path / "python"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path / 'sprung'}\n")
    trap.chmod(0o755)

    with pytest.raises(InvalidArgument) as caught:
        await open_environment(settings_with(environment=str(venv)), str(trap))

    assert caught.value.message == f"unknown environment: {trap}"
    assert caught.value.hint == f"Use default or {venv}, or kernel:NAME for a Jupyter kernel"
    assert not (tmp_path / "sprung").exists()


async def test_a_folder_that_is_no_environment_is_told_apart_from_none(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="is not a virtual environment: no "):
        await open_environment(settings_with(environment=str(tmp_path)))
    with pytest.raises(EnvironmentBroken, match="no such environment"):
        await open_environment(settings_with(environment=str(tmp_path / "absent")))


async def test_doctor_hears_of_an_environment_that_is_not_prepared(tmp_path: Path) -> None:
    uv, environment = check_environments(settings_with(data_directory=tmp_path, environment="default"))

    assert uv.is_ok
    assert (environment.name, environment.is_ok, environment.detail) == (
        "environment default",
        True,
        "not prepared yet",
    )
    assert list(tmp_path.iterdir()) == []


async def test_doctor_hears_of_an_environment_that_works(default_environment: Environment) -> None:
    folder = default_environment.python.parent.parent

    _, ours = check_environments(settings_with(data_directory=folder.parent.parent, environment="default"))
    _, theirs = check_environments(settings_with(environment=str(folder)))

    assert ours.is_ok
    assert ours.detail.endswith(f" in {folder}")
    assert theirs.is_ok
    assert theirs.detail.endswith(f" in {default_environment.python}")


async def test_doctor_hears_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    _, check = check_environments(settings_with(environment=str(tmp_path / "absent")))

    assert (check.is_ok, check.detail) == (False, f"no such environment: {tmp_path}/absent")
    assert check.hint.startswith("Give the folder of a virtual environment")


async def test_doctor_hears_that_ipython_is_brought_along(venv: Path) -> None:
    _, check = check_environments(settings_with(environment=str(venv)))

    assert check.is_ok
    assert check.detail.endswith(f" in {venv}/bin/python; IPython is brought along")


async def test_doctor_leaves_jupyter_kernels_to_their_own_room() -> None:
    _, check = check_environments(settings_with(environment="kernel:python3"))

    assert check.is_ok
