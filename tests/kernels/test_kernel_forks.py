"""Forks of live kernels: what comes along, what is named as lost, and how little a hostile one can do."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from belljar.errors import BelljarError, CopyRefused, KernelDied
from belljar.kernels import forked_process, ipython
from belljar.kernels.base import Kernel, KernelCheckpoint
from belljar.kernels.ipython import IPythonKernel
from cells import ForkingPlace, interrupt_when_started, run
from waiting import until

pytestmark = pytest.mark.anyio

TIMEOUT_S = 30


@pytest.fixture
async def place(forking_place: ForkingPlace, tmp_path: Path) -> ForkingPlace:
    """With a folder of the test's own, as a fork's session has one: the names start anew."""
    folder = forking_place.folder / tmp_path.name
    folder.mkdir(mode=0o711)
    return ForkingPlace(
        forking_place.provider, forking_place.environment, folder, forking_place.starter, forking_place.name
    )


@pytest.fixture
async def origin(place: ForkingPlace) -> AsyncIterator[IPythonKernel]:
    async with place.open("ipython", "origin") as kernel:
        yield kernel


@asynccontextmanager
async def forked(
    place: ForkingPlace, kernel: Kernel, name: str = "fork", *, origin: str = "origin", reseed: bool = False
) -> AsyncIterator[tuple[IPythonKernel, list[str]]]:
    """A fork with a copy of the files, as a server makes it."""
    before, after = place.folders(origin), place.folders(name, fork_of=origin)
    after.make()
    shutil.copytree(before.workspace, after.workspace, dirs_exist_ok=True)
    owner = before.workspace.stat()
    for path in after.workspace.rglob("*"):
        os.chown(path, owner.st_uid, owner.st_gid)
    async with asyncio.timeout(TIMEOUT_S):
        fork, lost = await place.starter.fork(kernel, before, after, reseed=reseed)
    assert isinstance(fork, IPythonKernel)
    try:
        yield fork, lost
    finally:
        await fork.aclose()


Wake = Callable[[IPythonKernel, KernelCheckpoint], Awaitable[IPythonKernel]]


@pytest.fixture
async def wake() -> AsyncIterator[Wake]:
    """Wakes checkpoints, and lets go of the kernels at the end."""
    opened: list[IPythonKernel] = []

    async def wake(kernel: IPythonKernel, checkpoint: KernelCheckpoint) -> IPythonKernel:
        async with asyncio.timeout(TIMEOUT_S):
            opened.append(await kernel.restore(checkpoint))
        return opened[-1]

    yield wake
    for kernel in opened:
        await kernel.aclose()


async def tell(kernel: Kernel, code: str) -> str:
    outcome = await run(kernel, code)
    assert outcome.is_ok, outcome.events
    return outcome.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has no other user that could hold it open")
async def test_a_session_that_kills_all_it_sees_keeps_its_variables(origin: IPythonKernel) -> None:
    await run(origin, "import os, signal\nkept = 1\nos.kill(-1, signal.SIGKILL)")
    assert await tell(origin, "print(kept)") == "1"


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.setdefaulttimeout(0.05)",
        "import os; os.close(1)",
        "import signal\ndef fail(*_): raise ValueError\nsignal.signal(signal.SIGALRM, fail)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)",
        "import gc; gc.set_threshold(1)",
    ],
    ids=["socket timeout", "closed stdout", "handler that raises", "constant collections"],
)
async def test_what_a_cell_changes_in_its_process_harms_neither_checkpoints_nor_what_wakes(
    origin: IPythonKernel, wake: Wake, code: str
) -> None:
    await run(origin, f"kept = 1\n{code}")
    # Let more time pass than the timeout and the timer have, because that is what harmed them.
    await asyncio.sleep(0.2)
    checkpoint = await origin.fork_checkpoint()
    await asyncio.sleep(0.2)
    again = await wake(origin, checkpoint)
    await asyncio.sleep(0.2)
    assert (await run(again, "assert kept == 1")).is_ok


TICKING = """
import asyncio, pathlib
async def tick():
    while True:
        with open("count", "a") as file: file.write(".")
        await asyncio.sleep(0.001)
task = asyncio.create_task(tick())
await asyncio.sleep(0)
"""
RINGING = """
import signal
open("count", "w").close()
def ring(*_):
    with open("count", "a") as file:
        file.write(".")
        if file.tell() >= 5: signal.setitimer(signal.ITIMER_REAL, 0)
    raise OSError("rang")
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.05)  # when the checkpoint is there
"""


DISPLAYING = """
import signal
from IPython.display import HTML
def show(*_):
    display(HTML("x"))
    with open("count", "w") as file: file.write(".....")
signal.signal(signal.SIGALRM, show)
signal.setitimer(signal.ITIMER_REAL, 0.5)  # when the checkpoint is there
"""


@pytest.mark.parametrize("code", [TICKING, RINGING, DISPLAYING], ids=["task", "raising handler", "displaying handler"])
async def test_what_a_cell_left_running_goes_on_after_a_checkpoint_was_forked(
    place: ForkingPlace, origin: IPythonKernel, code: str
) -> None:
    await run(origin, code)
    await origin.fork_checkpoint()
    count = place.folders("origin").workspace / "count"
    await until(lambda: count.exists() and len(count.read_text()) >= 5)
    await origin.fork_checkpoint()
    assert (await run(origin, "1 + 1")).is_ok


async def test_a_checkpoint_that_fails_in_the_fork_is_refused_and_the_session_goes_on(origin: IPythonKernel) -> None:
    # With a thread, what separates the checkpoint from the session is opened in the fork, which has no descriptor left.
    few = (
        "import os, resource, threading, time\n"
        "kept = 1\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "highest = max(map(int, os.listdir('/proc/self/fd')))\n"
        "filling = [os.dup(0) for _ in range(highest)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (max(filling) + 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    )
    await run(origin, few)
    with pytest.raises(BelljarError):
        await origin.fork_checkpoint()
    assert await tell(origin, "print(kept)") == "1"


# What comes along


async def test_every_generation_goes_its_own_way(place: ForkingPlace, origin: IPythonKernel) -> None:
    await run(origin, "line = ['first']; import numpy as np; data = np.arange(1000)")
    async with forked(place, origin, "second") as (second, _):
        await run(second, "line.append('second'); data[0] = 2")
        async with forked(place, second, "third", origin="second") as (third, _):
            await run(third, "line.append('third'); data[0] = 3")
            async with forked(place, third, "fourth", origin="third") as (fourth, _):
                await run(fourth, "line.append('fourth')")
                said = [await tell(kernel, "print(line[-1], data[0])") for kernel in (origin, second, third, fourth)]
    assert said == ["first 0", "second 2", "third 3", "fourth 3"]


async def test_a_fork_lives_on_without_its_origin(place: ForkingPlace) -> None:
    origin = await place.start("ipython", "origin")
    await run(origin, "kept = 1")
    async with forked(place, origin) as (fork, _):
        await origin.aclose()
        assert await tell(fork, "print(kept + 1)") == "2"


async def test_copies_of_copies_wake_as_they_fell_asleep(origin: IPythonKernel, wake: Wake) -> None:
    await run(origin, "line = [1]")
    first = await origin.fork_checkpoint()
    await run(origin, "line.append(2)")
    again = await wake(origin, first)
    assert await tell(again, "print(line)") == "[1]"
    await run(again, "line.append('again')")
    second = await again.fork_checkpoint()
    last = await wake(again, second)
    assert await tell(last, "print(line)") == "[1, 'again']"
    # The checkpoint sleeps on: it can be woken as often as one likes.
    assert await tell(await wake(last, first), "print(line)") == "[1]"


async def test_a_copy_wakes_after_its_kernel_died(origin: IPythonKernel, wake: Wake) -> None:
    await run(origin, "kept = 1")
    checkpoint = await origin.fork_checkpoint()
    with pytest.raises(KernelDied, match="exit status 3"):
        await run(origin, "import os; os._exit(3)")
    assert checkpoint.is_alive()
    assert await tell(await wake(origin, checkpoint), "print(kept)") == "1"


async def test_a_copy_sleeps_through_signals(origin: IPythonKernel, wake: Wake) -> None:
    await run(origin, "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: 1 / 0)")
    copy = await origin.fork_checkpoint()
    # To all processes that the session sees but itself.
    await run(origin, "for number in (signal.SIGINT, signal.SIGTERM): os.kill(-1, number)")
    assert copy.is_alive()
    assert await tell(await wake(origin, copy), "print(signal.getsignal(signal.SIGTERM).__name__)") == "<lambda>"


@pytest.mark.parametrize(
    ("code", "cause"),
    [("import os; os._exit(3)", "exit status 3"), ("import ctypes; ctypes.string_at(0)", "SIGSEGV")],
    ids=["exit", "crash"],
)
async def test_a_copy_that_ends_says_how_and_the_others_do_not_notice(
    place: ForkingPlace, origin: IPythonKernel, code: str, cause: str, wake: Wake
) -> None:
    async with forked(place, origin) as (fork, _):
        fresh = await wake(fork, await fork.fork_checkpoint())
        with pytest.raises(KernelDied, match=cause):
            await run(fresh, code)
        with pytest.raises(KernelDied):
            await run(fork, "1")  # in the same sandbox, which is ended with it
        assert await tell(origin, "print('alive')") == "alive"


async def test_copies_are_interrupted_each_for_itself(place: ForkingPlace, origin: IPythonKernel, wake: Wake) -> None:
    async with forked(place, origin) as (fork, _):
        for kernel in (fork, origin, await wake(origin, await origin.fork_checkpoint())):
            outcome = await interrupt_when_started(kernel, "print('started')\nwhile True: pass")
            assert outcome.error.name == "KeyboardInterrupt"


async def test_the_history_goes_on(place: ForkingPlace, origin: IPythonKernel) -> None:
    await run(origin, "40 + 2")
    async with forked(place, origin) as (fork, _):
        outcome = await run(fork, "_ + len(In)")
        assert outcome.result == {"text/plain": "45"}
        assert outcome.finished.execution_count == 2


async def test_figures_errors_displays_and_questions_work_in_a_copy(place: ForkingPlace, origin: IPythonKernel) -> None:
    await run(origin, "import matplotlib.pyplot as plt\nplt.ioff(); plt.plot([1, 2])\nfigure = plt.gcf()")
    async with forked(place, origin) as (fork, _):
        outcome = await run(fork, "display(figure); 1 / 0")
        assert outcome.error.name == "ZeroDivisionError"
        assert "image/png" in outcome.displays[0].data
        assert (await run(fork, "input('?')")).error.name == "EOFError"


async def test_tasks_of_the_sessions_own_go_on_in_both(place: ForkingPlace, origin: IPythonKernel, wake: Wake) -> None:
    code = """
import asyncio
ticks, done = [], asyncio.Event()
async def tick():
    while True:
        ticks.append(len(ticks)); await asyncio.sleep(0)
async def wait(): await done.wait(); return 'waited'
task, waiter = asyncio.create_task(tick()), asyncio.create_task(wait())
await asyncio.sleep(0.01)
"""
    more = "before = len(ticks); await asyncio.sleep(0.05); done.set(); print(len(ticks) > before, await waiter)"
    await run(origin, code)
    async with forked(place, origin) as (fork, _):
        fresh = await wake(fork, await fork.fork_checkpoint())
        assert [await tell(kernel, more) for kernel in (fresh, origin)] == ["True waited"] * 2
        assert await tell(fresh, "print(await asyncio.to_thread(abs, -1))") == "1"
        assert await tell(fresh, "print(asyncio.run(asyncio.sleep(0, 2)))") == "2"


async def test_open_files_have_offsets_and_contents_of_their_own(
    place: ForkingPlace, origin: IPythonKernel, wake: Wake
) -> None:
    await run(origin, "open('text', 'w').write('abcdefgh'); file = open('text', 'r+b', 0); file.read(3)")
    asleep = await origin.fork_checkpoint()
    async with forked(place, origin) as (fork, _):
        assert await tell(origin, "print(file.read(2))") == "b'de'"
        assert await tell(fork, "print(file.read(2), file.write(b'XX'))") == "b'de' 2"
        assert await tell(origin, "print(file.read(), open('text').read())") == "b'fgh' abcdefgh"
        assert await tell(fork, "print(open('text').read())") == "abcdeXXh"
    assert await tell(await wake(origin, asleep), "print(file.read())") == "b'defgh'"


async def test_what_was_written_and_not_flushed_is_written_once(place: ForkingPlace, origin: IPythonKernel) -> None:
    await run(origin, "file = open('log', 'w'); n = file.write('abc')")
    origin.forget(await origin.fork_checkpoint())
    async with forked(place, origin) as (fork, _):
        for kernel in (fork, origin):
            assert await tell(kernel, "n = file.write('def'); file.close(); print(open('log').read())") == "abcdef"


async def test_numbers_are_drawn_alike_unless_others_are_asked_for(
    place: ForkingPlace, origin: IPythonKernel, wake: Wake
) -> None:
    draw = (
        "import random, numpy, tempfile, os\n"
        "print(random.random(), numpy.random.random(), generator.random(), next(tempfile._get_candidate_names()))"
    )
    await run(origin, "import numpy, random, tempfile; generator = numpy.random.default_rng(); random.random()")
    asleep = await origin.fork_checkpoint()
    async with forked(place, origin, "same") as (same, _), forked(place, origin, "other", reseed=True) as (other, _):
        drawn = [(await tell(kernel, draw)).split() for kernel in (origin, same, other)]
    assert drawn[0][:3] == drawn[1][:3]
    assert drawn[0][:2] != drawn[2][:2]
    # A generator that the session made is the session's own to seed; secrets are never alike.
    assert drawn[0][2] == drawn[2][2]
    secret = "import ssl, secrets, uuid; print(ssl.RAND_bytes(8), secrets.token_hex(8), uuid.uuid4())"
    fresh = await wake(origin, asleep)
    assert (await tell(fresh, draw)).split()[:3] == drawn[0][:3]
    said = [(await tell(kernel, secret)).split() for kernel in (fresh, await wake(fresh, asleep))]
    assert not {*said[0]} & {*said[1]}


# What does not


async def test_what_cannot_be_copied_is_named(place: ForkingPlace, origin: IPythonKernel) -> None:
    code = """
import socket, subprocess, threading
threading.Thread(target=threading.Event().wait, name='heartbeat', daemon=True).start()
child = subprocess.Popen(['sleep', '600'])
server = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname())
"""
    await run(origin, code)
    asleep = await origin.fork_checkpoint()
    async with forked(place, origin) as (fork, lost):
        number = await tell(origin, "print(child.pid)")
        assert lost[:3] == ["thread heartbeat", f"process sleep ({number})", "2 open sockets"]
        assert asleep.lost[:3] == lost[:3]
        said = "import threading\nprint([t.name for t in threading.enumerate()], client.send(b'x'))"
        assert (await run(fork, said)).error.name == "BrokenPipeError"
        assert await tell(fork, "print(threading.active_count())") == "1"
        assert await tell(origin, said) == "['MainThread', 'heartbeat'] 1"
        assert await tell(origin, "print(child.poll())") == "None"


async def test_a_copy_asleep_holds_nothing_of_the_sessions_open(origin: IPythonKernel) -> None:
    code = """
import fcntl, socket, subprocess
child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server = socket.create_server(('127.0.0.1', 0)); address = server.getsockname()
locked = open('lock', 'w'); fcntl.flock(locked, fcntl.LOCK_EX)
"""
    await run(origin, code)
    await origin.fork_checkpoint()
    assert await tell(origin, "print(child.communicate(b'said', timeout=20))") == "(b'said', None)"
    assert await tell(origin, "server.close(); print(socket.create_server(address).getsockname() == address)") == "True"
    again = "locked.close(); again = open('lock'); fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')"
    assert await tell(origin, again) == "free"


async def test_copies_are_no_children_of_the_sessions(place: ForkingPlace, origin: IPythonKernel, wake: Wake) -> None:
    asleep = await origin.fork_checkpoint()
    async with forked(place, origin) as (fork, _):
        for kernel in (origin, fork, await wake(origin, asleep)):
            assert (await run(kernel, "import os; os.wait()")).error.name == "ChildProcessError"
            code = "child = os.fork() or os._exit(4); print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
            assert await tell(kernel, code) == "4"


async def test_a_session_that_ignores_its_children_can_be_copied(
    place: ForkingPlace, origin: IPythonKernel, wake: Wake
) -> None:
    await run(origin, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); kept = 1")
    async with forked(place, origin) as (fork, _):
        fresh = await wake(fork, await fork.fork_checkpoint())
        assert await tell(fresh, "print(kept)") == "1"
        with pytest.raises(KernelDied, match="exit status 3"):
            await run(fresh, "import os; os._exit(3)")


async def test_nothing_is_held_that_both_have_let_go(place: ForkingPlace, origin: IPythonKernel) -> None:
    await run(origin, "import numpy; large = numpy.ones(25_000_000)")
    async with forked(place, origin) as (fork, _):
        assert total_mb() > 200
        for kernel in (fork, origin):
            await run(kernel, "del large")
        await until(lambda: total_mb() <= 180)


async def test_sixty_copies_of_a_session_whose_threads_print(
    place: ForkingPlace, origin: IPythonKernel, wake: Wake
) -> None:
    code = """
import sys, threading, time, logging
def chatter(number):
    while True:
        print('chatter', number); sys.stderr.write('x'); logging.getLogger().warning('y'); time.sleep(0.0005)
for number in range(4): threading.Thread(target=chatter, args=(number,), daemon=True).start()
"""
    await run(origin, code)
    async with asyncio.timeout(TIMEOUT_S):
        for number in range(60):
            checkpoint = await origin.fork_checkpoint()
            if number % 6 == 0:
                fresh = await wake(origin, checkpoint)
                outcome = await run(fresh, "print('printed'); logging.getLogger().warning('logged'); 1")
                assert (outcome.stdout, outcome.result) == ("printed\n", {"text/plain": "1"})
                assert "logged" in outcome.stderr
            origin.forget(checkpoint)
        async with forked(place, origin) as (fork, _):
            assert await tell(fork, "print('printed')") == "printed"


# Libraries with threads of their own

_CLUSTER = (
    "import numpy as np\nfrom sklearn.cluster import KMeans\n"
    "def cluster(): return KMeans(3, n_init=1, random_state=0).fit(np.arange(30000.).reshape(-1, 3)).n_iter_\n"
)


async def test_a_session_that_used_openmp_can_be_copied_and_goes_on_using_it(
    place: ForkingPlace, origin: IPythonKernel, wake: Wake
) -> None:
    times = await tell(origin, _CLUSTER + "print(cluster())")
    async with forked(place, origin) as (fork, _):
        fresh = await wake(fork, await fork.fork_checkpoint())
        assert [await tell(kernel, "print(cluster())") for kernel in (fresh, origin)] == [times] * 2


async def test_threads_that_a_copy_would_wait_for_are_a_reason_to_refuse(
    place: ForkingPlace, origin: IPythonKernel
) -> None:
    code = """
import threading
over, done = threading.Event(), threading.Event()
def work(): cluster(); done.set(); over.wait()
worker = threading.Thread(target=work); worker.start(); done.wait()
"""
    await run(origin, _CLUSTER + code)
    with pytest.raises(CopyRefused, match="threads of OpenMP are running"):
        await origin.fork_checkpoint()
    with pytest.raises(CopyRefused, match="threads of OpenMP are running"):
        async with forked(place, origin):
            pass
    await run(origin, "over.set(); worker.join()")
    await origin.fork_checkpoint()


# Sessions that do not play along

_ANSWER = """
import sys
channel = sys.modules['belljar_runner.channel'].Channel
send = channel.send
def answer(m): return {0} if m['type'] == 'forked' else [m]
channel.send = lambda self, *all: send(self, *[one for m in all for one in answer(m)])
"""
_HOSTILE = {
    "no fork": "import os; os.fork = None",
    "a fork that fails": "import os\ndef fork(): raise OSError(11, 'not today')\nos.fork = fork",
    "a fork that never ends": "import os, threading\nos.fork = lambda: threading.Event().wait()",
    "a fork that is none": "import os; os.fork = lambda: 1",
    "a fork that says it is the child": "import os; os.fork = lambda: 0",
    "no end": "import os; os._exit = lambda _: None",
    "no waiting": "import os; os.waitpid = None",
    "no sockets": "import socket; socket.socket = None",
    "no answer": _ANSWER.format("[]"),
    "a malformed answer": _ANSWER.format("[{'type': 'forked', 'id': 'x', 'lost': 7}]"),
    "many answers": _ANSWER.format("[m] * 1000"),
    "a lie": _ANSWER.format("[{**m, 'lost': ['x' * 10_000] * 1000}]"),
    "no word from the copy": "import sys; sys.modules['belljar_runner.runner'].Channel = None",
    "no duplicates": "import os; os.dup2 = None",
    "hooks that raise": "import os; os.register_at_fork(before=lambda: 1 / 0, after_in_child=lambda: 1 / 0)",
    "hooks that hang": "import os, threading; os.register_at_fork(after_in_child=lambda: threading.Event().wait())",
    "hooks that end": "import os; os.register_at_fork(after_in_child=lambda: os._exit(9))",
    "closed descriptors": "import os; os.closerange(0, 3)",
    "no room for processes": "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (0, 0))",
    "no room for descriptors": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (3, 3))",
    "a broken interpreter": "import sys; sys.modules['belljar_runner.fork'].__dict__.clear()",
    "another program": "import sys; sys.executable = '/bin/false'",
}


@pytest.mark.parametrize("code", _HOSTILE.values(), ids=_HOSTILE)
async def test_a_hostile_session_is_copied_or_refused_in_bounded_time(
    place: ForkingPlace, wake: Wake, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    for module in (ipython, forked_process):
        monkeypatch.setattr(module, "FORK_TIMEOUT_S", 1.0)
    async with asyncio.timeout(TIMEOUT_S), place.open("ipython", "origin") as origin:
        await run(origin, code)
        # Anything else would be a fault of ours, for which a person gets no clear word.
        with suppress(BelljarError):
            await sleep_and_wake(origin, wake)
        with suppress(BelljarError):
            await fork_once(place, origin)
    # Nobody else has noticed.
    async with place.open("ipython", "next") as kernel:
        assert await tell(kernel, "print('alive')") == "alive"


async def sleep_and_wake(kernel: IPythonKernel, wake: Wake) -> None:
    await run(await wake(kernel, await kernel.fork_checkpoint()), "1")


async def fork_once(place: ForkingPlace, kernel: IPythonKernel) -> None:
    async with forked(place, kernel) as (fork, _):
        await run(fork, "1")


def total_mb() -> float:
    """Of all processes below this one, each page once."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))
