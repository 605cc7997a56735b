import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ran_sessions import ran

from belljar.environments import Environment
from live_server import clean_environment

Run = Callable[..., Any]
library: Any = nbformat


@pytest.fixture
def replay(belljar: Run, place: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `belljar replay` in the working directory `place`, in this process, which spares it a second of imports."""
    for name, value in _settings(place, default_environment).items():
        monkeypatch.setenv(name, str(value))
    return partial(belljar, "replay")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "belljar", "replay", *arguments]


def _settings(place: Path, environment: Environment) -> dict[str, Path]:
    return {"BELLJAR_DATA_DIRECTORY": place.parent / "data", "BELLJAR_ENVIRONMENT": environment.python}


def _variables(place: Path, environment: Environment) -> dict[str, str]:
    return clean_environment(**_settings(place, environment))


def _code(source: str | list[str], *texts: str, **metadata: Any) -> dict[str, Any]:
    """A code cell with what it printed, as Jupyter saves it before version 4.5."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": [text]} for text in texts]
    return {"cell_type": "code", "source": source, "execution_count": 7, "outputs": outputs, "metadata": metadata}


def _error(name: str, message: str) -> dict[str, Any]:
    return {"output_type": "error", "ename": name, "evalue": message, "traceback": ["\x1b[31mold\x1b[0m"]}


def _save(path: Path, *cells: dict[str, Any], minor: int = 4, **metadata: Any) -> str:
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": minor, "metadata": metadata, "cells": list(cells)}))
    return str(path)


def _verdicts(answer: Any) -> list[str]:
    return [line.partition(": ")[2] for line in answer.out.splitlines() if line.startswith("cell ")]


# The round trip


CELLS = [
    "import sys\nprint('out')\nprint('err', file=sys.stderr)\nobject()",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    "import pandas as pd\nfrom IPython.display import HTML, display\n"
    "handle = display(HTML('<b>1</b>'), display_id=True)\n"
    "pd.DataFrame({'a': [1, 2]})",
    "handle.update(HTML('<b>2</b>'))",
    "raise ValueError(object())",
    "x = (",
    "wrong = True",
    "%time sum(range(10))",
    "%%bash\necho from bash",
    "for i in range(8_000): print('line', i, '\\x1b[31m', '.' * 150)",
    "_ = sys.stdout.buffer.write(b'\\xff\\x00\\n'); sys.stdout.flush()\nprint('half \\ud800')",
    "'x' * 30_000",
    "print('last words', flush=True)\nimport os\nos._exit(3)",
    "'wrong' in globals()",
]


def test_a_session_that_is_exported_and_replayed_says_the_same(
    belljar: Run, replay: Run, place: Path, default_environment: Environment, tmp_path: Path
) -> None:
    session = ran(tmp_path / "ran", default_environment, *CELLS, undone=6)
    arguments = ("-o", "ran.ipynb", "--data-directory", str(session.data))
    assert belljar("export", session.session_id, *arguments).code == 0
    answer = replay("ran.ipynb", "--output", "again.ipynb")
    assert (answer.code, answer.err) == (0, ""), answer.out
    assert _verdicts(answer) == [*["same"] * 6, "skipped", *["same"] * 7]
    assert answer.out.endswith("\n14 cells: 13 same, 1 skipped\n")
    again = library.read(place / "again.ipynb", as_version=4)
    library.validate(again)
    assert again.cells[2].outputs[0].data["text/html"] == "<b>2</b>"
    assert again.cells[1].outputs[0].data["image/png"].startswith("iVBOR")
    assert again.cells[6].outputs == []
    assert replay("again.ipynb").code == 0


# What is told


def test_differences_and_failures_are_told_cell_by_cell(replay: Run, place: Path) -> None:
    file = _save(
        place / "n.ipynb",
        _code("print('a\\nb')", "a\nb\n"),
        {"cell_type": "markdown", "source": "# words", "metadata": {}},
        _code("print('a\\n\\x1b]0;t\\x07c')", "a\nb\n"),
        _code("import time\n1 / 0", "0.5"),
        _code("print('never')", "never\n"),
    )
    answer = replay(file)
    assert answer.code == 1
    assert answer.out.splitlines() == [
        "cell 1: same",
        "cell 3: different",
        "    stdout:",
        "    - b",
        "    + c",
        "cell 4: failed",
        "    ZeroDivisionError: division by zero",
        "cell 5: not run",
        "4 cells: 1 same, 1 different, 1 failed, 1 not run",
    ]
    further = replay(file, "--keep-going", "--json", "--ignore", "^[bc]$")
    assert further.code == 1
    assert [(report["cell"], report["verdict"]) for report in json.loads(further.out)] == [
        (1, "same"),
        (3, "same"),
        (4, "failed"),
        (5, "same"),
    ]


def test_an_error_that_was_there_before_is_no_difference(replay: Run, place: Path) -> None:
    raised = _code("1 / 0") | {"outputs": [_error("ZeroDivisionError", "division by zero")]}
    other = _code("[][1]") | {"outputs": [_error("ZeroDivisionError", "division by zero")]}
    gone = _code("1") | {"outputs": [_error("NameError", "x")]}
    answer = replay(_save(place / "n.ipynb", raised, other, gone, _code("2 + 2;")))
    assert _verdicts(answer) == ["same", "different", "different", "same"]
    assert "+ IndexError: list index out of range" in answer.out


def test_a_notebook_without_output_has_nothing_to_differ_from(replay: Run, place: Path) -> None:
    fresh = _code("print(1)") | {"execution_count": None}
    assert _verdicts(replay(_save(place / "a.ipynb", fresh))) == ["new"]
    failing = _code("1 / 0") | {"execution_count": None}
    answer = replay(_save(place / "b.ipynb", failing, fresh))
    assert (answer.code, _verdicts(answer)) == (1, ["failed", "not run"])


def test_the_executed_notebook_keeps_what_was_not_run_and_all_the_rest(replay: Run, place: Path) -> None:
    words = {"cell_type": "markdown", "source": ["# words\n", "é"], "metadata": {"x": 1}}
    file = _save(place / "n.ipynb", words, _code("1 / 0"), _code("2", "old"), custom={"kept": True})
    (place / "new.ipynb").write_text("mine")
    refused = replay(file, "--output", "new.ipynb")
    assert (refused.code, refused.out) == (2, "")
    assert replay(file, "--output", "new.ipynb", "--force").code == 1
    written = json.loads((place / "new.ipynb").read_text("utf-8"))
    library.validate(library.from_dict(written))
    assert written["metadata"] == {"custom": {"kept": True}}
    assert written["cells"][0] == words
    assert [cell["execution_count"] for cell in written["cells"][1:]] == [1, None]
    assert [len(cell["outputs"]) for cell in written["cells"][1:]] == [1, 0]


def test_a_cell_that_takes_too_long_has_failed(replay: Run, place: Path) -> None:
    answer = replay(_save(place / "n.ipynb", _code("while True: pass")), "--timeout", "1")
    assert (answer.code, _verdicts(answer)) == (1, ["failed"])
    assert "    timeout: interrupted after 1 s; variables are kept\n1 cell: 1 failed\n" in answer.out


def test_a_cell_that_is_refused_has_failed_and_the_others_have_their_report(replay: Run, place: Path) -> None:
    file = _save(place / "n.ipynb", _code("print(1)", "1\n"), _code("'\ud800'"), _code("print(2)", "2\n"))
    answer = replay(file, "--keep-going", "--output", "new.ipynb")
    assert (answer.code, _verdicts(answer)) == (1, ["same", "failed", "same"])
    assert "    invalid-argument: code has a lone surrogate at character 1." in answer.out
    library.validate(library.from_dict(json.loads((place / "new.ipynb").read_text("utf-8"))))


def test_ctrl_c_stops_the_cell_and_the_replay(place: Path, default_environment: Environment) -> None:
    file = _save(place / "n.ipynb", _code("open('x', 'w').close()\nwhile True: pass"), _code("1"))
    with subprocess.Popen(
        _command(file, "--environment", str(default_environment.python)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_variables(place, default_environment),
    ) as process:
        sessions = place.parent / "data" / "sessions"
        while process.poll() is None and not list(sessions.glob("*/workspace/x")):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "cell 2: not run" in out


# Notebooks of others


def test_notebooks_of_others_run_as_they_are(replay: Run, place: Path) -> None:
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1", "version_major": 2}, "text/plain": ["A()"]}
    colab = {"text/plain": ["   a\n", "0  1"], "text/html": ["\n", "  <div>…"], "application/vnd.google.x+json": {}}
    file = _save(
        place / "n.ipynb",
        {"cell_type": "raw", "source": "raw", "metadata": {}},
        {"cell_type": "markdown", "source": ["![x](attachment:x.png)"], "metadata": {}, "attachments": {"x.png": {}}},
        {"cell_type": "heading", "source": "of no known kind", "level": 1},
        _code(["%matplotlib inline\n", "!echo shell"], "shell\n"),
        _code("%%capture\nprint('x')"),
        _code("  \n"),
        _code("raise SystemError", tags=["skip-execution"]),
        _code("raise KeyError(1)", tags=["raises-exception"]) | {"outputs": [_error("KeyError", "1")]},
        _code("class A:\n    def __repr__(self): return 'A()'\nA()")
        | {"outputs": [{"output_type": "display_data", "data": widget, "metadata": {}}]},
        _code("import pandas as pd\npd.DataFrame({'a': [1]})")
        | {"outputs": [{"output_type": "execute_result", "data": colab, "metadata": {}, "execution_count": 3}]},
        minor=0,
        colab={"name": "x.ipynb"},
        kernelspec={"name": "python3", "display_name": "Python 3"},
        language_info={"name": "python", "version": "3.6.9"},
        widgets={"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2, "version_minor": 0}},
    )
    answer = replay(file, "--output", "new.ipynb")
    assert (answer.code, answer.err) == (0, ""), answer.out
    assert _verdicts(answer) == ["same", "same", "skipped", "skipped", "same", "same", "same"]
    assert "widgets" not in json.loads((place / "new.ipynb").read_text())["metadata"]


BROKEN: list[tuple[bytes, str]] = [
    (b"", "is no notebook: it is not JSON"),
    (b'{"nbformat": 4,', "is no notebook: it is not JSON: Expecting property name"),
    (b"\xff\xfe{}", "is no notebook: it is not UTF-8 at byte 0"),
    (b"[]", "is no notebook: it is JSON, but no object"),
    (b"[" * 200_000, "is no notebook: it is not JSON"),
    (b"{}", "is no notebook: it has no nbformat number"),
    (b'{"nbformat": true}', "is no notebook: it has no nbformat number"),
    (b'{"nbformat": 3, "worksheets": []}', "is a notebook of version 3, and replay takes version 4"),
    (b'{"nbformat": 5, "cells": []}', "is a notebook of version 5, later than replay knows"),
    (b'{"nbformat": 4}', "is no notebook: it has no list of cells"),
    (b'{"nbformat": 4, "cells": [1]}', "is no notebook: cell 1 is no object"),
    (b'{"nbformat": 4, "cells": [{}]}', "is no notebook: cell 1 has no cell_type"),
    (b'{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "is no notebook: cell 1 has no source"),
    (
        b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": "", "outputs": [1]}]}',
        "is no notebook: the outputs of cell 1 are no list of objects",
    ),
    (
        b'{"nbformat": 4, "cells": [], "metadata": {"kernelspec": {"language": "R"}}}',
        "is written in r, and sessions run Python",
    ),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_what_is_no_notebook_is_refused(belljar: Run, place: Path, content: bytes, message: str) -> None:
    (place / "n.ipynb").write_bytes(content)
    outcome = belljar("replay", "n.ipynb")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: n.ipynb {message}")


def test_a_call_that_cannot_work_is_refused_before_anything_runs(belljar: Run, place: Path) -> None:
    assert belljar("replay", "nowhere.ipynb").err == "error: nowhere.ipynb cannot be read: No such file or directory\n"
    file = _save(place / "n.ipynb", _code("1"))
    outcome = belljar("replay", file, "--ignore", "(")
    assert (outcome.code, outcome.err.partition(":")[0]) == (2, "error")
    assert "is no regular expression" in outcome.err


def test_a_notebook_with_a_byte_order_mark_and_nothing_to_run_is_fine(replay: Run, place: Path) -> None:
    (place / "n.ipynb").write_text('{"nbformat": 4, "cells": []}', "utf-8-sig")
    answer = replay("n.ipynb")
    assert (answer.code, answer.out) == (0, "0 cells: none to run\n")
