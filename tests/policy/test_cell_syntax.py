"""Cells as IPython would read them: what is a magic, what is a shell command, what is only text."""

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.policy.cell_syntax import Escape, Reading, Unreadable, read_cell


def escapes(code: str) -> list[tuple[int, str]]:
    return [(escape.line, escape.name) for escape in read_cell(code).escapes]


def bodies(code: str) -> list[str]:
    return [ast.unparse(body.tree) for body in read_cell(code).bodies if body.tree.body]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("!ls", [(1, "!")]),
        ("x = 1\nfiles = !ls -l\n", [(2, "!")]),
        ("d['a'] = !ls\n", [(1, "!")]),
        ("if x:\n    !ls\n    %cd there\n", [(2, "!"), (3, "cd")]),
        ("%%bash\nrm -r x\n", [(1, "bash"), (1, "!")]),
        ("%sx ls\n", [(1, "sx"), (1, "!")]),
        ("!echo \\\n more\n%pwd\n", [(1, "!"), (3, "pwd")]),
        ("!echo it's\n%pwd\n", [(1, "!"), (2, "pwd")]),
        ("x = (1\n% 3)\n%pwd\n", [(3, "pwd")]),
    ],
)
def test_magics_and_shell_commands_are_found_with_their_lines(code: str, expected: list[tuple[int, str]]) -> None:
    assert escapes(code) == expected


@pytest.mark.parametrize(
    "code",
    ["s = '''\n!ls\n%run x\n'''\n", "x = 7 \\\n% 3\n", "total = (1\n% 2)\n", "x = 5 % 3\n", "a != b\n", "# !ls\n"],
)
def test_what_only_looks_like_a_command_is_none(code: str) -> None:
    assert escapes(code) == []


def test_lines_keep_their_numbers_behind_a_command_of_several_lines() -> None:
    reading = read_cell("!echo \\\n  more\nimport os\n")
    assert [node.lineno for node in reading.tree.body] == [1, 3]


def test_python_inside_of_magics_is_read_with_its_lines() -> None:
    assert bodies("%time run(1)\n") == ["run(1)"]
    assert bodies("%timeit -n 10 -r 3 run(1)\n") == ["run(1)"]
    (body, _) = read_cell("%%timeit -n 3\nx = 1\nrun(2)\n").bodies
    assert [node.lineno for node in body.tree.body] == [2, 3]


def test_prompts_are_read_with_and_without_being_taken_for_text() -> None:
    assert ast.unparse(read_cell(">>> import os\n>>> os.getcwd()\n").tree) == "import os\nos.getcwd()"
    assert escapes("... % pwd\n") == []
    assert [body.escapes for body in read_cell("x = 1\n... % pwd\n").bodies] == [[Escape(2, "pwd")]]


@pytest.mark.parametrize(
    ("code", "line"),
    [("x = 1\ny = = 2\n", 2), ("%%unknown\nnot python at all\n", 2), ("'a\u2028!ls'", 1), ("(" * 5_000, 1)],
)
def test_what_cannot_be_read_is_told_with_its_line(code: str, line: int) -> None:
    with pytest.raises(Unreadable) as raised:
        read_cell(code)
    assert raised.value.line == line


def test_magics_without_end_are_not_followed() -> None:
    with pytest.raises(Unreadable, match="more than 5,000 magics"):
        read_cell("!ls\n" * 10_000)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("get_ipython().system('ls')", [(1, "!")]),
        ("x = get_ipython().getoutput('ls')", [(1, "!")]),
        ("import IPython\nIPython.get_ipython().system('ls')", [(2, "!")]),
        ("shell.run_line_magic('run', 'other.py')", [(1, "run")]),
        ("shell.run_line_magic(magic_name='sx', line='ls')", [(1, "sx"), (1, "!")]),
        ("shell.run_cell_magic('bash', '', 'ls')", [(1, "bash"), (1, "!")]),
        ("get_ipython().magic('run other.py')", [(1, "run")]),
        ("shell.run_line_magic(name, 'ls')", [(1, "")]),
        ("%pinfo len\n", [(1, "pinfo")]),
        ("len?\n", []),
        ("?len\n", []),
        ("%%time\n%%bash\nls\n", [(1, "time")]),
    ],
)
def test_the_calls_that_commands_stand_for_are_commands_too(code: str, expected: list[tuple[int, str]]) -> None:
    assert escapes(code) == expected


def test_commands_in_the_bodies_of_magics_are_found() -> None:
    (body, _) = read_cell("%%time\n%%bash\nls\n").bodies
    assert body.escapes == [Escape(2, "bash"), Escape(2, "!")]
    assert [body.escapes for body in read_cell("%time !ls\n").bodies] == [[Escape(1, "!")]]
    assert bodies("get_ipython().run_cell('run(1)')") == ["run(1)"]
    assert bodies("get_ipython().ex('run(1)')") == ["run(1)"]


def test_code_behind_a_command_that_a_carriage_return_ends_is_read() -> None:
    reading = read_cell("!echo \\\r\nrun(1)\r\n")
    assert reading.escapes == [Escape(1, "!")]
    assert "run" in names_in(reading.tree)
    with pytest.raises(Unreadable, match="line separator"):
        read_cell("x = 7 \\\r% run(1)\n")


@pytest.mark.parametrize(
    ("code", "most_tokens", "reason"),
    [
        ("!ls\n" * 6, 1_000, "IPython reads no more than 5 magics in a cell"),
        ("%time " * 50 + "1", 10_000, "magics in magics without end"),
        ("%%time\n>>> " * 50 + "1", 10_000, "magics in magics without end"),
        ("if x:\n" + " pass\n" * 500 + " !ls\n" * 4, 1_500, "so many magics in so long a cell"),
        ("a\n" * 1_000, 10_000, "2,000 words and signs take too long to read"),
    ],
)
def test_reading_comes_to_an_end(code: str, most_tokens: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.policy.cell_syntax._MAX_TRANSFORMS", 5)
    monkeypatch.setattr("belljar.policy.cell_syntax._MAX_TOKENS", 1_500)
    monkeypatch.setattr("belljar.policy.cell_syntax._MAX_TOKENS_READ", most_tokens)
    with pytest.raises(Unreadable, match=reason):
        read_cell(code)


def test_ipython_is_loaded_with_the_first_cell_that_has_magics() -> None:
    code = """if True:
        import sys
        from belljar.policy.cell_syntax import is_quick, read_cell
        read_cell("x = 1\\nprint(x)\\n")
        assert "IPython" not in sys.modules and is_quick("x = 7 % 3 != 1") and not is_quick("%pwd")
        read_cell("%pwd")
        assert "IPython" in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


PIECES = [
    *[
        "!ls",
        "!!ls",
        "%pwd",
        "%%bash",
        "%%time\n",
        "%time evil()",
        "%run a",
        "x = !ls",
        "a, b = !ls",
        "d['a'] = !ls",
        "x = %pwd",
    ],
    *["'", '"', "'''", '"""', "f'", "r'\\'", "f'{x!r}'", "# it's", "#", "(", ")", "[", "]", "{", "}", "\\", "?", "??"],
    *[
        "\n",
        "\n",
        "\n",
        "\n    ",
        "\r\n",
        "\r",
        "    ",
        " ",
        "\t",
        ">>> ",
        "... ",
        "   ...: ",
        "In [1]: ",
        ";",
        "%",
        "!",
        "=",
    ],
    *[
        "x",
        "x = 1",
        "evil()",
        "evil",
        "if x:",
        "def f():",
        "pass",
        "/evil 1",
        ",evil a",
        ";evil a",
        "lambda: ",
        "!=",
        "@",
    ],
]


def inside(reading: Reading) -> Iterator[Reading]:
    yield reading
    for body in reading.bodies:
        yield from inside(body)


@settings(derandomize=True, max_examples=1_500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join))
def test_whatever_ipython_would_run_is_seen_or_refused(code: str) -> None:
    """The same cell through IPython's own transformer: each command and each name in it must be in our reading."""
    transformer = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = ast.parse(transformer.transform_cell(code))
        readings = [*inside(read_cell(code))]
    except (SyntaxError, ValueError, Unreadable):
        return
    calls = [
        node.func.attr for node in ast.walk(run) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    seen = {escape.name for reading in readings for escape in reading.escapes}
    if {"system", "getoutput"} & {*calls}:
        assert "!" in seen
    if "evil" in names_in(run):
        assert "evil" in {name for reading in readings for name in names_in(reading.tree)}


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
