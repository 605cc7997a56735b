import ast
import base64
import html
import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import nbformat
import pytest
from markdown_it import MarkdownIt
from ran_sessions import Ran, execute, ran, settings_in

import belljar as package
from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.http.server_socket import open_reachable_runtime
from belljar.journal.journal import open_journal
from belljar.journal.schema import VERSION
from belljar.journal.session_records import SessionRecords
from serving_process import http_server, serve_over_http

Run = Callable[..., Any]
library: Any = nbformat

_TAG = re.compile(r"<[^<>]*>")
SCRIPT = "<script>top.document.title = 'TAKEN'; document.title = 'TAKEN'</script>"
CELLS = [
    "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out again')\n6 * 7",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    f"from IPython.display import HTML, JSON, SVG, Markdown\ndisplay(HTML({SCRIPT!r} * 200))",
    f"display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\">' + {SCRIPT!r} + '</svg>'))",
    "display(JSON({'a': [1, None]}))\ndisplay(JSON({'b': float('nan')}))",
    f"def inverse(x):\n    return 1 / x\nraise ValueError('</pre>' + {SCRIPT!r})",
    "print('```\\n~~~~\\n<b>bold</b>\\n`````')\ndisplay(Markdown('# title\\n</pre><script>'))",
    "print('\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07\\x9b1m\\u202eturned')\n"
    "print('first\\rimport os; os.abort()\\x0cx\\u2028y')",
    "_ = sys.stdout.buffer.write(b'\\xff\\xfe\\x00 bytes\\n'); sys.stdout.flush()\nprint('half \\ud800')",
    "display({'text/plain': 'half \\ud800', 'no mime\"><script>': '<script>'}, raw=True)",
    "%%bash\necho from bash",
    "wrong = 1",
    "%time 1 + 1",
    "'x' * 30_000",
    "print('one'); display(Markdown('two')); print('three'); display('four'); print('five')\n'six'",
    "for n in range(101): print(f'\\r{n}% of the bar', end='')\nprint()",
    "print('last words', flush=True)\nimport os\nos._exit(3)",
]
PICTURE, PAGE, RAISED, UNDONE, LONG, MIXED, BAR, DEAD = 1, 2, 5, 11, 13, 14, 15, 16


@pytest.fixture(scope="module")
def session(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("data"), default_environment, *CELLS, undone=UNDONE)


@pytest.fixture
def exported(belljar: Run, place: Path, session: Ran) -> Callable[..., str]:
    """The text of an export."""

    def export(name: str, *arguments: str) -> str:
        outcome = belljar("export", session.session_id, "-o", name, "--data-directory", str(session.data), *arguments)
        assert outcome.code == 0, outcome.err
        assert outcome.err == f"saved {name}: {len(CELLS)} executions\n"
        return (place / name).read_bytes().decode()

    return export


# The notebook


def test_the_notebook_is_valid_and_has_everything(exported: Run, session: Ran) -> None:
    notebook = library.reads(exported("out.ipynb"), as_version=4)
    library.validate(notebook)
    cells = notebook.cells
    assert [cell.source for index, cell in enumerate(cells) if index != UNDONE] == [
        code for index, code in enumerate(CELLS) if index != UNDONE
    ]
    assert [cell.id for cell in cells] == [result.execution_id for result in session.results]
    assert [(out.output_type, out.get("name"), out.get("text")) for out in cells[0].outputs] == [
        ("stream", "stdout", "out\n"),
        ("stream", "stderr", "err\n"),
        ("stream", "stdout", "out again\n"),
        ("execute_result", None, None),
    ]
    assert cells[0].outputs[-1].data == {"text/plain": "42"}
    assert base64.b64decode(cells[PICTURE].outputs[0].data["image/png"]).startswith(b"\x89PNG")
    assert cells[PAGE].outputs[0].data["text/html"] == SCRIPT * 200
    assert cells[4].outputs[0].data["application/json"] == {"a": [1, None]}
    assert isinstance(cells[4].outputs[1].data["application/json"], str)
    assert cells[RAISED].outputs[0].ename == "ValueError"
    assert "ValueError" in "".join(cells[RAISED].outputs[0].traceback)
    assert cells[LONG].outputs[0].data["text/plain"] == repr("x" * 30_000)


def test_prints_displays_and_the_value_keep_their_order_in_every_format(exported: Run) -> None:
    outputs = json.loads(exported("out.ipynb"))["cells"][MIXED]["outputs"]
    kinds = [output["output_type"] for output in outputs]
    assert kinds == ["stream", "display_data", "stream", "display_data", "stream", "execute_result"]
    words = ("one", "two", "three", "four", "five", "six")
    assert [word in json.dumps(output) for word, output in zip(words, outputs, strict=True)] == [True] * 6
    for name, flags in {"out.md": [], "out.html": [], "out.py": ["--outputs"]}.items():
        after_the_code = exported(name, *flags).rpartition("display(Markdown(")[2].partition("six")[2]
        found = [after_the_code.find(word) for word in words]
        assert (sorted(found), -1 in found) == (found, False), name


def test_a_progress_bar_is_exported_as_it_was_last(exported: Run) -> None:
    (output,) = json.loads(exported("out.ipynb"))["cells"][BAR]["outputs"]
    assert "".join(output["text"]) == "100% of the bar\n"
    for name, flags in {"out.md": [], "out.html": [], "out.py": ["--outputs"]}.items():
        text = exported(name, *flags)
        assert ("100% of the bar" in text, "99% of the bar" in text) == (True, False), name


def test_what_was_taken_back_is_marked(exported: Run) -> None:
    cell = json.loads(exported("out.ipynb"))["cells"][UNDONE]
    assert cell["metadata"]["tags"] == ["undone", "skip-execution"]
    assert "".join(cell["source"]).startswith("# Undone")


def test_a_cell_that_died_ends_with_its_cause(exported: Run) -> None:
    outputs = json.loads(exported("out.ipynb"))["cells"][DEAD]["outputs"]
    assert [output["output_type"] for output in outputs] == ["stream", "error"]
    assert (outputs[1]["ename"], outputs[1]["evalue"]) == (
        "died",
        "kernel-died: the kernel's process ended with exit status 3",
    )


def test_the_same_session_gives_the_same_file(exported: Run) -> None:
    assert exported("one.ipynb") == exported("two.ipynb")


def test_the_code_alone_is_exported_on_request(exported: Run) -> None:
    cells = json.loads(exported("out.ipynb", "--no-outputs"))["cells"]
    assert len(cells) == len(CELLS)
    assert all(cell["outputs"] == [] for cell in cells)


def test_long_output_is_cut_in_the_middle_unless_all_of_it_is_wanted(
    belljar: Run, place: Path, default_environment: Environment, tmp_path: Path
) -> None:
    loud = ran(tmp_path, default_environment, "for i in range(50_000): print('line', i)")
    for limit, size in (("2000", 2_100), ("0", 538_890)):
        arguments = ("-o", f"{limit}.ipynb", "--limit", limit, "--data-directory", str(tmp_path))
        assert belljar("export", loud.session_id, *arguments).code == 0
        (cell,) = json.loads((place / f"{limit}.ipynb").read_text())["cells"]
        text = "".join("".join(output["text"]) for output in cell["outputs"])
        assert text.startswith("line 0\n")
        assert text.endswith("line 49999\n")
        assert len(text) <= size
        assert ("characters left out here" in text) == (limit != "0")
    assert len(text) == size


# The page


OURS = {*("html", "head", "meta", "title", "style", "body", "header", "main"), *("h1", "p", "code", "section", "div")}
OURS |= {"span", "pre", "img", "iframe", "strong", "mark", "ol", "li", "details", "summary"}


class _Page(HTMLParser):
    """Which elements a browser would make, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("flags", [[], ["--scripts"]])
def test_nothing_of_what_cells_showed_becomes_part_of_the_page(exported: Run, flags: list[str]) -> None:
    page = _Page(exported("out.html", *flags))
    names = {name for name, _ in page.elements}
    assert names <= OURS
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    (policy,) = (meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert ("script-src" in policy) == bool(flags)
    frames = page.all("iframe")
    # Markdown never has a script that could run.
    assert {frame["sandbox"] for frame in frames} == ({"allow-scripts", ""} if flags else {""})
    assert frames[0]["sandbox"] == ("allow-scripts" if flags else "")
    assert SCRIPT * 200 in (frames[0]["srcdoc"] or "")
    assert all((image["src"] or "").startswith("data:image/") for image in page.all("img"))


@pytest.mark.parametrize("flags", [[], ["--scripts"]])
def test_a_browser_shows_the_page_and_runs_nothing_in_it(exported: Run, place: Path, flags: list[str]) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    exported("out.html", *flags)
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={place.parent / 'browser'}")
    shown = subprocess.run(
        [browser, *options, "--dump-dom", (place / "out.html").as_uri()], capture_output=True, text=True, timeout=90
    )
    assert "<title>belljar session " in shown.stdout
    assert "<title>TAKEN" not in shown.stdout
    assert "kernel-died: the kernel's process ended with exit status 3" in shown.stdout


# The script


def test_output_never_becomes_code(exported: Run) -> None:
    bare, told = exported("bare.py"), exported("told.py", "--outputs")
    assert ast.dump(ast.parse(bare)) == ast.dump(ast.parse(told))
    assert "# first" not in bare
    assert "# ValueError: </pre>" in told
    assert bare.count("\n# %%") == len(CELLS) + 1  # and the magic of a cell, in a comment
    assert "# wrong = 1" in bare
    assert "# %time 1 + 1" in bare
    assert "# echo from bash" in bare


@pytest.mark.parametrize(
    ("code", "script"),
    [
        ("x = 1\n", "x = 1"),
        ("await f()", "await f()"),
        ("%matplotlib inline\nx = 1", "# %matplotlib inline\nx = 1"),
        ("!ls\n?x", "# !ls\n# ?x"),
        ("if x:\n    %time 1", "# if x:\n#     %time 1"),
        ("x = (\rimport os", "# x = (\n# import os"),
        ("%a\rimport os", "# %a�import os"),
        ("%a\x0cimport os", "# %a�import os"),
    ],
)
def test_what_python_cannot_read_is_a_comment(code: str, script: str) -> None:
    from belljar.outputs.export_formats import as_python

    assert as_python(code) == script


# Markdown


def test_output_cannot_leave_its_fence(exported: Run, place: Path) -> None:
    text = exported("out.md")
    tokens = MarkdownIt().parse(text)
    assert {token.type for token in tokens} <= {
        "heading_open",
        "heading_close",
        "inline",
        "fence",
        "paragraph_open",
        "paragraph_close",
    }
    assert len([token for token in tokens if token.type == "heading_open"]) == len(CELLS) + 1
    fences = [token.content for token in tokens if token.type == "fence"]
    assert "```\n~~~~\n<b>bold</b>\n`````\n" in fences
    assert not any("\x1b" in fence or "\r" in fence for fence in fences)
    assert (place / "out_files" / "2-1.png").read_bytes().startswith(b"\x89PNG")
    assert "![output](out_files/2-1.png)" in text
    assert [path.name for path in (place / "out_files").iterdir()] == ["2-1.png"]


def test_pictures_are_in_the_text_where_there_is_no_place_beside_it(belljar: Run, session: Ran, place: Path) -> None:
    outcome = belljar("export", session.session_id, "-o", "-", "--format", "md", "--data-directory", str(session.data))
    assert "![output](data:image/png;base64," in outcome.out
    assert (outcome.code, outcome.err, list(place.iterdir())) == (0, "", [])


# Where sessions are


@pytest.mark.anyio
async def test_a_session_of_a_running_server_is_exported_as_it_is_now(
    belljar: Run, default_environment: Environment, tmp_path: Path
) -> None:
    async with open_reachable_runtime(settings_in(tmp_path / "data", default_environment)) as runtime:
        session = runtime.sessions.create("somebody")
        await execute(session, "print('done')")
        running = session.submit(
            make_cell(session.settings, "print('begun', flush=True)\nimport time\ntime.sleep(600)")
        )
        with anyio.fail_after(60):
            while "begun" not in "".join(running.result().output):
                await running.wait_for_change(60)
        runtime.sessions.journal.commit()
        arguments = (session.id[:12], "-o", "-", "--format", "ipynb", "--data-directory", str(tmp_path / "data"))
        answer = await anyio.to_thread.run_sync(belljar, "export", *arguments)
        assert answer.code == 0, answer.err
        running.interrupt()
        await running.wait(60)
        # The server goes on writing what the export only read.
        assert (await execute(session, "1 + 1")).result == "2"
    first, second = json.loads(answer.out)["cells"]
    assert first["outputs"][0]["text"] == ["done\n"]
    assert [output["text"] for output in second["outputs"]] == [
        ["begun\n"],
        ["[belljar: it had not ended when this was exported]\n"],
    ]


SPEAKS_TWICE = """
import time
print('begun', flush=True)
time.sleep(0.5)
print('again', flush=True)
time.sleep(600)
"""


@pytest.mark.anyio
async def test_a_session_of_a_killed_server_is_exported_with_what_it_said(
    belljar: Run, default_environment: Environment, tmp_path: Path
) -> None:
    with http_server(serve_over_http(default_environment), tmp_path, BELLJAR_FORK_START="false") as (url, process):
        async with package.connect(f"{url}/mcp") as server:
            with pytest.raises((Exception, BaseExceptionGroup)):  # noqa: PT012
                async with server.open_session() as session:
                    await session.execute("print('done')")
                    # What it said first is on disk for sure when it speaks again: see COMMIT_S.
                    async for event in session.stream(SPEAKS_TWICE):
                        if "again" in event.text:
                            process.kill()
                            process.wait()
    arguments = (session.id, "-o", "-", "--format", "md", "--data-directory", str(tmp_path))
    answer = await anyio.to_thread.run_sync(belljar, "export", *arguments)
    assert "done\n" in answer.out
    assert "begun\n" in answer.out
    assert "[belljar: its server ended without notice while it ran]" in answer.out


def test_a_folder_that_nobody_may_write_to_is_read(
    belljar: Run, place: Path, default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    kept = ran(data, default_environment, "print('kept')")
    before = sorted(path.name for path in data.iterdir())
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert belljar("export", kept.session_id, "-o", "out.md", "--data-directory", str(data)).code == 0
    assert "kept\n" in (place / "out.md").read_text()
    assert sorted(path.name for path in data.iterdir()) == before


def test_displays_that_are_gone_are_counted(
    belljar: Run, place: Path, default_environment: Environment, tmp_path: Path
) -> None:
    kept = ran(tmp_path, default_environment, CELLS[PICTURE])
    shutil.rmtree(tmp_path / "sessions" / kept.session_id / "displays")
    outcome = belljar("export", kept.session_id, "-o", "out.ipynb", "--data-directory", str(tmp_path))
    assert outcome.err.startswith("warning: 1 displays are no longer on disk and left out\nsaved ")
    library.validate(library.read(place / "out.ipynb", as_version=4))


# What cannot be done


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    """A data directory with a few sessions on record."""
    data = tmp_path / "data"
    data.mkdir()

    async def enter() -> None:
        with open_journal(data / "journal.sqlite") as journal:
            entered = SessionRecords(journal, "1-gone")
            for identifier in ("aa1", "aa2", "bb1", "cc1"):
                entered.enter(identifier, "local", "default", "")
            entered.record_end("bb1", "was cleared")
            entered.enter("dd1", "", "default", "", "unborn")

    anyio.run(enter)
    return data


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("aa", "aa begins the ids of 2 sessions"),
        ("bb", "session bb1 was cleared, and its executions with it"),
        ("dd", "no session here has an id that begins with dd"),
        ("ff", "no session here has an id that begins with ff"),
        ("%", "'%' is no session id"),
        ("../aa1", "'../aa1' is no session id"),
        ("", "'' is no session id"),
        ("é", "'é' is no session id"),
    ],
)
def test_a_session_that_is_not_to_be_had_is_named(
    belljar: Run, place: Path, data_directory: Path, prefix: str, message: str
) -> None:
    outcome = belljar("export", "-o", "out.ipynb", "--data-directory", str(data_directory), "--", prefix)
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, f"error: {message}")
    assert list(place.iterdir()) == []


def test_a_session_in_which_nothing_ran_is_an_empty_notebook(belljar: Run, place: Path, data_directory: Path) -> None:
    assert belljar("export", "cc", "-o", "out.ipynb", "--data-directory", str(data_directory)).code == 0
    notebook = library.read(place / "out.ipynb", as_version=4)
    library.validate(notebook)
    assert notebook.cells == []


def test_what_a_caller_had_installed_is_in_every_format(belljar: Run, place: Path, data_directory: Path) -> None:
    async def install() -> None:
        with open_journal(data_directory / "journal.sqlite") as journal:
            journal.record_install("cc1", "%pip install humanize 'pandas>=2'")

    anyio.run(install)
    lines = {
        "out.ipynb": "%pip install humanize 'pandas>=2'",
        "out.py": "# %pip install humanize 'pandas>=2'\n",
        "out.md": "## Cell 1\n\n```python\n%pip install humanize 'pandas>=2'\n```\n",
        "out.html": "pip install humanize",
    }
    for name, line in lines.items():
        outcome = belljar("export", "cc1", "-o", name, "--data-directory", str(data_directory))
        assert outcome.err == f"saved {name}: 0 executions\n"
        assert line in html.unescape(_TAG.sub("", (place / name).read_text())), name
    library.validate(library.read(place / "out.ipynb", as_version=4))
    page = (place / "out.html").read_text()
    assert ("0 executions" in page, "running" in page) == (True, False)


def test_a_hint_names_the_latest_sessions(belljar: Run, data_directory: Path) -> None:
    hint = belljar("export", "ff", "-o", "out.md", "--data-directory", str(data_directory)).err.splitlines()[1]
    assert hint.startswith("hint: The latest sessions are ")
    assert sorted(hint.rpartition(" are ")[2].split(", ")) == ["aa1", "aa2", "cc1"]


def test_a_journal_that_cannot_be_read_is_an_error_and_not_a_fault(
    belljar: Run, data_directory: Path, tmp_path: Path
) -> None:
    def told(data: Path) -> str:
        outcome = belljar("export", "aa1", "-o", "out.md", "--data-directory", str(data))
        assert outcome.code == 2
        return outcome.err

    assert told(tmp_path / "nowhere").startswith("error: there is no journal at ")
    with closing(sqlite3.connect(data_directory / "journal.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
        connection.commit()
    assert "is of a later belljar" in told(data_directory)
    with closing(sqlite3.connect(data_directory / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 0")
        connection.commit()
    assert "is of an earlier belljar" in told(data_directory)
    (data_directory / "journal.sqlite").write_bytes(b"no database" * 1_000)
    assert "cannot be read: file is not a database" in told(data_directory)


def test_nothing_is_overwritten_unless_that_is_wanted(belljar: Run, place: Path, data_directory: Path) -> None:
    (place / "out.ipynb").write_text("mine")
    arguments = ("export", "cc1", "-o", "out.ipynb", "--data-directory", str(data_directory))
    refused = belljar(*arguments)
    assert (refused.code, refused.err.splitlines()[0]) == (2, "error: out.ipynb exists already")
    assert (place / "out.ipynb").read_text() == "mine"
    assert belljar(*arguments, "--force").code == 0
    assert json.loads((place / "out.ipynb").read_text())["cells"] == []
    assert [path.name for path in place.iterdir()] == ["out.ipynb"]


def test_the_folder_of_pictures_is_not_overwritten_either(belljar: Run, place: Path, session: Ran) -> None:
    (place / "out_files").mkdir()
    arguments = ("export", session.session_id, "-o", "out.md", "--data-directory", str(session.data))
    assert belljar(*arguments).err.splitlines()[0] == "error: out_files exists already"
    assert belljar(*arguments, "--force").code == 0
    assert (place / "out_files" / "2-1.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "-"), "stdout has no name that says a format"),
        (("-o", "out.pdf"), "out.pdf has no ending that says a format"),
        (("-o", "nowhere/out.md"), "nowhere/out.md cannot be written: No such file or directory"),
        (("-o", ".", "--format", "md", "--force"), ". cannot be written: Is a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_told(
    belljar: Run, place: Path, data_directory: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = belljar("export", "cc1", "--data-directory", str(data_directory), *arguments)
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, f"error: {message}")
    assert list(place.iterdir()) == []
