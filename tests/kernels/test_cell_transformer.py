"""The runner's transformation of cells is IPython's, also where it does not look for magics."""

from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from belljar.inside.runner.shell import CellTransformer

_CELLS = (
    *("", "\n\n", "1+1", "  x = 1\n  y", "a = 'x'\\\n'y'\n", "def f():\n    return 1\n\nf()", "x = (1,\n2)", "7 % 2"),
    *(
        "%pwd",
        "%%time\n1",
        "files = !ls",
        "x = %pwd",
        "!ls",
        "if True:\n    !ls",
        "print?",
        "?print",
        "a != b",
        "7 % 2",
    ),
    *(",f a b", ";f a b", "/f a b", "if True:\n    ,f a", "x = [1\n, 2\n]", "y = 1 \\\n/ 2", "'''\n,f\n'''"),
    *(">>> 1\n1", "In [1]: 1", "...: x", '"""\n>>> f()\n"""', "f'{x!r}'", "x = '100%'", "this is (not Python", "a = '"),
    *("if True:\n    1\n    \n2", "x = 1\n\n\ny", "'''\n \n'''", "x = ...", "x = 1\r\n \r\ny", "\n1", " "),
    *("1\n\n  ", "1\n\t\n", "\x0c1", "\x1c\n1", "x\x0c\n  \ny", "1\r  \r2"),
)


@pytest.mark.parametrize("cell", _CELLS)
def test_cells_are_transformed_as_by_ipython(cell: str) -> None:
    assert CellTransformer().transform_cell(cell) == TransformerManager().transform_cell(cell)


def test_transformer_that_a_session_adds_sees_every_cell() -> None:
    seen: list[object] = []

    class Watching:
        @classmethod
        def find(cls, tokens: object) -> None:
            seen.append(tokens)

    manager = CellTransformer()
    transformers: list[Any] = manager.token_transformers
    transformers.append(Watching)
    manager.transform_cell("1+1")
    assert seen


@pytest.mark.parametrize("kind", ["cleanup_transforms", "line_transforms"])
def test_line_transform_that_a_session_adds_sees_every_cell(kind: str) -> None:
    seen: list[list[str]] = []

    def watch(lines: list[str]) -> list[str]:
        seen.append(lines)
        return lines

    manager = CellTransformer()
    getattr(manager, kind).append(watch)
    manager.transform_cell("1+1")
    assert seen == [["1+1\n"]]
