"""A fleet under Ray, in namespaces of network and processes of its own, so that nothing of it is left behind.

With Ray installed beside belljar one trial is made always; a long run fetches Ray and makes all.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from belljar.environments import Environment
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

TESTS = Path(__file__).parents[1]
RAY = "ray==2.60.*"
LIMIT_S = 600


@pytest.fixture(scope="module")
def python() -> str:
    """A Python that has Ray and all that tests have."""
    if find_spec("ray") is not None:
        return sys.executable
    if not os.environ.get("BELLJAR_LONG"):
        pytest.skip("Ray is not installed, 290 MB: pip install 'belljar-mcp[ray]', or BELLJAR_LONG=1 fetches it")
    try:
        folder = python_environment(shared_settings().data_directory / "frameworks" / "ray", RAY)
    except Unreachable as gap:
        pytest.skip(str(gap))
    (packages,) = folder.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
    (packages / "belljar-tests.pth").write_text(lines)
    return str(folder / "bin/python")


def tried(python: str, environment: Environment, folder: Path, trial: str) -> str:
    """What a trial says at its end."""
    if os.geteuid():
        pytest.skip("namespaces of network and processes are made by root here")
    script = f'ip link set lo up && exec "{python}" "{Path(__file__).with_name("ray_trials.py")}" {trial} "{folder}"'
    done = subprocess.run(
        ["unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", script],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'surfaces'}",
            "BELLJAR_ENVIRONMENT": str(environment.python),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-12_000:]
    return done.stdout


@pytest.mark.timeout(LIMIT_S)
def test_a_machine_is_a_fleet_of_which_sessions_and_strangers_see_nothing(
    python: str, default_environment: Environment, tmp_path: Path
) -> None:
    tried(python, default_environment, tmp_path, "one_machine")


@pytest.mark.timeout(LIMIT_S)
def test_everything_of_ray_may_die_while_sessions_are_called(
    python: str, default_environment: Environment, tmp_path: Path
) -> None:
    assert "calls answered" in tried(python, default_environment, tmp_path, "killed")


@pytest.mark.timeout(LIMIT_S)
def test_machines_come_and_go_with_demand_and_none_goes_before_it_is_drained(
    python: str, default_environment: Environment, tmp_path: Path
) -> None:
    assert "drained" in tried(python, default_environment, tmp_path, "scaled")
