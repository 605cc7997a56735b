import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from belljar import cli
from belljar.errors import KernelDied, SessionNotFound

Run = Callable[..., Any]


def test_python_dash_m_belljar_is_the_command() -> None:
    answer = subprocess.run([sys.executable, "-m", "belljar", "--version"], capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == (f"belljar {version('belljar')}\n", "")


def test_importing_the_commands_imports_nothing_heavy() -> None:
    probe = "import sys, belljar.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    heavy = {"rich", "pydantic", "pydantic_settings", "platformdirs", "mcp", "anyio", "starlette", "jupyter_client"}
    assert heavy & set(answer.stdout.split()) == set()


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("belljar.cli.running", {"mcp", "httpx2", "starlette", "h11", "jupyter_client", "phonenumbers", "jsonschema"}),
        ("belljar.control", {"belljar.sessions", "belljar.kernels", "belljar.settings"}),
    ],
)
def test_a_command_imports_only_what_it_needs(module: str, spared: set[str]) -> None:
    probe = f"import sys, {module}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert spared & set(answer.stdout.split()) == set()


@pytest.mark.parametrize(
    ("error", "code"),
    [(SessionNotFound("no session x", hint="Make one"), 2), (KernelDied("it is gone", hint="Make one"), 1)],
)
def test_an_error_of_ours_is_two_lines_on_stderr_and_an_exit_code(
    belljar: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def command() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "config", command)
    outcome = belljar("config")
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err == f"error: {error.args[0]}\nhint: Make one\n"


def test_an_unknown_command_is_refused_on_stderr_in_plain_text(belljar: Run) -> None:
    outcome = belljar("nope")
    assert (outcome.code, outcome.out) == (2, "")
    assert "No such command 'nope'" in outcome.err
    assert outcome.err.isascii()
