"""What is shared with the process a session was forked from, or with its siblings, and must not be noticed inside."""

import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from belljar.environments import Environment
from belljar.errors import KernelDied
from belljar.kernels.base import Kernel
from belljar.outputs.events import Event, InputRequest, Raised
from cells import ForkingPlace, interrupt_when_started, open_forking_place, run

pytestmark = pytest.mark.anyio

SECRET = f"belljar-secret-{secrets.token_hex(16)}"
PNG = "iVBORw0KGgo"


@pytest.fixture(scope="module")
def kept_secret() -> AsyncIterator[None]:
    """Something in the server's environment that no session may learn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BELLJAR_TEST_SECRET", SECRET)
        yield


@pytest.fixture(scope="module")
async def forking_place(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    """With the usual modules, as a server has them."""
    async with open_forking_place(default_environment, tmp_path_factory.mktemp("forks")) as place:
        yield place


@pytest.fixture(scope="module")
async def siblings(kept_secret: None, forking_place: ForkingPlace) -> AsyncIterator[list[Kernel]]:
    """Three kernels of one zygote, alive at once."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(forking_place.open("ipython", f"sibling-{n}")) for n in range(3)]


@pytest.fixture(scope="module")
def kernel(siblings: list[Kernel]) -> Kernel:
    return siblings[0]


@pytest.fixture(scope="module")
async def cold(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kernel]:
    """One that was started the long way."""
    folder = tmp_path_factory.mktemp("cold")
    async with open_forking_place(default_environment, folder, fork_start=False) as place, place.open() as kernel:
        yield kernel


async def tell(kernel: Kernel, code: str) -> str:
    """What a cell prints; an error in it fails the test."""
    outcome = await run(kernel, code)
    assert outcome.is_ok, outcome.events
    return outcome.stdout


async def test_siblings_come_from_a_process_that_had_everything_imported(siblings: list[Kernel]) -> None:
    for kernel in siblings:
        assert await tell(kernel, "import sys; print({'numpy', 'pandas', 'matplotlib.pyplot'} <= {*sys.modules})") == (
            "True\n"
        )


# Randomness


@pytest.mark.parametrize(
    "code",
    [
        "__import__('random').random()",
        "__import__('numpy').random.random()",
        "__import__('numpy').random.default_rng().random()",
        "__import__('numpy').random.RandomState().random()",
        "__import__('uuid').uuid4()",
        "__import__('uuid').uuid1()",
        "__import__('secrets').token_hex()",
        "__import__('ssl').RAND_bytes(16)",
        "__import__('os').urandom(16)",
        "__import__('tempfile').mktemp()",
        "bytes(__import__('multiprocessing').current_process().authkey)",
        "__import__('pandas').Series(range(10**6)).sample(3).tolist()",
    ],
)
async def test_no_two_siblings_draw_the_same(siblings: list[Kernel], code: str) -> None:
    drawn = [await tell(kernel, f"print({code})") for kernel in siblings]
    assert len({*drawn}) == len(siblings), drawn


# Descriptors


async def test_siblings_have_their_standard_descriptors_their_wire_and_their_loop_alone(siblings: list[Kernel]) -> None:
    code = """
import asyncio, os
await asyncio.sleep(0)
for name in os.listdir('/proc/self/fd'):
    try: print(name, os.readlink('/proc/self/fd/' + name))
    except OSError: pass
"""
    seen: set[str] = set()
    for kernel in siblings:
        links = dict(line.split(maxsplit=1) for line in (await tell(kernel, code)).splitlines())
        kinds = sorted(link.partition(":")[0] for link in links.values())
        assert kinds == ["anon_inode", "pipe", "pipe", "pipe", "socket", "socket", "socket"]
        objects = {link for link in links.values() if not link.startswith("anon_inode")}
        assert not seen & objects, "siblings share one"
        seen |= objects


async def test_the_loop_of_a_session_is_of_the_class_that_nest_asyncio_patches_for_all_loops(
    forking_place: ForkingPlace,
) -> None:
    code = """
import asyncio, nest_asyncio2
nest_asyncio2.apply()
async def other(): return asyncio.new_event_loop().run_until_complete(asyncio.sleep(0, 'inside'))
print(await other(), type(asyncio.get_event_loop()) is asyncio.SelectorEventLoop)
"""
    async with forking_place.open("ipython", "nested") as kernel:
        assert await tell(kernel, code) == "inside True\n"


async def test_a_forked_session_knows_its_own_thread(siblings: list[Kernel]) -> None:
    code = """
import logging, os, threading
main = threading.main_thread()
print(main is threading.current_thread(), main.native_id == os.getpid(), threading.enumerate() == [main])
with logging._lock: print('unlocked')
"""
    for kernel in siblings:
        assert await tell(kernel, code) == "True True True\nunlocked\n"


async def test_a_program_that_a_sibling_starts_inherits_the_standard_descriptors_alone(kernel: Kernel) -> None:
    code = "import subprocess; print(subprocess.run(['ls', '/proc/self/fd'], capture_output=True).stdout.split())"
    assert await tell(kernel, code) == "[b'0', b'1', b'2', b'3']\n"


async def test_there_is_nothing_to_read(kernel: Kernel) -> None:
    assert await tell(kernel, "import os, sys; print([sys.stdin.read(), os.read(0, 10)])") == "['', b'']\n"


# Secrets

_SEARCH = r"""
import re
def found(pattern):
    places = []
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
        for line in maps.read().splitlines():
            bounds, rights, *_ = line.split()
            if rights[0] != 'r' or line.endswith(('[vvar]', '[vsyscall]', '[vvar_vclock]')): continue
            start, end = (int(bound, 16) for bound in bounds.split('-'))
            memory.seek(start)
            try: content = memory.read(end - start)
            except OSError: continue
            if re.search(pattern, content): places.append(line)
    return places
"""


async def test_the_servers_secrets_are_nowhere_in_a_session(siblings: list[Kernel]) -> None:
    pattern = f"{SECRET[:20]}[{SECRET[20]}]{SECRET[21:]}"  # does not find itself
    assert SECRET not in await tell(siblings[0], "print(open('/proc/self/environ').read())")
    assert await tell(siblings[0], _SEARCH + f"print(found(rb'{pattern}'))") == "[]\n"
    # The search can find: it does, once the session has it.
    await tell(siblings[0], f"held = {SECRET!r}.encode() * 2")
    assert await tell(siblings[0], f"print(found(rb'{pattern}') != [])") == "True\n"
    # And what one session holds is not in another's memory.
    assert await tell(siblings[1], _SEARCH + f"print(found(rb'{pattern}'))") == "[]\n"


# Side by side with a cold start

_FACTS = r"""
def _facts():
    import asyncio, builtins, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, resource, signal
    import socket, sys, threading, time, warnings
    import numpy, pandas, matplotlib.pyplot as plt
    plt.figure(); plt.close()
    shell = get_ipython()
    status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
    names = ['Umask', 'Groups', 'NoNewPrivs', 'Seccomp', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'SigBlk']
    names += ['SigIgn', 'TracerPid', 'Cpus_allowed', 'THP_enabled']
    facts = {name: status.get(name, '').strip() for name in names}
    facts['variables'] = {name: value for name, value in sorted(os.environ.items()) if name not in
        ('BELLJAR_PACKAGES', 'PYTHONPATH')}
    facts['argv'] = sys.argv
    facts['path'] = [path.replace(os.environ['PYTHONPATH'].split(':')[0], 'LAYER') for path in sys.path]
    facts['folder'] = os.getcwd()
    facts['signals'] = {int(one): str(signal.getsignal(one)).split(' at ')[0] for one in signal.valid_signals()}
    facts['blocked'] = list(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    facts['limits'] = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if 'RLIMIT_' in name}
    facts['flags'] = str(sys.flags)
    facts['filters'] = sorted(map(str, warnings.filters))
    facts['locale'] = [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()]
    streams = sys.stdin, sys.stdout, sys.stderr
    facts['streams'] = [(one.encoding, one.errors, one.line_buffering, one.fileno()) for one in streams]
    facts['zone'] = [time.tzname, time.timezone, time.localtime(0).tm_hour]
    facts['threads'] = [thread.name for thread in threading.enumerate()]
    facts['numbers'] = [threading.get_native_id() == threading.main_thread().native_id == os.getpid(),
        threading.current_thread() is threading.main_thread(), threading.get_ident() == threading.main_thread().ident]
    facts['collector'] = [gc.get_threshold(), gc.isenabled(), gc.get_debug(), len(gc.callbacks)]
    main = sys.modules['__main__']
    facts['main'] = [__name__, vars(main) is globals(), main.__name__, getattr(main, '__file__', None), main.__doc__]
    facts['names'] = {name: type(value).__name__ for name, value in sorted(globals().items())}
    facts['history'] = [len(In), Out, _, __, ___, _i, _ii, shell.execution_count, shell.history_manager.dir_hist]
    facts['hidden'] = sorted(shell.user_ns_hidden)
    facts['sources'] = len(shell.compile._filename_map)
    facts['limits of python'] = [sys.getrecursionlimit(), sys.getswitchinterval()]
    facts['hooks'] = [str(hook).split(' at ')[0] for hook in (sys.excepthook, sys.displayhook, sys.breakpointhook)]
    facts['last error'] = [hasattr(sys, 'last_' + name) for name in ('type', 'value', 'traceback', 'exc')]
    facts['faulthandler'] = faulthandler.is_enabled()
    loggers = logging.Logger.manager.loggerDict.items()
    facts['loggers'] = [logging.getLogger().level, str(logging.getLogger().handlers),
        sorted(name for name, one in loggers if getattr(one, 'level', 0))]
    facts['processes'] = [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True)]
    facts['loop'] = [str(type(asyncio.get_event_loop())), asyncio.get_event_loop().is_running()]
    facts['children'] = open(f'/proc/self/task/{os.getpid()}/children').read()
    facts['who'] = [os.getuid() == os.geteuid() == os.stat('/proc/self').st_uid, os.getgroups(), socket.gethostname()]
    facts['rest'] = [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), os.cpu_count(),
        str(decimal.getcontext()), socket.getdefaulttimeout(), open('/proc/self/oom_score_adj').read()]
    facts['python'] = [sys.prefix, sys.base_prefix, sys.executable, sys.dont_write_bytecode]
    facts['finders'] = [getattr(finder, '__name__', type(finder).__name__) for finder in sys.meta_path]
    facts['builtins'] = sorted(vars(builtins))
    facts['figures'] = [plt.get_backend(), plt.get_fignums(), plt.isinteractive(), str(dict(plt.rcParams))]
    facts['printing'] = [str(numpy.get_printoptions()), str(numpy.geterr()), pandas.get_option('display.max_rows')]
    facts['callbacks'] = {name: len(them) for name, them in shell.events.callbacks.items()}
    facts['magics'] = sorted(shell.magics_manager.magics['line'])
    facts['folders'] = [sorted(os.listdir(place)) for place in ('/tmp', '/dev/shm', '/mnt/data')]
    return json.dumps(facts, default=str)
print(_facts())
"""


_FILES = r"""
import hashlib, json, os, re
def own(text): return re.sub(r'[0-9]{4,}', 'own', text)
def told(path):
    if os.path.islink(path): return 'link', os.readlink(path)
    if os.path.isdir(path): return 'folder', os.access(path, os.W_OK)
    if not os.path.isfile(path) or not os.access(path, os.R_OK): return 'other', os.access(path, os.W_OK)
    with open(path, 'rb') as file: content = file.read()
    text = own(content.decode('latin-1')) if path.startswith('/etc/') else len(content)
    return 'file', os.access(path, os.W_OK), text
files = {path: told(path) for path in map('/'.__add__, os.listdir('/'))}
for root in ('/etc', '/sys', '/var', '/mnt'):
    for folder, folders, names in os.walk(root):
        if not folder.startswith('/mnt/data'):
            files.update({path: told(path) for path in (os.path.join(folder, name) for name in folders + names)})
with open('/proc/self/mountinfo') as lines: mounts = [line.split() for line in lines]
kinds = {'ro', 'rw', 'nosuid', 'nodev', 'noexec'}
rights = {one[4]: sorted(kinds & {*one[5].split(',')}) for one in mounts if not one[4].startswith(('/tmp/', '/proc/'))}
print(json.dumps({'files': files, 'rights': rights}))
"""


async def test_a_forked_session_looks_like_one_that_was_started(cold: Kernel, forking_place: ForkingPlace) -> None:
    async with forking_place.open("ipython", "fresh") as fresh:
        forked, started = [json.loads(await tell(kernel, _FACTS)) for kernel in (fresh, cold)]
    differences = {name: (forked[name], started[name]) for name in started if forked[name] != started[name]}
    assert differences == {}


async def test_a_forked_session_sees_the_files_that_one_sees_that_was_started(cold: Kernel, kernel: Kernel) -> None:
    forked, started = [json.loads(await tell(each, _FILES)) for each in (kernel, cold)]
    files = {
        path: (forked["files"].get(path), started["files"].get(path))
        for path in {**forked["files"], **started["files"]}
    }
    assert {path: both for path, both in files.items() if both[0] != both[1]} == {}
    assert forked["rights"] == started["rights"]


# What cells do

_THREADS = "import threading; said = []; t = threading.Thread(target=said.append, args=(1,)); t.start(); t.join(); "
_POOL = (
    "from multiprocessing import get_context\nwith get_context('{0}').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
)
_MODULE = "open('own.py', 'w').write('class Own:\\n    def __call__(self, n): return n + 1\\n')\nfrom own import Own\n"
_WORKS = {
    "a pool of forked processes": (_POOL.format("fork"), "[1, 2]"),
    "a pool of spawned processes": (_POOL.format("spawn"), "[1, 2]"),
    "a pool behind a fork server": (_POOL.format("forkserver"), "[1, 2]"),
    "a function of the cell's in a forked process": (
        "from multiprocessing import get_context\ndef double(n): return 2 * n\n"
        "with get_context('fork').Pool(2) as pool: print(pool.map(double, [1, 2]))",
        "[2, 4]",
    ),
    "an executor of processes": (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(2) as pool: print([*pool.map(abs, [-1, -2])])",
        "[1, 2]",
    ),
    "an executor of threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool: print([*pool.map(abs, [-1, -2])])",
        "[1, 2]",
    ),
    "a shared value": (
        "from multiprocessing import get_context\ncontext = get_context('fork'); box = context.Value('i', 0)\n"
        "def put(): box.value = 7\n"
        "child = context.Process(target=put); child.start(); child.join(); print(box.value, child.exitcode)",
        "7 0",
    ),
    "a manager": (
        "import multiprocessing\nwith multiprocessing.Manager() as manager:\n    d = manager.dict(a=1); print(d['a'])",
        "1",
    ),
    "shared memory": (
        "from multiprocessing.shared_memory import SharedMemory\nm = SharedMemory(create=True, size=8); m.buf[0] = 9\n"
        "n = SharedMemory(m.name); print(n.buf[0]); n.close(); m.close(); m.unlink()",
        "9",
    ),
    "a thread": (_THREADS + "print(said)", "[1]"),
    "a thread that inherits nothing": (_THREADS + "print(threading.active_count())", "1"),
    "a program": ("import subprocess; print(subprocess.run(['echo', 'a'], capture_output=True).stdout)", "b'a\\n'"),
    "a shell command": ("!echo $((1 + 1))", "2"),
    "a Python program": (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'import numpy; print(1)'], "
        "capture_output=True, text=True))",
        "CompletedProcess(args=[PYTHON, '-c', 'import numpy; print(1)'], returncode=0, stdout='1\\n', stderr='')",
    ),
    "a task that goes on": (
        "import asyncio\nticks = []\nasync def tick():\n    while True: ticks.append(1); await asyncio.sleep(0)\n"
        "task = asyncio.create_task(tick())\nawait asyncio.sleep(0.01)\ntask.cancel(); print(len(ticks) > 2)",
        "True",
    ),
    "asyncio.run": ("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'ran')))", "ran"),
    "a program of asyncio's": (
        "import asyncio\np = await asyncio.create_subprocess_exec('echo', 'a', stdout=-1)\n"
        "print((await p.communicate())[0])",
        "b'a\\n'",
    ),
    "a thread of asyncio's": ("import asyncio\nprint(await asyncio.to_thread(abs, -3))", "3"),
    "a product of matrices": (
        "import numpy as np\na = np.arange(1e6).reshape(1000, 1000) % 7; b = a @ a\n"
        "print(all(b[i, j] == (a[i] * a[:, j]).sum() for i in range(0, 1000, 99) for j in range(0, 1000, 99)))",
        "True",
    ),
    "linear algebra in a forked process": (
        "import numpy as np\nfrom multiprocessing import get_context\n"
        "def norm(n): return (np.eye(n) @ np.eye(n)).sum()\n"
        "with get_context('fork').Pool(2) as pool: print(pool.map(norm, [300, 300]))",
        "[np.float64(300.0), np.float64(300.0)]",
    ),
    "scipy and scikit-learn": (
        "import numpy as np\nfrom sklearn.linear_model import LinearRegression\nfrom scipy.linalg import inv\n"
        "x = np.arange(8.).reshape(-1, 1)\nprint(LinearRegression().fit(x, 2 * x).coef_.round(6), inv([[2.]]))",
        "[[2.]] [[0.5]]",
    ),
    "a data frame": (
        "import pandas as pd\nd = pd.DataFrame({'k': list('abab'), 'v': range(4)})\n"
        "print(d.groupby('k').v.sum().to_dict(), pd.Timestamp('2024-01-01').day_name())",
        "{'a': 2, 'b': 4} Monday",
    ),
    "a pickle of a class of the cell's": (
        "import pickle\nclass Point:\n    def __init__(self, x): self.x = x\n"
        "print(pickle.loads(pickle.dumps(Point(3))).x, Point.__module__)",
        "3 __main__",
    ),
    "a class of a module of its own, in another process": (
        _MODULE + "from multiprocessing import get_context\n"
        "with get_context('spawn').Pool(1) as pool: print(pool.map(Own(), [1]))",
        "[2]",
    ),
    "a database": ("import sqlite3; print(sqlite3.connect(':memory:').execute('select 1').fetchone())", "(1,)"),
    "a secure connection's context": (
        "import ssl; print(type(ssl.create_default_context()).__name__)",
        "SSLContext",
    ),
    "a clock": ("import time; before = time.time(); print(0 <= time.time() - before < 5)", "True"),
    "an alarm": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)",
        "rang",
    ),
    "faulthandler": (
        "import faulthandler, tempfile\nwith tempfile.TemporaryFile() as f:\n"
        "    faulthandler.dump_traceback(f); f.seek(0); print(b'most recent call first' in f.read())",
        "True",
    ),
    "code under a profiler": ("import cProfile\np = cProfile.Profile(); print(p.runcall(abs, -4))", "4"),
    "a recursion that ends": (
        "def f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError as error: print(type(error).__name__)",
        "RecursionError",
    ),
    "the end of a process of its own": (
        "import os\nchild = os.fork() or os._exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        "5",
    ),
}


@pytest.mark.parametrize(("code", "said"), _WORKS.values(), ids=_WORKS)
async def test_it_works_in_a_forked_session(siblings: list[Kernel], code: str, said: str) -> None:
    told = await tell(siblings[2], code)
    python = await tell(siblings[2], "import sys; print(repr(sys.executable), end='')")
    assert told.replace(python, "PYTHON") == said + "\n"


async def test_there_are_no_processes_in_it_but_its_own(forking_place: ForkingPlace) -> None:
    async with forking_place.open("ipython", "alone") as kernel:
        listing = "sorted(open(f'/proc/{n}/comm').read().strip() for n in os.listdir('/proc') if n.isdigit())"
        assert await tell(kernel, f"import os\nprint({listing})") == "['bwrap', 'python', 'sleep']\n"
        assert (await run(kernel, "os.wait()")).error.name == "ChildProcessError"
        code = "import subprocess\nchild = subprocess.Popen(['true'])\nprint(os.wait()[0] == child.pid)"
        assert await tell(kernel, code) == "True\n"


async def test_a_figure_is_displayed_and_closed_in_each_sibling(siblings: list[Kernel]) -> None:
    for number, kernel in enumerate(siblings):
        outcome = await run(kernel, f"import matplotlib.pyplot as plt\nplt.plot([1, {number}]); plt.title('t')")
        assert [str(shown.data["image/png"]).startswith(PNG) for shown in outcome.displays] == [True]
        assert await tell(kernel, "print(plt.get_fignums())") == "[]\n"


async def test_the_debugger_asks_and_is_answered(kernel: Kernel) -> None:
    answers = iter(["p secret_number", "c"])

    async def on_event(event: Event) -> None:
        if isinstance(event, InputRequest):
            await kernel.reply_input(next(answers))

    code = "def look():\n    secret_number = 4 + 38\n    breakpoint()\n    return secret_number\nlook()"
    outcome = await run(kernel, code, allow_input=True, on_event=on_event)
    assert outcome.is_ok
    assert "42" in outcome.stdout
    assert outcome.result == {"text/plain": "42"}


@pytest.mark.parametrize(
    "endless",
    [
        "import subprocess; subprocess.run(['sleep', '600'])",
        "!sleep 600",
        "import threading; threading.Lock().acquire() and threading.Event().wait()",
        "import select; select.select([], [], [])",
        "for _ in iter(int, 1): sum(range(1000))",
        "import numpy as np\nwhile True: np.ones((300, 300)) @ np.ones((300, 300))",
        "import pandas as pd\nwhile True: pd.DataFrame({'a': range(9)}).describe()",
    ],
)
async def test_an_interrupt_reaches_a_forked_session_wherever_it_is(siblings: list[Kernel], endless: str) -> None:
    outcome = await interrupt_when_started(siblings[2], f"print('started', flush=True)\n{endless}")
    assert not outcome.is_ok
    assert await tell(siblings[2], "print('alive')") == "alive\n"


async def test_collecting_garbage_shares_memory_on(forking_place: ForkingPlace) -> None:
    code = """
import gc
def private_mb():
    lines = [line.split() for line in open('/proc/self/smaps_rollup')]
    return sum(int(line[1]) for line in lines if line[0] in ('Private_Dirty:', 'Private_Clean:')) / 1024
for _ in range(3): gc.collect()
print(private_mb())
"""
    async with forking_place.open("ipython", "collected") as kernel:
        assert float(await tell(kernel, code)) < 20


_ENDLESS = "class A:\n    def __repr__(self): return repr(self)\nstr(A())"


@pytest.mark.parametrize(
    "change",
    [
        "html.for_type(int, bold)",
        "html.for_type_by_name('builtins', 'int', bold)",
        "html.type_printers[int] = bold",
        "html.type_printers = {int: bold}",
        "html.singleton_printers[id(7)] = bold",
        "formatters['text/html'] = type(html)(); formatters['text/html'].for_type(int, bold)",
    ],
)
async def test_a_form_that_was_given_to_a_plain_type_is_shown_in_a_fork_too(
    forking_place: ForkingPlace, change: str
) -> None:
    async with forking_place.open("ipython", "formatted") as kernel:
        assert (await run(kernel, "7")).result == {"text/plain": "7"}
        formatters = "formatters = get_ipython().display_formatter.formatters; html = formatters['text/html']\n"
        await run(kernel, f"{formatters}bold = lambda number: f'<b>{{number}}</b>'\n{change};")
        assert (await run(kernel, "7")).result == {"text/plain": "7", "text/html": "<b>7</b>"}


async def test_a_recursion_without_end_is_told_as_a_crash(forking_place: ForkingPlace) -> None:
    code = f"import sys; sys.setrecursionlimit(10**9)\n{_ENDLESS}"
    async with forking_place.open("ipython", "deep") as kernel:
        if sys.version_info >= (3, 12):
            # Since then Python counts calls of C functions apart, and that limit cannot be set.
            outcome = await run(kernel, code)
            assert [event.name for event in outcome.events if isinstance(event, Raised)] == ["RecursionError"]
        else:
            with pytest.raises(KernelDied, match="SIGSEGV"):
                await run(kernel, code)


async def test_a_flood_of_output_arrives_and_the_session_goes_on(kernel: Kernel) -> None:
    outcome = await run(kernel, "for _ in range(20): print('x' * 1_000_000)")
    assert len(outcome.stdout) == 20_000_020
    assert await tell(kernel, "print('alive')") == "alive\n"


# Limits


@pytest.fixture(scope="module")
async def limited(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    """With little memory and one processor."""
    folder = tmp_path_factory.mktemp("limited")
    async with open_forking_place(default_environment, folder, memory_mb=400, cpus=1.0, preload=["numpy"]) as place:
        yield place


_BLAS_THREADS = """
import ctypes, re
(path,) = {line.split()[-1] for line in open('/proc/self/maps') if re.search('numpy.libs/.*openblas', line)}
print(ctypes.CDLL(path).scipy_openblas_get_num_threads64_())
"""


async def test_linear_algebra_uses_the_processors_there_are(kernel: Kernel) -> None:
    assert await tell(kernel, _BLAS_THREADS) == f"{len(os.sched_getaffinity(0))}\n"


async def test_linear_algebra_keeps_to_the_limit(limited: ForkingPlace) -> None:
    async with limited.open("ipython", "algebra") as kernel:
        assert await tell(kernel, _BLAS_THREADS) == "1\n"


async def test_memory_that_runs_out_is_told_and_siblings_go_on(limited: ForkingPlace) -> None:
    greed = "held = []\nwhile True: held.append(b'x' * 10_000_000)"
    async with limited.open("ipython", "greedy") as greedy, limited.open("ipython", "modest") as modest:
        try:
            outcome = await run(greedy, greed)
        except KernelDied as error:
            told = [error.message.split()[-1], *(incident.kind for incident in greedy.incidents())]
        else:
            # Without control groups it is the process itself that gets no more.
            told = [outcome.error.name]
        assert told in (["SIGKILL", "out_of_memory"], ["MemoryError"])
        assert await tell(modest, "print('alive')") == "alive\n"
        assert modest.incidents() == []
