"""The same cells in our kernel, of every origin, and in ipykernel: people expect what they know."""

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel
from belljar.outputs.events import Raised
from cells import ORIGINS, ForkingPlace, Outcome, Place, open_forking_place, open_origin, run, usable

pytestmark = pytest.mark.anyio

IS_LONG = bool(os.environ.get("BELLJAR_LONG"))
ALIKE = {
    # The first figure of a session makes pyplot interactive, whatever came before.
    "ioff before the first figure": "import matplotlib.pyplot as plt\nprint(plt.isinteractive())\nplt.ioff()\n"
    "plt.plot([1, 2])\nplt.isinteractive()",
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
    "values": "import collections, datetime, decimal, enum, fractions, pathlib, re\n"
    "class Colour(enum.Enum):\n    RED = 1\n"
    "[0.1 + 0.2, 1e100, b'\\0', {3, 1}, (1,), None, ..., int, len, Colour.RED, Colour, ValueError('x'),\n"
    "    re.match('a', 'a'), collections.Counter('aab'), collections.deque([1]), collections.defaultdict(int, a=1),\n"
    "    decimal.Decimal('1.0'), fractions.Fraction(1, 2), pathlib.Path('a'), datetime.date(2020, 1, 1),\n"
    "    datetime.timedelta(1), range(3)]",
    "long values": "[list(range(2000)), 'x' * 500, {number: str(number) for number in range(1200)}]",
    "reprs of its own": "class Page:\n    def _repr_html_(self): return '<b>1</b>'\n"
    "    def __repr__(self): return 'A'\n"
    "class Pretty:\n    def _repr_pretty_(self, printer, cycle): printer.text('pretty')\n"
    "class Bundle:\n    def _repr_mimebundle_(self, **_): return {'text/plain': 'p', 'text/x': 'y'}, {'x': 1}\n"
    "class Shown:\n    def _ipython_display_(self): print('shown')\n"
    "display(Page(), Pretty(), Bundle(), Shown())\n[Page(), Pretty()]",
    "a semicolon": "7;",
    "precision": "%precision 3\nprint(get_ipython().ev('3.14159'))\n3.14159",
    "precision again": "%precision %r\n3.14159",
    "every expression": "get_ipython().ast_node_interactivity = 'all'",
    "both": "1\n2",
    "the last expression": "get_ipython().ast_node_interactivity = 'last_expr'",
    "pandas frames": "import pandas\nframe = pandas.DataFrame({'a': [1, None] * 40, 'b': ['x', 'y'] * 40})\n"
    "print(frame, frame.describe(), frame.dtypes)\nframe.info()\nframe",
    "pandas series": "import pandas\ndisplay(pandas.Series(range(100)), pandas.date_range('2020', periods=40))\n"
    "pandas.MultiIndex.from_product([range(9), range(9)])",
    "numpy options": "import numpy\nnumpy.array([1.0]) / 0, numpy.geterr(), numpy.zeros((1001, 1001))",
    "pictures": "import matplotlib.pyplot as plt\nplt.figure(); plt.plot([1, 2]); plt.show()\n"
    "figure, axes = plt.subplots()\naxes.plot([1, 2]);",
    "a picture as the value": "import matplotlib.pyplot as plt\nfigure = plt.figure()\nplt.close(figure)\nfigure",
    "the backend": "import matplotlib\nmatplotlib.get_backend()",
    "other backends": "import matplotlib\n%matplotlib agg\nprint(matplotlib.get_backend())\n%matplotlib inline\n"
    "matplotlib.get_backend()",
    "its parameters": "import matplotlib.pyplot as plt\nplt.figure(); plt.close()\n"
    "[(name, plt.rcParams[name]) for name in ('figure.figsize', 'figure.dpi', 'savefig.dpi', 'font.size')]",
    "displays": "from IPython.display import HTML, JSON, SVG, Code, IFrame, Image, Latex, Markdown, Math\n"
    "display(HTML('<b>x</b>'), JSON({'a': 1}), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>'), Latex('$x$'),\n"
    "    Math('y'), IFrame('http://x', 1, 2), Image(url='http://x/y.png'), Code('x = 1', language='python'))\n"
    "Markdown('*x*')",
    "an updated display": "shown = display('a', display_id='z')\nshown.update('b')",
    "a captured one": "from IPython.utils.io import capture_output\nwith capture_output() as captured:\n"
    "    print('x'); display(1)\ncaptured.stdout, len(captured.outputs)",
    "a progress bar": "from tqdm import tqdm\nfor _ in tqdm(range(3), bar_format='{n}/{total}', mininterval=0): pass",
    "a bar of IPython": "from IPython.display import ProgressBar\nfor _ in ProgressBar(3): pass",
    "carriage returns": "for number in range(3):\n    print(f'\\r{number}', end='')",
    "the display hook": "import sys\nsys.displayhook(3)",
    "a hook after cells": "def hook(*_): print('hook')\nget_ipython().events.register('post_run_cell', hook)",
    "the hook": "get_ipython().events.unregister('post_run_cell', hook)",
    "a cell in a cell": "ran = get_ipython().run_cell('8')\nran.success, ran.result",
    "get_ipython": "from IPython import get_ipython as found\nfound() is get_ipython(), found().ev('1 + 1')",
    "the module": "import __main__, sys\n[__name__, __doc__, '__file__' in globals(), __main__.__dict__ is globals(),\n"
    "    sys.modules['__main__'] is __main__, hasattr(sys, 'ps1'), sys.flags, sys.warnoptions, sys.excepthook is "
    "sys.__excepthook__]",
    "names after a reset": "%reset -f\nsorted(name for name in globals() if not name.startswith('_'))",
    "streams": "import shutil, sys\n"
    "[stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read(),"
    " tuple(shutil.get_terminal_size())",
    "arguments": "import argparse\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--x')\nparser.parse_args([])",
    "tests": "import doctest, io, unittest\ndef one(): return 1\none.__doc__ = '>>> one()' + chr(10) + '2'\n"
    "class Test(unittest.TestCase):\n    def test_one(self): self.assertEqual(one(), 1)\n"
    "runner = unittest.TextTestRunner(stream=io.StringIO())\n"
    "result = unittest.main(argv=[''], exit=False, testRunner=runner).result\nresult.testsRun, doctest.testmod()",
    "sources": "import inspect, pickle\nclass Plain: pass\ndef one():\n    return 1\n"
    "inspect.getsource(one), type(pickle.loads(pickle.dumps(Plain()))).__name__",
    "warnings": "import warnings\ndef warn(): warnings.warn('old', DeprecationWarning, stacklevel=2)\nwarn()\nwarn()\n"
    "warnings.warn('mine')\nwarnings.warn('pending', PendingDeprecationWarning)",
    "a wrong escape": r"'\d'",
    "logging": "import logging\nlogging.warning('hello')\nlogging.info('not shown')\nlogging.getLogger().level",
    "top-level await": "import asyncio\nawait asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))",
    "async for and with": "import contextlib\nasync def count():\n    yield 1\n    yield 2\n"
    "@contextlib.asynccontextmanager\nasync def three():\n    yield 3\n"
    "async with three() as found: print(found)\n[number async for number in count()]",
    "a context variable": "import contextvars\nvariable = contextvars.ContextVar('variable')\ntoken = variable.set(1)",
    "its value": "variable.get('gone')",
    "annotations": "from __future__ import annotations\ndef one(x: Missing): pass\none.__annotations__",
    "annotations later": "def two(x: Missing): pass\ntwo.__annotations__",
    "threads": "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='T')\n"
    "thread.start(); thread.join()\n"
    "threading.current_thread() is threading.main_thread()",
    "processes": "import multiprocessing, os\nfrom concurrent.futures import ProcessPoolExecutor\n"
    "with ProcessPoolExecutor(2) as pool: found = list(pool.map(abs, [-1, 2]))\nprint(os.system('true'))\n"
    "found, multiprocessing.get_start_method(), multiprocessing.current_process().name",
    "files": "%%writefile a.py\nx = 'from a file'",
    "a script": "%run a.py\nx",
    "captured output": "%%capture captured\nprint('hidden')\n5",
    "what was captured": "captured.show()",
    "shells": "%%bash\necho hi; echo err >&2",
    "a failed shell": "%%bash\nexit 3",
    "other cell magics": "get_ipython().run_cell_magic('html', '', '<b>x</b>')\n"
    "get_ipython().run_cell_magic('markdown', '', '*x*')\nget_ipython().run_cell_magic('python', '', 'print(1)')",
    "variables in commands": "name = 'w'\n!echo {name} $name\nfound = !echo a b\nfound, found.s",
    "names": "%reset -f\na_name = 1\n%who\n%whos",
    "a magic of its own": "from IPython.core.magic import register_line_magic\n"
    "@register_line_magic\ndef mine(line): return line.upper()\n%mine abc",
    "environment variables": "%env FOO=bar\n%env FOO",
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
    ALIKE |= {
        "sympy": "import sympy\nsympy.init_printing()\nsympy.sqrt(8) + sympy.Symbol('x')",
        "an estimator": "from sklearn.linear_model import LinearRegression\nrepr(LinearRegression())",
    }
RAISED = {
    "a division": "def divide(): return 1 / 0\ndivide()",
    "a cause": "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError('x') from error",
    "a note": "error = ValueError('x'); error.add_note('n')\nraise error",
    "no name": "nmae",
    "no module": "import nosuchmodule",
    "no attribute": "import math\nmath.sqr(1)",
    "no exception": "raise 5",
    "a coroutine": "import asyncio\nasync def fail(): 1 / 0\nawait fail()",
    "a group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "a group in the context": "try:\n    raise ExceptionGroup('several', [ValueError(1)])\n"
    "except* ValueError:\n    1 / 0",
    "a task group": "import asyncio\nasync def fail(): raise ValueError(1)\n"
    "async with asyncio.TaskGroup() as group: group.create_task(fail())",
    "pdb": "import pdb\npdb.set_trace()\nx = 1",
    "post mortem": "import pdb, sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    pdb.post_mortem()",
}


@dataclass
class Reference:
    """ipykernel, which runs each cell once: for the first origin, in the same order as every origin does."""

    kernel: Kernel
    ran: dict[str, Outcome] = field(default_factory=dict[str, Outcome])

    async def run(self, code: str) -> Outcome:
        if code not in self.ran:
            self.ran[code] = await run(self.kernel, code)
        return self.ran[code]


@pytest.fixture(scope="module")
async def theirs(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Reference]:
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("theirs"))
    async with place.open("jupyter:python3", "theirs") as kernel:
        await use_bash(kernel)
        yield Reference(kernel)


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
    # What was asleep starts cold here, so that its saved variables are the first to import pandas in its process.
    is_cold = request.param in ("cold", "woken")
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("cold")) if is_cold else warm
    async with open_origin(place, request.param, request.param.replace(" ", "-"), imported="pandas") as kernel:
        await use_bash(kernel)
        yield kernel


async def use_bash(kernel: Kernel) -> None:
    assert (await run(kernel, "import os; os.environ['SHELL'] = '/bin/bash'")).is_ok


def seen(outcome: Outcome) -> dict[str, object]:
    return {
        "ok": outcome.is_ok,
        "told": (_plain(outcome.stdout), _plain(outcome.stderr)),
        "shown": [(_plain(shown.data), shown.update) for shown in outcome.displays],
        "result": _plain(outcome.result),
        "raised": [(event.name, event.message) for event in outcome.events if isinstance(event, Raised)],
    }


def _plain(shown: object) -> str:
    """Without what differs from run to run: addresses, identifiers, the name of the cell's file."""
    text = re.sub(r"<ipython-input-\d+-\w+>|/\S*/ipykernel_\d+/\d+\.py", "<cell>", str(shown)).replace("\r\n", "\n")
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]{16,32}\b", "0x", text)


@pytest.mark.parametrize("code", ALIKE.values(), ids=ALIKE)
async def test_a_cell_is_shown_alike(ours: Kernel, theirs: Reference, code: str) -> None:
    shown, expected = seen(await run(ours, code)), seen(await theirs.run(code))
    assert shown == expected


async def test_pandas_starts_no_thread_of_pyarrow_which_would_slow_forks_down(ours: Kernel) -> None:
    look = "[open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]"
    outcome = await run(ours, f"import os, sys, pandas\n'pyarrow' in sys.modules, [x for x in {look} if 'jemal' in x]")
    assert outcome.result is not None
    assert outcome.result["text/plain"] == "(True, [])"


@pytest.mark.parametrize("code", RAISED.values(), ids=RAISED)
async def test_what_is_raised_has_a_name_and_ours_a_traceback(ours: Kernel, theirs: Reference, code: str) -> None:
    """ipykernel prints groups to stderr and has no traceback for them; an agent reads the error."""
    shown, expected = await run(ours, code), await theirs.run(code)
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
