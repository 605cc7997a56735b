"""Cells as IPython would read them: what is a magic, what is a shell command, what is only text."""

import ast
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.policy.reading import Escape, Reading, Unreadable, read_cell


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
