import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import run as run_command
from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.settings import Settings
from live_server import clean_environment
from trusted_settings import write_trusted

Run = Callable[..., Any]
Process = subprocess.Popen[str]

# What it takes long to import is imported once; a picture is saved like any other.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PICTURE = f"display({{'image/png': {PNG!r}}}, raw=True)"
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()\n"


@pytest.fixture
def belljar_run(belljar: Run, place: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `belljar run` in the working directory `place`, in this process, which spares it a second of imports."""
    for name, value in _settings(place, default_environment).items():
        monkeypatch.setenv(name, str(value))
    return partial(belljar, "run")


@pytest.fixture
def shell_run(place: Path, default_environment: Environment) -> Run:
    """The same as a shell would, with a stdin."""

    def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            _command(arguments), input=stdin, capture_output=True, text=True, env=_variables(place, default_environment)
        )

    return run


@pytest.fixture
def started(place: Path, default_environment: Environment) -> Run:
    """Start `belljar run` and let the test talk to it."""

    @contextmanager
    def start(*arguments: str) -> Generator[Process]:
        with subprocess.Popen(
            _command(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_variables(place, default_environment),
        ) as process:
            yield process

    return start


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "belljar", "run", *arguments]


def _settings(place: Path, environment: Environment) -> dict[str, Path]:
    return {
        "BELLJAR_DATA_DIRECTORY": place.parent / "data",
        "BELLJAR_DOWNLOAD_DIRECTORY": place.parent / "downloads",
        "BELLJAR_ENVIRONMENT": environment.python,
    }


def _variables(place: Path, environment: Environment) -> dict[str, str]:
    return clean_environment(**_settings(place, environment))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _warnings_apart(text: str) -> str:
    """Without what belljar says of running as root."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("WARNING: The server runs"))


# Output


def test_streams_go_to_their_own_and_the_last_expression_is_printed_as_in_a_shell(shell_run: Run) -> None:
    answer = shell_run("-c", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n'a' + 'b'")
    assert (answer.returncode, answer.stdout, _warnings_apart(answer.stderr)) == (0, "out\n'ab'\n", "err\n")


def test_a_value_starts_on_a_line_of_its_own_and_none_is_not_printed(belljar_run: Run) -> None:
    assert belljar_run("-c", "print('no newline', end='')\n42").out == "no newline\n42\n"
    assert belljar_run("-c", "print('no newline', end='')\nNone").out == "no newline"


def test_prints_displays_and_the_value_come_in_their_order(belljar_run: Run) -> None:
    code = (
        "from IPython.display import Markdown\nprint('one'); display('two'); print('three', end='')\n"
        "display(Markdown('four')); print('five'); 6"
    )
    assert belljar_run("-c", code).out == "one\n'two'\nthree\nfour\nfive\n6\n"


def test_a_long_value_is_printed_whole(belljar_run: Run) -> None:
    assert belljar_run("-c", "'x' * 100_000").out == repr("x" * 100_000) + "\n"


def test_all_output_comes_through_however_much(shell_run: Run) -> None:
    answer = shell_run("-c", "for i in range(100_000): print(i)")
    assert answer.stdout == "".join(f"{i}\n" for i in range(100_000))


def test_output_comes_while_the_code_runs(started: Run) -> None:
    with started("-c", "print('early')\nprint('late', input())") as process:
        # The code goes on only because its first words have been read.
        assert process.stdout.readline() == "early\n"
        out, _ = process.communicate("answer\n")
        assert (out, process.returncode) == ("late answer\n", 0)


BAR = "import sys\nfor n in range(101): print(f'\\r{n}%', end='', file=sys.stderr)\nprint('a\\r\\nb\\r', end='')"


def test_a_progress_bar_is_one_line_in_a_pipe_and_moves_on_a_terminal(
    shell_run: Run, place: Path, default_environment: Environment
) -> None:
    answer = shell_run("-c", BAR)
    assert (answer.stdout, _warnings_apart(answer.stderr)) == ("a\nb", "100%")
    ours, theirs = pty.openpty()
    command = _command(("-c", BAR))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=_variables(place, default_environment),
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal is closed once the process has ended
            while part := os.read(ours, 65_536):
                shown += part
    os.close(ours)
    assert (process.returncode, shown.count(b"\r") >= 101, b"\r99%\r100%" in shown) == (0, True, True)


def test_json_is_all_there_is_on_stdout(belljar_run: Run) -> None:
    answer = belljar_run("--json", "-c", "print('out')\n1 / 0")
    result = ExecutionResult.model_validate_json(answer.out)
    assert (result.status, result.stdout, answer.code) == ("error", "out\n", 1)


# Where the code comes from


def test_a_file_runs_as_the_main_module(belljar_run: Run, place: Path) -> None:
    (place / "script.py").write_text("\ufeffif __name__ == '__main__':\n    print('main ü')\n", "utf-8")
    assert belljar_run("script.py").out == "main ü\n"


def test_a_dash_reads_the_code_from_stdin_and_leaves_none_for_input(shell_run: Run) -> None:
    answer = shell_run("-", stdin="print(6 * 7)\ninput()\n")
    assert (answer.returncode, answer.stdout) == (1, "42\n")
    assert "EOFError" in answer.stderr


def test_input_reads_lines_from_a_pipe_until_it_ends(shell_run: Run) -> None:
    answer = shell_run("-c", "print([input('? '), input('? ')])\ninput()", stdin="one\r\ntwo")
    assert answer.stdout == "? ? ['one', 'two']\n"
    assert (answer.returncode, "EOFError" in answer.stderr) == (1, True)


def test_input_reads_a_file_that_is_stdin(place: Path, default_environment: Environment) -> None:
    (place / "answers").write_text("one\n")
    with (place / "answers").open() as answers:
        answer = subprocess.run(
            _command(("-c", "input()")),
            stdin=answers,
            capture_output=True,
            text=True,
            env=_variables(place, default_environment),
        )
    assert answer.stdout == "'one'\n"


def test_what_follows_the_file_is_the_codes_own(belljar_run: Run, place: Path) -> None:
    (place / "script.py").write_text("import sys\nprint(sys.argv)\n")
    assert belljar_run("script.py", "a b", "--json", "-x").out == "['script.py', 'a b', '--json', '-x']\n"
    assert belljar_run("-c", "import sys; print(sys.argv, 'scope' in dir())", "a").out == "['-c', 'a'] False\n"


def test_the_first_cell_is_number_one_and_knows_of_no_other(belljar_run: Run) -> None:
    assert belljar_run("-c", "print(In, [_i], Out)").out == """['', 'print(In, [_i], Out)'] [''] {}\n"""
    assert "Cell In[1], line 1\n" in belljar_run("-c", "1 / 0").err
    assert json.loads(belljar_run("--json", "-c", "1").out)["execution_count"] == 1


def test_a_script_reads_what_is_piped_in(shell_run: Run) -> None:
    code = "import sys\nfirst = input()\nrest = sys.stdin.read()\nprint(first, len(rest), rest[-4:], sys.stdin.read())"
    answer = shell_run("-c", code, stdin="head\n" + "x" * 300_000 + "ü\nz\n")
    assert answer.stdout == "head 300004 ü\nz\n \n", answer.stderr
    answer = shell_run("-c", "import sys\nprint([line for line in sys.stdin], sys.stdin.buffer.read())", stdin="1\n2")
    assert answer.stdout == "['1\\n', '2'] b''\n"


def test_files_are_copied_in_and_only_what_the_code_changed_comes_out(belljar_run: Run, place: Path) -> None:
    (place / "in.csv").write_bytes(b"\xff1\n")
    (place / "other.csv").write_text("2\n")
    code = "print(open('in.csv', 'rb').read(), open('other.csv').read())\nopen('new.txt', 'w').write('x');"
    answer = belljar_run("--file", "in.csv", "--file", str(place / "other.csv"), "--out", "found", "-c", code)
    assert answer.out == "b'\\xff1\\n' 2\n\n"
    assert _names(place / "found") == ["new.txt"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "either a file or -c"),
        (("--file", "missing.csv", "-c", "1"), "--file missing.csv cannot be read"),
        (("--file", ".", "-c", "1"), "Show whole folders with the setting"),
        (("missing.py",), "missing.py cannot be read"),
        (("print(1)",), "hint: Code goes after -c: belljar run -c 'print(1)'"),
        (("binary.py",), "binary.py is not UTF-8"),
        (("-c", "1", "--sandbox", "glass"), "glass"),
        (("-c", "1", "--timeout", "0"), "execution_timeout_s"),
    ],
)
def test_a_call_that_cannot_be_right_ends_with_2_and_says_why(
    belljar: Run, place: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    (place / "binary.py").write_bytes(b"\xff\xfe")
    outcome = belljar("run", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err


def test_an_environment_that_is_not_there_ends_with_1(belljar_run: Run) -> None:
    answer = belljar_run("-c", "1", "--environment", "/nowhere/at/all")
    assert answer.code == 1
    assert "error: no such environment: /nowhere/at/all" in answer.err


# How it ends


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('so be it')", 1, "so be it\n"),
        ("{}['key']", 1, "KeyError: 'key'\n"),
        ("import os; os._exit(0)", 137, "exit status 0\n"),
    ],
)
def test_the_exit_status_is_the_codes(belljar_run: Run, code: str, status: int, said: str) -> None:
    answer = belljar_run("-c", code)
    assert (answer.code, answer.out) == (status, "")
    assert answer.err.endswith(said)
    assert ("Traceback" in answer.err) == ("KeyError" in said)


def test_a_timeout_ends_with_124(belljar_run: Run) -> None:
    answer = belljar_run("--timeout", "0.5", "-c", "import time\ntime.sleep(60)")
    assert answer.code == 124
    assert answer.err.endswith("its time limit\n")


def test_a_timeout_may_be_longer_than_the_configured_one(
    belljar_run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trusted("execution_timeout_s = 0.2\n", place)
    answer = belljar_run("--timeout", "60", "-c", "import time\ntime.sleep(0.5)\nprint('done')")
    assert (answer.code, answer.out) == (0, "done\n")


def test_the_first_interrupt_reaches_the_code(started: Run) -> None:
    code = "import time\ntry:\n    print('on', flush=True)\n    time.sleep(60)\nfinally:\n    print('tidied up')"
    with started("-c", code) as process:
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out.splitlines()[-1]) == (130, "tidied up")
    assert "KeyboardInterrupt" in err
    assert err.endswith("interrupted\n")


def test_the_second_interrupt_ends_code_that_ignores_the_first(started: Run) -> None:
    # Every word is said where an interrupt that comes right after it is caught.
    code = (
        "import time\nword = 'on'\nwhile True:\n    try:\n        print(word, flush=True)\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        word = 'no'"
    )
    with started("-c", code) as process:
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "no\n"
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130


def test_an_interrupt_ends_a_wait_for_input(started: Run) -> None:
    with started("-c", "print('on')\ninput()") as process:
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


def test_a_reader_that_goes_away_stops_the_code(started: Run) -> None:
    with started("-c", "while True: print('line')") as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.wait() == 128 + signal.SIGPIPE
        assert "Traceback" not in process.stderr.read()


def test_nothing_of_a_run_stays_behind(shell_run: Run, place: Path) -> None:
    shell_run("-c", "open('kept.txt', 'w').close()")
    assert _names(place.parent / "data" / "runs") == []
    assert _names(place) == []
    assert _names(_folder_of(place)) == ["kept.txt"]


# Figures and files


def _folder_of(place: Path) -> Path:
    """The folder of the only session that left files."""
    (folder,) = (place.parent / "downloads").iterdir()
    return folder


def test_figures_and_files_are_saved_beside_each_other_and_named_in_one_line(belljar_run: Run, place: Path) -> None:
    code = FIGURE + "import os\nos.mkdir('sub')\nopen('sub/table.csv', 'w').write('a\\n')\nplt.plot([1])\nplt.show()"
    answer = belljar_run("-c", code)
    folder = _folder_of(place)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["figure-1.png", "figure-2.png", "sub/table.csv"]
    assert (folder / "figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert _warnings_apart(answer.err) == f"saved in {folder}: {', '.join(found)}\n"


@pytest.mark.parametrize("out", [".", "..", "/", "full", "full/.."])
def test_a_folder_with_files_or_the_one_that_you_work_in_is_refused_before_anything_runs(
    belljar_run: Run, place: Path, out: str
) -> None:
    (place / "full").mkdir()
    (place / "full" / "table.csv").write_text("mine")
    answer = belljar_run("--out", out, "-c", "print('ran')")
    assert (answer.code, answer.out) == (2, "")
    assert f"error: {out} " in answer.err


def test_another_folder_is_made_and_filled(belljar_run: Run, place: Path) -> None:
    answer = belljar_run("--out", "deep/out", "-c", PICTURE)
    assert answer.code == 0
    assert f"saved in {place / 'deep/out'}: figure-1.png" in answer.err
    assert [path.name for path in (place / "deep" / "out").iterdir()] == ["figure-1.png"]


def test_a_folder_that_cannot_be_made_is_told_and_the_result_is_there_all_the_same(
    belljar_run: Run, place: Path
) -> None:
    (place / "file").touch()
    answer = belljar_run("--json", "--out", "file/out", "-c", PICTURE)
    assert answer.code == 2
    assert f"error: {place / 'file/out'} cannot be written" in answer.err
    assert json.loads(answer.out)["status"] == "ok"


def test_hidden_files_stay_behind(belljar_run: Run, place: Path) -> None:
    answer = belljar_run("-c", "_ = open('.bashrc', 'w').write('rm -r ~')")
    assert _names(place) == []
    assert _names(_folder_of(place)) == []
    assert "not saved: .bashrc is hidden" in answer.err


def test_a_link_out_of_the_folder_is_not_followed(started: Run, place: Path) -> None:
    (place / "out").mkdir()
    code = "import os\nprint('on')\ninput()\nos.mkdir('sub')\nopen('sub/new.txt', 'w').close()"
    with started("--out", "out", "-c", code) as process:
        assert process.stdout.readline() == "on\n"
        (place / "out" / "sub").symlink_to(place.parent)
        _, err = process.communicate("\n")
    assert not (place.parent / "new.txt").exists()
    assert "not saved: sub/new.txt" in err


def test_tables_are_printed_and_pages_are_saved(belljar_run: Run, place: Path) -> None:
    code = (
        "import pandas\nfrom IPython.display import HTML, Markdown, display\n"
        "display(HTML('<b>page</b>'))\ndisplay(Markdown('# title'))\npandas.DataFrame({'a': [1]})"
    )
    answer = belljar_run("-c", code)
    assert answer.out == "# title\n   a\n0  1\n"
    assert _names(_folder_of(place)) == ["figure-1.html"]
    assert (_folder_of(place) / "figure-1.html").read_text() == "<b>page</b>"


# What a single cell does not need


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, (False, 0, 0, False)),
        ({"BELLJAR_FORK_START": "true", "BELLJAR_POOL_SIZE": "2"}, (True, 2, 0, False)),
        ({"BELLJAR_CHECKPOINTS": "3", "BELLJAR_HIBERNATE": "true"}, (False, 0, 3, True)),
    ],
)
def test_nothing_is_made_ready_for_later_unless_it_was_asked_for(
    belljar: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: tuple[object, ...]
) -> None:
    chosen: list[Settings] = []

    def run(settings: Settings, request: run_command.RunRequest) -> int:
        chosen.append(settings)
        return 0

    monkeypatch.setattr(run_command, "run", run)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert belljar("run", "-c", "1").code == 0
    (settings,) = chosen
    assert (settings.fork_start, settings.pool_size, settings.checkpoints, settings.hibernate) == seen
