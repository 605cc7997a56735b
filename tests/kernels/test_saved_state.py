"""Variables saved in one kernel and loaded in another."""

import asyncio
import json
import os
import shutil
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import pytest

from belljar.environments import Environment
from belljar.errors import KernelDied
from belljar.kernels.base import Kernel, StatefulKernel, StateReport
from cells import DEADLINE_S, ForkingPlace, Place, open_forking_place, run, usable
from waiting import until

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Woken:
    """A kernel that loaded what another one saved, and what both said."""

    kernel: Kernel
    saved: StateReport
    loaded: StateReport
    file: Path

    async def value(self, code: str) -> str:
        return await value(self.kernel, code)


async def value(kernel: Kernel, code: str) -> str:
    """What the last expression of a cell shows."""
    outcome = await run(kernel, dedent(code))
    assert outcome.is_ok, outcome.error
    return "" if outcome.result is None else str(outcome.result["text/plain"])


async def done(kernel: Kernel, code: str) -> None:
    outcome = await run(kernel, dedent(code))
    assert outcome.is_ok, outcome.error


async def save(
    kernel: Kernel, file: Path | str, *, limit_bytes: int | None = None, limit_s: float | None = None
) -> StateReport:
    assert isinstance(kernel, StatefulKernel)
    async with asyncio.timeout(DEADLINE_S):
        return await kernel.save_state(str(file), limit_bytes=limit_bytes, limit_s=limit_s)


async def load(kernel: Kernel, file: Path | str) -> StateReport:
    assert isinstance(kernel, StatefulKernel)
    async with asyncio.timeout(DEADLINE_S):
        return await kernel.load_state(str(file))


def losses(report: StateReport) -> dict[str, tuple[str, str]]:
    return {one.name: (one.type, one.reason) for one in report.lost}


@asynccontextmanager
async def carried(place: Place, *cells: str) -> AsyncIterator[Woken]:
    file = place.folder / "state"
    async with place.open("ipython", "before") as kernel:
        for cell in cells:
            await done(kernel, cell)
        saved = await save(kernel, file)
    async with place.open("ipython", "after") as kernel:
        yield Woken(kernel, saved, await load(kernel, file), file)


@pytest.fixture
async def kernel(process_place: Place) -> AsyncIterator[Kernel]:
    async with process_place.open("ipython", "own") as kernel:
        yield kernel


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state"


# One session with a bit of everything, woken once for all the tests that only look at it

EVERYTHING = [
    """
    import collections, dataclasses, enum, functools, abc, typing
    import xml.etree.ElementTree
    import numpy as np, pandas as pd
    import matplotlib.pyplot as plt
    number, text, nothing = 12, "twelve", None
    a = b = [1, 2]
    holder = {"a": a}
    inner = {"deep": [1]}
    left, right = [inner], [inner]
    del inner
    cycle = []; cycle.append(cycle)
    """,
    """
    x = 1
    def reads_x(): return x
    def sets_x(value):
        global x
        x = value
    def _hidden(n): return n * 2
    def uses_hidden(n): return _hidden(n)
    def with_defaults(p, q=[1], *, r="r") -> int:
        "Says so."
        return (p, q, r)
    with_defaults.mark = "marked"
    def recursive(n): return 1 if n < 2 else n * recursive(n - 1)
    square = lambda n: n * n
    """,
    """
    def make_counter():
        count = 0
        def bump():
            nonlocal count
            count += 1
            return count
        def look(): return count
        return bump, look
    bump, look = make_counter()
    bump()
    def make_factorial():
        def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
        return factorial
    factorial = make_factorial()
    def traced(function):
        @functools.wraps(function)
        def wrapper(*args):
            wrapper.calls += 1
            return function(*args)
        wrapper.calls = 0
        return wrapper
    @traced
    def add(p, q): return p + q
    add(1, 2)
    @functools.lru_cache(maxsize=7)
    def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
    fib(10)
    power = functools.partial(pow, 2)
    """,
    """
    class Animal(abc.ABC):
        count = 0
        def __init__(self, name): self.name = name; type(self).count += 1
        @abc.abstractmethod
        def sound(self): ...
        @property
        def loud(self): return self.sound().upper()
        @functools.cached_property
        def slow(self): return len(self.name)
        @classmethod
        def make(cls, name): return cls(name)
        @staticmethod
        def kind(): return "animal"
    class Dog(Animal):
        def __init__(self, name): super().__init__(name)
        def sound(self): return "woof"
    class Slotted:
        __slots__ = ("p",)
        def __init__(self, p): self.p = p
    rex = Dog("rex")
    slotted = Slotted(5)
    method = rex.sound
    @dataclasses.dataclass(frozen=True, order=True)
    class Point:
        p: int
        q: "list[int]" = dataclasses.field(default_factory=list)
    point = Point(1, [2])
    class Colour(enum.Enum):
        RED = 1
        BLUE = 2
    favourite = Colour.BLUE
    Pair = collections.namedtuple("Pair", "one two")
    pair = Pair(1, 2)
    class Oops(Exception): pass
    oops = Oops("no")
    class Box(typing.Generic[typing.TypeVar("T")]): pass
    """,
    """
    array = np.arange(300_000.0)
    reader = np.frombuffer(b"12345678" * 20_000, dtype=np.uint8)
    strided = np.arange(100_000)[::2]
    objects = np.array([{"k": 1}, None], dtype=object)
    frame = pd.DataFrame({"n": range(1_000_000), "f": np.linspace(0, 1, 1_000_000), "s": ["x", "y"] * 500_000})
    indexed = frame.head(100).set_index(pd.date_range("2024-01-01", periods=100))
    category = pd.Series(["u", "v", "u"], dtype="category")
    figure, axes = plt.subplots(); axes.plot([1, 2, 3]); axes.set_title("kept")
    plt.close(figure)
    generator = np.random.default_rng(1)
    """,
    """
    import os, random, sys, warnings
    ip = get_ipython()
    out = sys.stdout
    os.makedirs("deeper", exist_ok=True); os.chdir("deeper")
    os.environ["MINE"] = "yes"; del os.environ["PLOTLY_RENDERER"]
    import time; os.environ["TZ"] = "MYT-3:30"; time.tzset()
    sys.path.insert(0, "/first-of-mine"); sys.path.append("/last-of-mine")
    warnings.filterwarnings("error", message="mine", category=UserWarning)
    pd.options.display.max_rows = 7
    np.set_printoptions(precision=3); np.seterr(divide="ignore")
    plt.rcParams["figure.dpi"] = 55
    random.seed(5); np.random.seed(5)
    _ = [random.random(), np.random.random()]
    r_state, n_state = random.getstate(), np.random.get_state()[1].tolist()
    """,
]


@pytest.fixture(scope="module")
async def woken(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Woken]:
    """Shared: a test must not change what another one looks at."""
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("woken"))
    async with carried(place, *EVERYTHING) as woken:
        yield woken


async def test_all_of_it_is_kept_in_its_order(woken: Woken) -> None:
    assert woken.saved.lost == ()
    assert woken.loaded.lost == ()
    assert woken.loaded.kept == woken.saved.kept
    assert woken.loaded.kept[:3] == ("collections", "dataclasses", "enum")
    assert "_hidden" in woken.loaded.kept
    assert woken.saved.size_bytes == woken.loaded.size_bytes == woken.file.stat().st_size


async def test_the_file_is_for_its_owner_only_and_leaves_nothing_beside_it(woken: Woken) -> None:
    assert woken.file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in woken.file.parent.iterdir() if one.is_file()] == ["state"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("number, text, nothing", "(12, 'twelve', None)"),
        ("a is b, holder['a'] is a, left[0] is right[0], cycle[0] is cycle", "(True, True, True, True)"),
        ("xml.etree.ElementTree.fromstring('<p/>').tag", "'p'"),
        ("collections.Counter('aa')['a'], np.pi > 3, pd.__name__", "(2, True, 'pandas')"),
        ("uses_hidden(4), recursive(5), square(3)", "(8, 120, 9)"),
        ("with_defaults(0), with_defaults.mark, with_defaults.__doc__", "((0, [1], 'r'), 'marked', 'Says so.')"),
        ("with_defaults.__annotations__, with_defaults.__module__", "({'return': int}, '__main__')"),
        ("bump(), look(), bump(), look()", "(2, 2, 3, 3)"),
        ("factorial(5), add(3, 4), add.calls, add.__name__, power(3)", "(120, 7, 2, 'add', 8)"),
        ("fib(20), fib.cache_parameters()['maxsize'], fib.cache_info().misses > 0", "(6765, 7, True)"),
        ("type(rex) is Dog, isinstance(rex, Animal), Dog.__mro__[1] is Animal", "(True, True, True)"),
        ("rex.name, rex.loud, rex.slow, Dog.kind(), Dog.make('p').name", "('rex', 'WOOF', 3, 'animal', 'p')"),
        ("slotted.p, method(), method.__self__ is rex", "(5, 'woof', True)"),
        ("point == Point(1, [2]), Point(1) < Point(2), hash(Point(1, ())) != 0, point", None),
        ("favourite is Colour.BLUE, Colour(1) is Colour.RED, [c.name for c in Colour]", None),
        ("pair.two, type(pair) is Pair, oops.args, type(oops) is Oops, Box[int] is not None", None),
        ("array.sum(), array.flags.writeable, reader.flags.writeable", "(np.float64(44999850000.0), True, False)"),
        ("strided.sum(), objects[0]['k']", "(np.int64(2499950000), 1)"),
        ("frame.shape, int(frame.n.sum()), frame.s.iloc[1], str(frame.dtypes['f'])", None),
        ("indexed.index[99].day, category.cat.categories.tolist()", "(9, ['u', 'v'])"),
        ("figure.axes[0].get_title(), figure.axes[0] is axes, len(axes.lines)", "('kept', True, 1)"),
        ("ip is get_ipython(), out is sys.stdout", "(True, True)"),
        (
            "os.path.basename(os.getcwd()), os.environ['MINE'], 'PLOTLY_RENDERER' in os.environ",
            "('deeper', 'yes', False)",
        ),
        ("time.tzname, time.localtime(0).tm_hour", "(('MYT', 'MYT'), 3)"),
        ("sys.path[0], sys.path[-1]", "('/first-of-mine', '/last-of-mine')"),
        ("pd.options.display.max_rows, np.get_printoptions()['precision']", "(7, 3)"),
        ("np.geterr()['divide'], plt.rcParams['figure.dpi']", "('ignore', 55.0)"),
    ],
)
async def test_what_was_there_is_there_again(woken: Woken, code: str, expected: str | None) -> None:
    shown = await woken.value(code)
    if expected is not None:
        assert shown == expected
    else:
        assert "False" not in shown


async def test_random_states_go_on_where_they_were(woken: Woken) -> None:
    code = "random.getstate() == r_state, np.random.get_state()[1].tolist() == n_state, generator.integers(100)"
    assert (await woken.value(code)).startswith("(True, True, ")


async def test_warning_filters_are_back(woken: Woken) -> None:
    outcome = await run(woken.kernel, "warnings.warn('mine')")
    assert outcome.error.name == "UserWarning"


async def test_functions_share_the_live_namespace(woken: Woken) -> None:
    assert await woken.value("reads_x(), reads_x.__globals__ is globals()") == "(1, True)"
    assert await woken.value("x = 2\nreads_x()") == "2"
    assert await woken.value("sets_x(3)\nx, reads_x()") == "(3, 3)"


async def test_reloaded_classes_pickle_again(woken: Woken) -> None:
    code = "import pickle\nagain = pickle.loads(pickle.dumps([rex, point, favourite, pair]))\n"
    code += "type(again[0]) is Dog, again[1] == point, again[2] is favourite, again[3] == pair"
    assert await woken.value(code) == "(True, True, True, True)"


async def test_the_count_and_the_sources_of_earlier_cells_are_kept(woken: Woken) -> None:
    outcome = await run(woken.kernel, "import inspect\ninspect.getsource(recursive)")
    assert outcome.result is not None
    assert "def recursive(n)" in str(outcome.result["text/plain"])
    assert outcome.finished.execution_count > len(EVERYTHING)
    assert "import collections" in await woken.value("In[1]")
    failed = await run(woken.kernel, "recursive('no')")
    assert any("return 1 if n < 2" in line for line in failed.error.traceback)


async def test_a_woken_session_can_be_saved_again(woken: Woken, tmp_path: Path) -> None:
    again = await save(woken.kernel, tmp_path / "again")
    assert again.lost == ()
    assert set(woken.saved.kept) <= set(again.kept)


async def test_ipython_kernels_keep_state_behind_every_provider(own_place: Place) -> None:
    async with own_place.open("ipython", "before") as kernel:
        inside = (await run(kernel, "import os\nkept = [1]\nprint(os.getcwd(), end='')")).stdout
        assert (await save(kernel, f"{inside}/state")).kept == ("os", "kept")
    async with own_place.open("ipython", "after") as kernel:
        inside = (await run(kernel, "import os; print(os.getcwd(), end='')")).stdout
        hand_over(own_place.workspace("before") / "state", own_place.workspace("after"))
        assert (await load(kernel, f"{inside}/state")).kept == ("os", "kept")
        assert await value(kernel, "kept") == "[1]"


@pytest.fixture(scope="module")
async def forking_place(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    """With the usual modules, which the cells import."""
    async with open_forking_place(default_environment, tmp_path_factory.mktemp("forks")) as place:
        yield place


async def test_forked_kernels_keep_state_like_others(forking_place: ForkingPlace) -> None:
    async with forking_place.open(session_id="before") as kernel:
        inside = (await run(kernel, "import os; print(os.getcwd(), end='')")).stdout
        for cell in EVERYTHING:
            await done(kernel, cell)
        saved = await save(kernel, f"{inside}/state")
        assert saved.lost == ()
    async with forking_place.open(session_id="after") as kernel:
        workspace = forking_place.folders("after").workspace
        (workspace / "deeper").mkdir()
        hand_over(forking_place.folders("before").workspace / "state", workspace)
        loaded = await load(kernel, f"{inside}/state")
        assert loaded == replace(saved, lost=())
        assert (
            await value(kernel, "x = 2\nreads_x(), bump(), look(), rex.slow, type(rex) is Dog") == "(2, 2, 2, 3, True)"
        )
        assert await value(kernel, "random.getstate() == r_state, os.environ['MINE'], sys.path[0]") == (
            "(True, 'yes', '/first-of-mine')"
        )


def hand_over(file: Path, folder: Path) -> None:
    """Each session may have a user of its own, and the file is for its owner only."""
    moved = file.replace(folder / file.name)
    owner = folder.stat()
    os.chown(moved, owner.st_uid, owner.st_gid)


# What cannot be kept

UNKEEPABLE = """
    import asyncio, io, os, socket, sqlite3, subprocess, sys, threading
    def count(): yield 1
    counting = count()
    written = open("a-file", "w+")
    opened = open("a-file")
    binary = open("a-file", "rb")
    plug, _peer = socket.socketpair()
    lock = threading.Lock()
    thread = threading.Thread(target=print)
    database = sqlite3.connect(":memory:")
    process = subprocess.Popen(["true"]); process.wait()
    async def wait(): await asyncio.sleep(1000)
    task = asyncio.create_task(wait()); await asyncio.sleep(0)
    pending = wait()
    try: 1 / 0
    except ZeroDivisionError as error: trace = error.__traceback__
    class Service:
        def __init__(self): self.parts = [1, {"lock": threading.RLock()}]
    service = Service()
    config = {"name": "n", "lock": lock, 3: [0, lock]}
    def make():
        held = socket.socket()
        return lambda: held
    holding = make()
    class Broken:
        def __reduce__(self): raise ValueError("not me")
    class Silent:
        def __reduce__(self): raise Nameless
    class Nameless(Exception):
        def __str__(self): raise RuntimeError
    broken, silent = Broken(), Silent()
    everything = globals()
    deep = []
    for _ in range(100_000): deep = [deep]
    good, also = [1], {"text": io.StringIO("kept")}
"""


async def test_what_cannot_be_kept_is_named_with_its_type_and_the_reason(process_place: Place) -> None:
    async with carried(process_place, UNKEEPABLE) as woken:
        lost = losses(woken.saved)
        said = {name: reason for name, (_, reason) in lost.items()}
        assert lost["counting"] == ("generator", "a generator is in the middle of its work")
        assert lost["opened"] == ("_io.TextIOWrapper", "an open file cannot be kept")
        assert said["written"] == said["binary"] == said["opened"]
        assert lost["plug"] == ("socket.socket", "a connection cannot be kept")
        assert lost["lock"] == ("_thread.lock", "a lock belongs to the process")
        assert lost["thread"] == ("threading.Thread", "a thread cannot be kept")
        assert lost["database"] == ("sqlite3.Connection", "a connection cannot be kept")
        assert lost["process"] == ("subprocess.Popen", "a sub-process cannot be kept")
        assert lost["task"] == ("_asyncio.Task", "a task is in the middle of its work")
        assert lost["pending"] == ("coroutine", "a coroutine is in the middle of its work")
        assert lost["trace"] == ("traceback", "a traceback holds running frames")
        lock = "a lock belongs to the process"
        assert lost["service"] == ("__main__.Service", f"service.parts[1]['lock'] is a _thread.RLock: {lock}")
        assert lost["config"] == ("dict", f"config['lock'] is a _thread.lock: {lock}")
        assert said["holding"] == "holding's held is a socket.socket: a connection cannot be kept"
        assert lost["broken"] == ("__main__.Broken", "ValueError: not me")
        assert said["silent"] == "Nameless"
        assert "recursion" in said["deep"]
        assert "everything" in said
        assert woken.loaded.lost == ()
        assert {"good", "also", "Service", "count", "make", "Broken"} <= set(woken.loaded.kept)
        assert not set(woken.loaded.kept) & set(lost)
        assert await woken.value("good, also['text'].read(), type(Service) is type, list(count())") == (
            "([1], 'kept', True, [1])"
        )


HOSTILE = """
    import os, sys, time
    class Leaver:
        def __reduce__(self): sys.exit(3)
    class Talker:
        def __reduce__(self):
            print("hear me"); print("and me", file=sys.stderr); display("and see me")
            return str, ("said",)
    class Asker:
        def __reduce__(self): return str, (input("who?"),)
    class Returner:
        def __reduce__(self): return 5
    class Liar:
        __class__ = property(lambda self: 1 / 0)
        def __getattribute__(self, name): raise SystemExit(name)
    leaver, talker, asker, returner, liar = Leaver(), Talker(), Asker(), Returner(), Liar()
    good = 1
"""


async def test_hostile_variables_cost_themselves_only(kernel: Kernel, file: Path) -> None:
    await done(kernel, HOSTILE)
    report = await save(kernel, file)
    assert {"leaver", "asker", "returner", "liar"} <= set(losses(report))
    assert losses(report)["leaver"] == ("__main__.Leaver", "SystemExit: 3")
    assert {"good", "talker", "Leaver"} <= set(report.kept)
    outcome = await run(kernel, "good")
    assert (outcome.stdout, outcome.stderr, outcome.displays) == ("", "", [])
    assert outcome.result == {"text/plain": "1"}


async def test_a_variable_that_ends_the_process_is_a_death_and_not_a_report(kernel: Kernel, file: Path) -> None:
    await done(kernel, "import os\nclass Killer:\n    def __reduce__(self): os._exit(7)\nkiller = Killer()")
    with pytest.raises(KernelDied, match="exit status 7"):
        await save(kernel, file)
    assert not file.exists()


HANGING = """
    import time
    class Hanging:
        def __reduce__(self):
            open("started", "w").close()
            while True: pass
    class Sleeping:
        def __reduce__(self): time.sleep(1000)
    first = [1]
    hanging = {"hanging": Hanging()}
    last = [2]
"""


async def test_a_save_is_interrupted_like_a_cell_and_keeps_what_is_done(
    process_place: Place, kernel: Kernel, file: Path
) -> None:
    await done(kernel, HANGING + "    hanging.update({number: 0 for number in range(1000)})\n")
    started = process_place.workspace("own") / "started"
    saving = asyncio.create_task(save(kernel, file))
    await until(started.exists)
    await kernel.interrupt()
    report = await saving
    assert losses(report) == {"hanging": ("dict", "it was interrupted before this was done")}
    assert {"first", "last", "Hanging"} <= set(report.kept)
    assert await value(kernel, "first") == "[1]"


async def test_an_interrupt_that_comes_before_the_save_does_not_hang_it(kernel: Kernel, file: Path) -> None:
    await done(kernel, HANGING)
    saving = asyncio.create_task(save(kernel, file))
    await asyncio.sleep(0)
    await kernel.interrupt()
    report = await saving
    assert set(losses(report)) & {"hanging", "*"}
    assert "hanging" not in report.kept
    assert (await run(kernel, "1")).is_ok


async def test_variables_that_hang_are_left_out_when_time_is_limited(kernel: Kernel, file: Path) -> None:
    await done(kernel, HANGING + "    sleeping, last = Sleeping(), [2] * 1000\n")
    await done(kernel, "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(0, 1000)")
    report = await save(kernel, file, limit_s=2)
    assert file.stat().st_size == report.size_bytes
    slow = "it took too long, and all together may take 2 s"
    assert losses(report) == {"hanging": ("dict", slow), "sleeping": ("__main__.Sleeping", slow)}
    assert {"first", "last", "Hanging", "signal"} <= set(report.kept)
    assert await value(kernel, "signal.getitimer(0)[0] > 900, signal.getsignal(signal.SIGALRM).__name__") == (
        "(True, '<lambda>')"
    )


# Limits and files


async def test_over_the_size_limit_the_largest_are_left_out(process_place: Place, file: Path) -> None:
    cell = """
        import numpy as np
        huge = np.zeros(400_000); large = np.ones(200_000); middle = list(range(1, 200_000)); small = np.ones(20_000)
        big_text, tiny = "x" * 1_500_000, "kept"
    """
    async with process_place.open("ipython", "before") as kernel:
        await done(kernel, cell)
        report = await save(kernel, file, limit_bytes=2_000_000)
        lost = losses(report)
        assert lost["huge"] == ("numpy.ndarray", "over the limit of 2,000,000 bytes on its own")
        assert lost["large"][1].endswith("and all together may take 2,000,000")
        assert set(lost) == {"huge", "large", "big_text"}
        assert report.kept == ("np", "middle", "small", "tiny")
        assert report.size_bytes == file.stat().st_size <= 2_000_000
    async with process_place.open("ipython", "after") as kernel:
        assert await load(kernel, file) == replace(report, lost=())


async def test_a_limit_under_everything_still_gives_a_file(kernel: Kernel, file: Path) -> None:
    await done(kernel, "a, b = 'x' * 100_000, 'y' * 100_000")
    report = await save(kernel, file, limit_bytes=10)
    assert report.kept == ()
    assert {"a", "b"} <= set(losses(report))


async def test_a_save_replaces_the_file_at_once_or_leaves_it(kernel: Kernel, file: Path) -> None:
    await done(kernel, "kept = 1")
    file.write_text("old")
    (file.parent / "state.part").write_text("left behind")
    assert (await save(kernel, file)).lost == ()
    assert file.read_bytes().startswith(b"belljar state\n")
    assert not (file.parent / "state.part").exists()


async def test_a_file_that_cannot_be_written_loses_all_by_name(kernel: Kernel, tmp_path: Path) -> None:
    await done(kernel, "kept = 1")
    report = await save(kernel, tmp_path / "nowhere" / "state")
    assert report.kept == ()
    assert report.size_bytes == 0
    assert "No such file or directory" in losses(report)["kept"][1]


async def test_a_full_disk_keeps_what_fits(kernel: Kernel, file: Path) -> None:
    await done(kernel, "import numpy as np, resource\nsmall = [1]\nlarge = np.ones(1_000_000)")
    await done(kernel, "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))")
    report = await save(kernel, file)
    assert {"small", "np"} <= set(report.kept)
    assert losses(report) == {"large": ("numpy.ndarray", "the file could not be written: File too large")}


SIMPLE = (
    "import numpy as np\nfirst = [1]\ndef function(): return first\nlarge = np.arange(100_000)\ntext = 'x' * 1_000_000"
)


@pytest.fixture(scope="module")
async def simple_file(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Place(usable("process"), default_environment, tmp_path_factory.mktemp("simple"))
    async with place.open("ipython") as kernel:
        await done(kernel, SIMPLE)
        assert (await save(kernel, place.folder / "state")).lost == ()
    return place.folder / "state"


@pytest.fixture
async def simple(process_place: Place, simple_file: Path) -> AsyncIterator[tuple[Kernel, Path]]:
    """A kernel that has run nothing, and a file of another one."""
    file = process_place.folder / "state"
    shutil.copy(simple_file, file)
    async with process_place.open("ipython", "after") as kernel:
        yield kernel, file


async def test_a_truncated_file_gives_what_it_has(simple: tuple[Kernel, Path]) -> None:
    kernel, file = simple
    os.truncate(file, file.stat().st_size - 500_000)
    report = await load(kernel, file)
    assert losses(report) == {"*": ("", "the file ends early"), "text": ("str", "the file ends early")}
    assert report.kept == ("np", "first", "function", "large")
    assert await value(kernel, "function(), int(large.sum())") == "([1], 4999950000)"


async def test_a_file_cut_anywhere_gives_a_report(simple: tuple[Kernel, Path]) -> None:
    kernel, file = simple
    content = file.read_bytes()
    for size in [0, 5, 14, 20, 27, 100, 600, 3_000, 5_000, 10_000, 400_000, len(content) - 1]:
        file.write_bytes(content[:size])
        report = await load(kernel, file)
        assert report.lost, size
    assert (await run(kernel, "1")).is_ok


async def test_a_damaged_file_gives_what_is_whole(simple: tuple[Kernel, Path]) -> None:
    kernel, file = simple
    content = bytearray(file.read_bytes())
    middle_of_large = content.index((50_000).to_bytes(8, "little") + (50_001).to_bytes(8, "little"))
    content[middle_of_large] ^= 1
    file.write_bytes(content)
    report = await load(kernel, file)
    assert losses(report) == {"large": ("numpy.ndarray", "the file is damaged: a checksum differs")}
    assert report.kept == ("np", "first", "function", "text")


async def test_a_file_of_another_kind_is_refused(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a state")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "notes": "it is not a file of saved variables",
        "link": "the file cannot be opened: Too many levels of symbolic links",
        "pipe": "it is not a regular file",
        "nothing": "the file cannot be opened: No such file or directory",
    }.items():
        assert losses(await load(kernel, tmp_path / name)) == {"*": ("", reason)}


def rewrite_header(file: Path, **changes: object) -> None:
    part, magic = struct.Struct("!cQI"), b"belljar state\n"
    content = file.read_bytes()
    _, length, _ = part.unpack_from(content, len(magic))
    start = len(magic) + part.size
    header = json.dumps({**json.loads(content[start : start + length]), **changes}).encode()
    file.write_bytes(magic + part.pack(b"H", len(header), zlib.crc32(header)) + header + content[start + length :])


async def test_a_file_of_another_format_is_refused(simple: tuple[Kernel, Path]) -> None:
    kernel, file = simple
    rewrite_header(file, format=9)
    assert losses(await load(kernel, file)) == {"*": ("", "its format is 9; this version reads 1")}


async def test_a_file_of_another_python_gives_what_has_no_code_in_it(simple: tuple[Kernel, Path]) -> None:
    kernel, file = simple
    rewrite_header(file, python="3.4.1")
    report = await load(kernel, file)
    assert "saved by Python 3.4.1" in losses(report)["*"][1]
    assert losses(report)["function"] == ("function", "it has code of Python 3.4.1 in it")
    assert report.kept == ("np", "first", "large", "text")
    assert await value(kernel, "int(large.sum()), len(text)") == "(4999950000, 1000000)"


# Loading what is not the same any more


async def test_one_variable_that_cannot_be_made_again_does_not_cost_the_others(process_place: Place) -> None:
    cell = """
        import sys, pathlib
        pathlib.Path("gone.py").write_text("class Gone:\\n    def __init__(self): self.word = 'word'\\n")
        import gone
        class Once:
            def __setstate__(self, state): raise ValueError("only once")
            def __getstate__(self): return {"p": 1}
        class Leaver:
            def __reduce__(self): return sys.exit, (4,)
        before, once, leaver = [1], Once(), Leaver()
        item = gone.Gone()
        items = [before, item, {"n": 1}]
        inner = items[2]
        after = {"before": before, "word": "word"}
        pathlib.Path("gone.py").unlink()
    """
    async with carried(process_place, cell) as woken:
        assert woken.saved.lost == ()
        lost = losses(woken.loaded)
        assert lost["gone"] == ("module", "ModuleNotFoundError: No module named 'gone'")
        assert lost["item"] == ("gone.Gone", "ModuleNotFoundError: No module named 'gone'")
        assert lost["once"] == ("__main__.Once", "ValueError: only once")
        assert lost["leaver"] == ("__main__.Leaver", "SystemExit: 4")
        assert lost["items"] == ("list", "ModuleNotFoundError: No module named 'gone'")
        assert set(lost) == {"gone", "item", "once", "leaver", "items"}
        assert {"before", "inner", "after", "Once", "Leaver", "sys"} <= set(woken.loaded.kept)
        assert await woken.value("after['before'] is before, inner, type(Once) is type") == "(True, {'n': 1}, True)"


async def test_a_load_is_interrupted_like_a_cell(process_place: Place) -> None:
    cell = """
        def hang():
            open("started", "w").close()
            while True: pass
        class Hanging:
            def __reduce__(self): return hang, ()
        first, hanging = [1], [0] * 1000 + [Hanging()]
    """
    file = process_place.folder / "state"
    async with process_place.open("ipython", "before") as kernel:
        await done(kernel, cell)
        assert (await save(kernel, file)).lost == ()
    started = process_place.workspace("before") / "started"
    async with process_place.open("ipython", "after") as kernel:
        loading = asyncio.create_task(load(kernel, file))
        await until(started.exists)
        await kernel.interrupt()
        report = await loading
        assert losses(report) == {"hanging": ("list", "it was interrupted before this was done")}
        assert await value(kernel, "first") == "[1]"


async def test_without_cloudpickle_classes_are_lost_and_functions_are_kept(process_place: Place) -> None:
    hidden = "import sys\nsys.modules['cloudpickle'] = None"
    cell = "class C: pass\nc = C()\ndef f(n): return n + number\nnumber, words = 1, {'a': [1]}\nlater = lambda: f(2)"
    async with carried(process_place, hidden, cell) as woken:
        reason = "cloudpickle is not in this environment, and without it classes defined in cells cannot be kept"
        assert losses(woken.saved) == {
            "C": ("type", reason),
            "c": ("__main__.C", reason),
        }
        assert await woken.value("later(), words") == "(3, {'a': [1]})"


# Large things


PEAK = """
    def peak_mb():
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024
    def reset(): open("/proc/self/clear_refs", "w").write("5")
"""


async def test_a_large_array_is_saved_and_loaded_without_a_second_one_in_memory(process_place: Place) -> None:
    file = process_place.folder / "state"
    async with process_place.open("ipython", "before") as kernel:
        await done(kernel, PEAK + "    import numpy as np\n    array = np.full(150_000_000, 7, dtype=np.uint8)\n")
        before = int(await value(kernel, "reset(); peak_mb()"))
        report = await save(kernel, file)
        assert int(await value(kernel, "peak_mb()")) - before < 50
        assert report.size_bytes > 150_000_000
    async with process_place.open("ipython", "after") as kernel:
        await done(kernel, PEAK + "    import numpy as np\n")
        before = int(await value(kernel, "reset(); peak_mb()"))
        assert (await load(kernel, file)).lost == ()
        grown = int(await value(kernel, "peak_mb()")) - before
        assert 100 < grown < 200
        assert await value(kernel, "array[0] = 8\nint(array.sum())") == "1050000001"


async def test_arrays_that_numpy_offers_no_buffer_of_are_copied_one_at_a_time(process_place: Place) -> None:
    cell = """
        import numpy as np, pandas as pd
        times = np.arange(6_000_000).astype("datetime64[s]")
        frame = pd.DataFrame({"when": times, "n": 1})
        gaps = [np.arange(2_400_000)[::2] for _ in range(5)]
        locked = times[::2]; locked.flags.writeable = False
        flipped = np.arange(2_000_000).reshape(1000, 2000)[::-1, ::3]
    """
    file = process_place.folder / "state"
    async with process_place.open("ipython", "before") as kernel:
        await done(kernel, dedent(PEAK) + dedent(cell))
        before = int(await value(kernel, "reset(); peak_mb()"))
        assert (await save(kernel, file)).lost == ()
        # One copy of `locked` is 24 MB.
        assert int(await value(kernel, "peak_mb()")) - before < 40
        expected = await value(kernel, "[gap.sum() for gap in gaps], frame.when.max(), flipped.sum(), flipped[3, 4]")
    async with process_place.open("ipython", "after") as kernel:
        assert (await load(kernel, file)).lost == ()
        assert await value(kernel, "[gap.sum() for gap in gaps], frame.when.max(), flipped.sum(), flipped[3, 4]") == (
            expected
        )
        assert await value(kernel, "times.dtype, locked[1], times.flags.writeable, locked.flags.writeable") == (
            "(dtype('<M8[s]'), np.datetime64('1970-01-01T00:00:02'), True, False)"
        )


async def test_a_large_text_needs_no_second_one_either(process_place: Place, file: Path) -> None:
    async with process_place.open("ipython", "before") as kernel:
        await done(kernel, PEAK + "    text, data = 'x' * 100_000_000, b'y' * 100_000_000\n")
        before = int(await value(kernel, "reset(); peak_mb()"))
        assert (await save(kernel, file)).lost == ()
        assert int(await value(kernel, "peak_mb()")) - before < 50


async def test_reports_stay_within_what_the_host_takes(kernel: Kernel, file: Path) -> None:
    await done(
        kernel,
        """
        import threading
        lock = threading.Lock()
        globals().update({f"bad_{n}": lock for n in range(1_500)}, **{f"good_{n}": n for n in range(11_000)})
        globals()["long" * 1_000] = lock
        """,
    )
    report = await save(kernel, file)
    assert (len(report.kept), len(report.lost)) == (10_000, 1_000)
    assert report.lost[-1].reason == "503 more could not be kept"


async def test_what_shared_memory_or_was_the_same_object_does_so_again_after_a_second_sleep_too(
    process_place: Place, tmp_path: Path
) -> None:
    make = """
        import numpy as np, pandas as pd
        a = np.zeros(10); b = a[:5]; backwards = a[::-2]; bits = a.view('u1')
        matrix = np.zeros((3, 4), order='F'); column, turned = matrix[:, 1], matrix.T
        large = np.zeros((1000, 300)); middle = large[10:20, 5:9]
        locked = a[2:4]; locked.flags.writeable = False
        alone = np.zeros(1_000_000)[:3]
        frame = pd.DataFrame({'n': [1, 2]}); shallow = frame.copy(deep=False)
        x = []; y = [x]; z = {'x': x}
    """
    look = """
        shares = np.shares_memory
        b[0], column[2], middle[0, 0] = 1, 2, 3
        assert a[0] == 1 and matrix[2, 1] == 2 and turned[1, 2] == 2 and large[10, 5] == 3
        a[9] = 4
        assert backwards[0] == 4 and backwards.tolist() == a[::-2].tolist() and shares(bits, a)
        assert shares(locked, a) and not locked.flags.writeable and matrix.flags.f_contiguous
        shallow.iloc[0, 0] = 9
        assert frame.iloc[0, 0] == 1, 'copies to each other, whatever memory they have'
        x.append(1); assert y[0] is x and z['x'] is x
        x.clear(); shallow = frame.copy(deep=False); a[:] = 0; matrix[:] = 0; large[:] = 0
    """
    async with carried(process_place, make, look) as woken:
        assert woken.loaded.lost == ()
        assert woken.file.stat().st_size < 4_000_000, "what is not shared is kept alone"
        await done(woken.kernel, look)
        again = tmp_path / "again"
        await save(woken.kernel, again)
        async with process_place.open("ipython", "later") as kernel:
            assert (await load(kernel, again)).lost == ()
            await done(kernel, look)


async def test_views_of_an_array_that_is_too_large_are_kept_and_that_is_said(kernel: Kernel, file: Path) -> None:
    await done(kernel, "import numpy as np\nhuge = np.zeros(1_000_000)\nview = huge[:3]")
    report = await save(kernel, file, limit_bytes=2_000_000)
    assert "view" in report.kept
    assert losses(report)["huge"][1].endswith("; kept without its memory: view")
