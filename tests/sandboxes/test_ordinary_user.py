"""Run by root, those tests of sandboxes that depend on the user are run once more as one who owns nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import belljar

NOBODY = 65534
HERE = Path(__file__).parent
# The others ask nothing of the host, or the same of it for everyone.
TESTS = [
    *(HERE / f"test_{name}.py" for name in ("cgroups", "contract", "data_directory", "escapes", "forked_sandboxes")),
    *(HERE / f"test_{name}.py" for name in ("hardening", "limits", "namespace", "orphan_reaper", "process", "seccomp")),
    HERE / "test_folder_mounts.py",
    HERE / "test_user_counts.py",
    HERE.parent / "inside" / "test_guest_init.py",
]


@pytest.mark.timeout(400)
def test_everything_holds_for_an_ordinary_user() -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("this run is an ordinary user's")
    python = _python_for_everyone()
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        arguments = ["-q", "-p", "no:cacheprovider", "--basetemp", f"{folder}/pytest"]
        # Containers take long, and their contract is the same for everyone; the escapes are not.
        arguments += ["-k", "not (container and (test_contract or a_kernel))"]
        outcome = _run_as_nobody([python, "-m", "pytest", *arguments, *map(str, TESTS)], folder)
        _end_podman(Path(folder))
    assert outcome.returncode == 0, outcome.stdout


def _end_podman(folder: Path) -> None:
    """An ordinary user's podman leaves a process that holds its namespace."""
    for path in folder.rglob("pause.pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _python_for_everyone() -> str:
    """An interpreter that can import what the tests need without root's rights."""
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [python, "-c", "import pytest, anyio, belljar.sandboxes, sys; print(sys.version_info[:2])"]
        try:
            outcome = _run_as_nobody(probe, "/")
        except OSError:
            continue
        if outcome.returncode == 0 and outcome.stdout.strip() == str(sys.version_info[:2]):
            return python
    pytest.skip("no interpreter of this version that an ordinary user may run")


def _run_as_nobody(command: list[str], home: str) -> "subprocess.CompletedProcess[str]":
    paths = [str(Path(belljar.__file__).parents[1]), str(Path(pytest.__file__).parents[1])]
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "PYTHONPATH": os.pathsep.join(paths)}
    environment["XDG_RUNTIME_DIR"] = home
    return subprocess.run(
        command,
        cwd=HERE.parents[1],
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        timeout=360,
        check=False,
    )
