"""The same cells in our kernel and in ipykernel, of the same environment: people expect what they know."""

import re
from collections.abc import AsyncIterator

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel
from belljar.outputs.events import Raised
from cells import Outcome, Place, run, usable

pytestmark = pytest.mark.anyio

Pair = tuple[Kernel, Kernel]

ALIKE = {
    "pandas prints columns": "import pandas, numpy\nprint(pandas.DataFrame(numpy.zeros((2, 30))))",
    "pandas shows columns": "import pandas, numpy\npandas.DataFrame(numpy.zeros((70, 30)))",
    "pandas options": "import pandas\npandas.get_option('display.max_columns'), pandas.get_option('display.width')",
    "numpy": "import numpy\nnumpy.arange(2000).reshape(20, 100)",
    "sympy": "import sympy\nsympy.init_printing()\nsympy.sqrt(8) + sympy.Symbol('x')",
    "an estimator": "from sklearn.linear_model import LinearRegression\nrepr(LinearRegression())",
    "a kernel": "hasattr(get_ipython(), 'kernel'), get_ipython().kernel.language_info['name']",
    "an empty cell": "",
    "a comment": "# nothing",
    "blanks": "  \n\n",
    "an unknown magic": "%nosuch",
    "an unknown cell magic": "%%nosuch\n1",
    "a magic called wrongly": "%timeit -nosuch 1",
    "a failed command": "import subprocess\n!exit 3\nget_ipython().user_ns['_exit_code']",
    "the user's shell": "!type shopt",
}
RAISED = {
    "a group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "a group in the context": "try:\n    raise ExceptionGroup('several', [ValueError(1)])\n"
    "except* ValueError:\n    1 / 0",
    "a task group": "import asyncio\nasync def fail(): raise ValueError(1)\n"
    "async with asyncio.TaskGroup() as group: group.create_task(fail())",
    "pdb": "import pdb\npdb.set_trace()\nx = 1",
    "post mortem": "import pdb, sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    pdb.post_mortem()",
}


@pytest.fixture(scope="module")
async def pair(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("pair"))
    async with place.open("ipython", "ours") as ours, place.open("jupyter:python3", "theirs") as theirs:
        for kernel in (ours, theirs):
            assert (await run(kernel, "import os; os.environ['SHELL'] = '/bin/bash'")).is_ok
        yield ours, theirs


def seen(outcome: Outcome) -> dict[str, object]:
    raised = [(event.name, event.message) for event in outcome.events if isinstance(event, Raised)]
    result = {mime: _plain(str(data)) for mime, data in (outcome.result or {}).items()}
    told = outcome.stdout.replace("\r\n", "\n"), outcome.stderr
    return {"ok": outcome.is_ok, "told": told, "result": result, "raised": raised}


def _plain(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("code", ALIKE.values(), ids=ALIKE)
async def test_a_cell_is_shown_alike(pair: Pair, code: str) -> None:
    ours, theirs = pair
    shown, expected = seen(await run(ours, code)), seen(await run(theirs, code))
    assert shown == expected


@pytest.mark.parametrize("code", RAISED.values(), ids=RAISED)
async def test_what_is_raised_has_a_name_and_ours_a_traceback(pair: Pair, code: str) -> None:
    """ipykernel prints groups to stderr and has no traceback for them; an agent reads the error."""
    ours, theirs = pair
    shown, expected = await run(ours, code), await run(theirs, code)
    assert (shown.error.name, shown.is_ok) == (expected.error.name, False)
    assert len(shown.error.traceback) > 2
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("code", ["breakpoint()", "%debug"])
async def test_a_debugger_without_a_person_is_an_error(pair: Pair, code: str) -> None:
    kernel = pair[0]
    assert not (await run(kernel, "1 / 0")).is_ok
    outcome = await run(kernel, code)
    assert outcome.error.name == "StdinNotImplementedError"
    assert "the debugger has nobody to ask here" in outcome.error.message
    assert not [line for line in outcome.error.traceback if "host_link.py" in line]
    assert (await run(kernel, "1")).is_ok
