"""The same cells in our kernel, of every origin, and in ipykernel: people expect what they know."""

import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel, RehearsableKernel, StatefulKernel, is_forkable
from belljar.outputs.events import Raised
from cells import ForkingPlace, Outcome, Place, open_forking_place, run, usable

pytestmark = pytest.mark.anyio

IS_LONG = bool(os.environ.get("BELLJAR_LONG"))

# Those that differ most in who imports pandas, and when: a zygote, what loads saved variables, a cell.
ORIGINS = ["forked", "woken", "cold"]
ALIKE = {
    "pandas prints columns": "import pandas, numpy\nprint(pandas.DataFrame(numpy.zeros((2, 30))))",
    "pandas shows columns": "import pandas, numpy\npandas.DataFrame(numpy.zeros((70, 30)))",
    "pandas options": "import pandas\nprint(*map(pandas.get_option, ('display.max_columns', 'display.width')))",
    "pandas reprs": "import pandas\npandas.Categorical([f'category {i}' for i in range(9)]), "
    "pandas.interval_range(0, 9, 9)",
    "pandas with pyarrow": "import io, pandas\nframe = pandas.DataFrame({'a': ['x', 'y'], 'b': [1, 2]})\n"
    "again = pandas.read_parquet(io.BytesIO(frame.to_parquet()), dtype_backend='pyarrow')\n"
    "print(again.to_markdown())\nframe['a'].array, again.dtypes",
    "numpy": "import numpy\nnumpy.arange(2000).reshape(20, 100)",
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
if IS_LONG:
    ORIGINS += ["pooled", "forked again", "rewound"]
    ALIKE |= {
        "sympy": "import sympy\nsympy.init_printing()\nsympy.sqrt(8) + sympy.Symbol('x')",
        "an estimator": "from sklearn.linear_model import LinearRegression\nrepr(LinearRegression())",
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
async def theirs(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kernel]:
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("theirs"))
    async with place.open("jupyter:python3", "theirs") as kernel:
        await use_bash(kernel)
        yield kernel


@pytest.fixture(scope="module")
async def warm(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    """Where kernels are forked from a process that has imported what a server's has."""
    async with open_forking_place(default_environment, tmp_path_factory.mktemp("warm")) as place:
        yield place


@pytest.fixture(scope="module", params=ORIGINS)
async def ours(
    request: pytest.FixtureRequest,
    default_environment: Environment,
    warm: ForkingPlace,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Kernel]:
    cold = Place(usable("process"), default_environment, tmp_path_factory.mktemp("cold"))
    async with opened(cold if request.param in ("cold", "woken") else warm, request.param) as kernel:
        await use_bash(kernel)
        yield kernel


@asynccontextmanager
async def opened(place: Place, origin: str) -> AsyncIterator[Kernel]:
    """A kernel of that origin."""
    async with AsyncExitStack() as stack:
        kernel = await stack.enter_async_context(place.open("ipython", origin.replace(" ", "-")))
        if origin == "pooled":
            assert isinstance(kernel, RehearsableKernel)
            await kernel.rehearse()
        elif origin == "forked again":
            assert isinstance(place, ForkingPlace)
            before, after = place.folders("forked-again"), place.folders("fork", fork_of="forked-again")
            after.make()
            kernel, _ = await place.starter.fork(kernel, before, after)
            stack.push_async_callback(kernel.aclose)
        elif origin == "rewound":
            assert is_forkable(kernel)
            kernel = await kernel.restore(await kernel.fork_checkpoint())
            stack.push_async_callback(kernel.aclose)
        elif origin == "woken":
            # The first import of pandas in its process is that of the saved variables.
            assert (await run(kernel, "import pandas")).is_ok
            assert isinstance(kernel, StatefulKernel)
            await kernel.save_state(str(place.folder / "state"))
            kernel = await stack.enter_async_context(place.open("ipython", "after"))
            assert isinstance(kernel, StatefulKernel)
            assert "pandas" in (await kernel.load_state(str(place.folder / "state"))).kept
        yield kernel


async def use_bash(kernel: Kernel) -> None:
    assert (await run(kernel, "import os; os.environ['SHELL'] = '/bin/bash'")).is_ok


def seen(outcome: Outcome) -> dict[str, object]:
    raised = [(event.name, event.message) for event in outcome.events if isinstance(event, Raised)]
    result = {mime: _plain(str(data)) for mime, data in (outcome.result or {}).items()}
    told = outcome.stdout.replace("\r\n", "\n"), outcome.stderr
    return {"ok": outcome.is_ok, "told": told, "result": result, "raised": raised}


def _plain(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("code", ALIKE.values(), ids=ALIKE)
async def test_a_cell_is_shown_alike(ours: Kernel, theirs: Kernel, code: str) -> None:
    shown, expected = seen(await run(ours, code)), seen(await run(theirs, code))
    assert shown == expected


async def test_pandas_starts_no_thread_of_pyarrow_which_would_slow_forks_down(ours: Kernel) -> None:
    look = "[open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]"
    outcome = await run(ours, f"import os, sys, pandas\n'pyarrow' in sys.modules, [x for x in {look} if 'jemal' in x]")
    assert outcome.result is not None
    assert outcome.result["text/plain"] == "(True, [])"


@pytest.mark.parametrize("code", RAISED.values(), ids=RAISED)
async def test_what_is_raised_has_a_name_and_ours_a_traceback(ours: Kernel, theirs: Kernel, code: str) -> None:
    """ipykernel prints groups to stderr and has no traceback for them; an agent reads the error."""
    shown, expected = await run(ours, code), await run(theirs, code)
    assert (shown.error.name, shown.is_ok) == (expected.error.name, False)
    assert len(shown.error.traceback) > 2
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("code", ["breakpoint()", "%debug"])
async def test_a_debugger_without_a_person_is_an_error(ours: Kernel, code: str) -> None:
    assert not (await run(ours, "1 / 0")).is_ok
    outcome = await run(ours, code)
    assert outcome.error.name == "StdinNotImplementedError"
    assert "the debugger has nobody to ask here" in outcome.error.message
    assert not [line for line in outcome.error.traceback if "host_link.py" in line]
    assert (await run(ours, "1")).is_ok
