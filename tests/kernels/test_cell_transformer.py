"""The runner's transformation of cells is IPython's, also where it does not look for magics."""

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
    manager.token_transformers.append(Watching)
    manager.transform_cell("1+1")
    assert seen
