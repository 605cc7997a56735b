import gc
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import COMMANDS, REMOVED, CommandEntry, command_groups, config, load_command, uncollected_imports
from belljar.errors import KernelDied, SessionNotFound

Run = Callable[..., Any]


def test_python_dash_m_belljar_is_the_command() -> None:
    answer = subprocess.run([sys.executable, "-m", "belljar", "--version"], capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == (f"belljar {version('belljar-mcp')}\n", "")


def test_the_command_has_the_name_of_the_package_too() -> None:
    names = {point.name for point in distribution("belljar-mcp").entry_points if point.value == "belljar.cli:main"}
    assert names == {"belljar", "belljar-mcp"}


@pytest.mark.parametrize("words", [["config"], ["reference", "cli"], ["run", "--help"], ["--version"]])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_command_whose_output_nobody_reads_ends_quietly(place: Path, words: list[str], is_buffered: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    variables = os.environ | ({} if is_buffered else {"PYTHONUNBUFFERED": "1"})
    command = [sys.executable, "-m", "belljar", *words]
    try:
        answer = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=variables)
    finally:
        os.close(writing)
    # As a shell reports a process that SIGPIPE has killed.
    assert (answer.returncode, answer.stderr) == (141, "")


def test_a_user_in_no_passwd_file_and_without_a_home_has_the_root_folder_for_one() -> None:
    probe = (
        "import pwd, belljar.cli\ndef unknown(user): raise KeyError(user)\npwd.getpwuid = unknown\n"
        "belljar.cli.main(['config'])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith("XDG_")}
    answer = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, env=variables, cwd="/"
    )
    assert answer.returncode == 0
    assert "/.local/share/belljar" in answer.stdout


def test_importing_the_commands_imports_nothing_heavy() -> None:
    probe = "import sys, belljar.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    heavy = {"rich", "pydantic", "pydantic_settings", "platformdirs", "mcp", "anyio", "starlette", "jupyter_client"}
    assert heavy & set(answer.stdout.split()) == set()


def test_the_help_of_all_commands_imports_none_of_them() -> None:
    probe = (
        "import sys, belljar.cli\nfor words in [[], *([group] for group in belljar.cli.command_groups())]:\n"
        "    belljar.cli.application().main([*words, '--help'], standalone_mode=False)\n"
        "print('imported', *sorted(name for name in sys.modules if name.startswith('belljar.cli.')))"
    )
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "imported belljar.cli.streams"


def test_the_help_of_a_command_imports_that_command_only() -> None:
    probe = (
        "import sys, belljar.cli\nbelljar.cli.application().main(['key', '--help'], standalone_mode=False)\n"
        "print('imported', *sorted(name for name in sys.modules if name.startswith('belljar.cli.')))"
    )
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "Make a bearer key for HTTP." in answer.stdout
    assert answer.stdout.splitlines()[-1] == "imported belljar.cli.key belljar.cli.streams"


ENTRIES = [*COMMANDS.values(), *(entry for group in command_groups().values() for entry in group.commands.values())]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.target)
def test_the_table_has_the_first_paragraph_of_each_commands_help(entry: CommandEntry) -> None:
    paragraph, _, _ = (inspect.getdoc(load_command(entry)) or "").partition("\n\n")
    assert entry.help == " ".join(paragraph.split())


def test_the_collector_rests_during_imports_and_passes_over_them_afterwards() -> None:
    before = gc.get_freeze_count()
    try:
        with uncollected_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("belljar.cli.run", {"mcp", "httpx2", "starlette", "h11", "jupyter_client", "phonenumbers", "jsonschema"}),
        ("belljar.control", {"belljar.sessions", "belljar.kernels", "belljar.settings"}),
        # A server reads cells with magics, shows numbers and knows personal data only when it is asked to.
        ("belljar.cli.serve, belljar.runtime", {"IPython", "prometheus_client", "phonenumbers", "stdnum"}),
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

    monkeypatch.setattr(config, "command", command)
    outcome = belljar("config")
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err == f"error: {error.args[0]}\nhint: Make one\n"


@pytest.mark.parametrize("words", [["top"], ["top", "--once"], ["replay", "a.ipynb", "--json"], ["replay", "--help"]])
def test_a_removed_command_says_what_to_use_instead(belljar: Run, words: list[str]) -> None:
    outcome = belljar(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: belljar {words[0]} was removed\nhint: {REMOVED[words[0]]}\n"
    assert words[0] not in belljar("--help").out.split()


def test_an_unknown_command_is_refused_on_stderr_in_plain_text(belljar: Run) -> None:
    outcome = belljar("nope")
    assert (outcome.code, outcome.out) == (2, "")
    assert "No such command 'nope'" in outcome.err
    assert outcome.err.isascii()
