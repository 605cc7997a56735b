import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.errors import KernelDied, KernelStartFailed
from belljar.kernels import ipython
from belljar.kernels.base import Kernel
from belljar.kernels.variables import TablePart, VariableKernel
from belljar.outputs.events import Event, Stream
from cells import DEADLINE_S, Place, interrupt_when_started, open_place, run

pytestmark = pytest.mark.anyio

PNG = "iVBORw0KGgo"


# What every kernel does behind every provider is in `conformance`; this is tried once forked and once cold.
PLACES = ["forked", "namespace", *(["process"] if os.environ.get("BELLJAR_LONG") else [])]


@pytest.fixture(scope="module", params=PLACES)
async def place(
    request: pytest.FixtureRequest, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    async with open_place(request.param, default_environment, tmp_path_factory.mktemp("ipython")) as place:
        yield place


async def test_streams_whose_flush_a_cell_replaced_cost_no_variables(kernel: Kernel) -> None:
    code = "import sys\nx = 1\nsys.stdout.flush = lambda: 1 / 0\nsys.stderr.flush = lambda: sys.exit(3)"
    await run(kernel, code)
    outcome = await run(kernel, "print('a'); print('b', file=sys.stderr); print('c', end=''); x")
    await run(kernel, "del sys.stdout.flush, sys.stderr.flush")  # other tests use this kernel too
    assert (outcome.stdout, outcome.stderr, outcome.result) == ("a\nc", "b\n", {"text/plain": "1"})


async def test_writes_to_both_streams_keep_their_order(kernel: Kernel) -> None:
    code = "import sys\nfor number in range(50):\n    print(number)\n    print(-number, file=sys.stderr)"
    outcome = await run(kernel, code)
    said = [(event.name, event.text) for event in outcome.events if isinstance(event, Stream)]
    assert said == [pair for n in range(50) for pair in (("stdout", f"{n}\n"), ("stderr", f"{-n}\n"))]


async def test_asyncio_run_works_in_a_cell(kernel: Kernel) -> None:
    code = "import asyncio\nasync def answer(): return 42\nasyncio.run(answer())"
    assert (await run(kernel, code)).result == {"text/plain": "42"}
    assert (await run(kernel, "await answer()")).result == {"text/plain": "42"}


async def test_a_cell_that_is_interrupted_before_it_may_begin_never_runs(kernel: Kernel) -> None:
    tasks: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        tasks.append(asyncio.create_task(kernel.interrupt()))

    # The first words of its preparation come before the cell may begin.
    prepare = "def prepare(*_): print('prepared')\nevents = get_ipython().events\nran = []\n"
    await run(kernel, prepare + "events.register('pre_run_cell', prepare)")
    outcome = await run(kernel, "while True: ran.append(1)", on_begin=interrupt)
    assert outcome.error.name == "KeyboardInterrupt"
    assert outcome.stdout == "prepared\n"
    await run(kernel, "events.unregister('pre_run_cell', prepare)")
    assert (await run(kernel, "'still here'")).result == {"text/plain": "'still here'"}


async def test_a_form_that_was_given_to_a_plain_type_is_shown(kernel: Kernel) -> None:
    await run(kernel, "html = get_ipython().display_formatter.formatters['text/html']")
    await run(kernel, "html.for_type(int, lambda number: f'<b>{number}</b>')")
    assert (await run(kernel, "7")).result == {"text/plain": "7", "text/html": "<b>7</b>"}
    assert (await run(kernel, "True")).result == {"text/plain": "True", "text/html": "<b>True</b>"}
    assert (await run(kernel, "'seven'")).result == {"text/plain": "'seven'"}
    await run(kernel, "html.for_type_by_name('builtins', 'dict', lambda mapping: '<i>map</i>')")
    assert (await run(kernel, "{}")).result == {"text/plain": "{}", "text/html": "<i>map</i>"}
    await run(kernel, "html.pop(int); html.pop(dict);")
    assert (await run(kernel, "7")).result == {"text/plain": "7"}


async def test_a_formatter_of_the_sessions_own_is_asked_for_plain_types_too(kernel: Kernel) -> None:
    await run(kernel, "formatter = get_ipython().display_formatter")
    await run(kernel, "formatter.format = lambda value, *_, **__: ({'text/plain': 'mine'}, {})")
    assert (await run(kernel, "7")).result == {"text/plain": "mine"}
    await run(kernel, "del formatter.format")
    assert (await run(kernel, "7")).result == {"text/plain": "7"}


@pytest.mark.parametrize("last", ["", "# nothing", "this is no python"])
async def test_variables_are_saved_after_a_cell_that_had_no_code_to_run(kernel: Kernel, last: str) -> None:
    assert isinstance(kernel, ipython.IPythonKernel)
    await run(kernel, "kept = 1")
    await run(kernel, last, on_begin=lambda: None)
    async with asyncio.timeout(DEADLINE_S):
        report = await kernel.save_state(f"{kernel.scratch}/state")
    assert "kept" in report.kept


async def test_a_task_goes_on_between_cells(kernel: Kernel) -> None:
    await run(kernel, "import asyncio\ntask = asyncio.create_task(asyncio.sleep(0.01, 'done'))\nawait asyncio.sleep(0)")
    assert (await run(kernel, "await task")).result == {"text/plain": "'done'"}


async def test_output_of_sub_processes_and_of_the_descriptors_themselves_is_captured(kernel: Kernel) -> None:
    code = (
        "import os, subprocess\nprint('one')\nos.write(1, b'two\\n')\n"
        "subprocess.run(['/bin/sh', '-c', 'echo three; echo four >&2'])\nprint('five')"
    )
    outcome = await run(kernel, code)
    assert outcome.stdout.split() == ["one", "two", "three", "five"]
    assert outcome.stderr.split() == ["four"]


async def test_output_of_a_forked_child_is_captured(kernel: Kernel) -> None:
    code = (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=print, args=('from the child',))\n"
        "child.start(); child.join(); child.exitcode"
    )
    outcome = await run(kernel, code)
    assert outcome.stdout == "from the child\n"
    assert outcome.result == {"text/plain": "0"}


async def test_a_display_in_a_forked_child_does_not_break_the_kernel(kernel: Kernel) -> None:
    code = "import os\nif os.fork() == 0:\n    display('child'); os._exit(0)\nos.wait()[1]"
    assert (await run(kernel, code)).result == {"text/plain": "0"}
    assert (await run(kernel, "1")).is_ok


FORKS = {
    "os.fork": "pid = os.fork()",
    "C": "import ctypes; pid = ctypes.CDLL(None).fork()",
    "a coroutine": "import asyncio\nawait asyncio.sleep(0)\npid = os.fork()\nawait asyncio.sleep(0)",
    "a thread": "import threading\ndef fork():\n    global pid\n    pid = os.fork()\n"
    "thread = threading.Thread(target=fork); thread.start(); thread.join()",
}


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
async def test_a_child_that_a_cell_forks_ends_with_the_cell_and_serves_nobody(kernel: Kernel, fork: str) -> None:
    code = f"import os\nkept = 5\n{fork}\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else print('child')"
    outcome = await run(kernel, code)
    assert outcome.is_ok
    assert outcome.result == {"text/plain": "0"}
    assert outcome.stdout == ("" if "thread" in fork else "child\n")
    assert (await run(kernel, "kept")).result == {"text/plain": "5"}


LAST_WORDS = {
    "1 / 0": (1, "ZeroDivisionError: division by zero\n"),
    "sys.exit(3)": (3, ""),
    "sys.exit('bye')": (1, "bye\n"),
    "sys.exit()": (0, ""),
    "raise KeyboardInterrupt": (1, "KeyboardInterrupt: \n"),
    "%nosuch": (1, "UsageError: Line magic function `%nosuch` not found.\n"),
    "input()": (1, "EOFError: input() has nobody to ask here"),
}


@pytest.mark.parametrize("end", LAST_WORDS)
async def test_a_forked_child_ends_as_a_scripts_would(kernel: Kernel, end: str) -> None:
    code = (
        "import os, sys\npid = os.fork()\n"
        f"if pid == 0:\n    {end}\n"
        "else:\n    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\nstatus"
    )
    status, words = LAST_WORDS[end]
    outcome = await run(kernel, code, allow_input=True)
    assert outcome.result == {"text/plain": str(status)}
    assert words in outcome.stderr
    assert (outcome.stderr == "") == (words == "")
    assert (await run(kernel, "status")).is_ok


async def test_a_child_on_a_terminal_of_its_own_ends_too(kernel: Kernel) -> None:
    code = (
        "import os, pty\npid, terminal = pty.fork()\nif pid == 0:\n    print('on a terminal', os.isatty(1))\n"
        "else:\n    seen = open(terminal, 'rb')\n"
        "    said = seen.readline(), os.waitpid(pid, 0)[1]\nsaid if pid else None"
    )
    assert (await run(kernel, code)).result == {"text/plain": "(b'on a terminal True\\r\\n', 0)"}
    assert (await run(kernel, "said")).is_ok


async def test_a_child_of_a_task_between_cells_serves_nobody(kernel: Kernel) -> None:
    code = (
        "import asyncio, os\nasync def later():\n    global pid\n    pid = os.fork()\n"
        "kept, task = 6, asyncio.get_event_loop().create_task(later())"
    )
    assert (await run(kernel, code)).is_ok
    for _ in range(3):
        assert (await run(kernel, "await task; kept")).result == {"text/plain": "6"}
    assert (await run(kernel, "os.waitpid(pid, 0)[1]")).result == {"text/plain": "0"}


async def test_a_child_of_code_that_looks_at_names_serves_nobody(kernel: Kernel) -> None:
    code = (
        "import os\nclass Forking:\n    def __dir__(self):\n        self.pid = os.fork()\n        return ['found']\n"
        "forking = Forking()"
    )
    assert (await run(kernel, code)).is_ok
    assert "found" in str(await kernel.complete("forking.", 8))
    assert (await run(kernel, "os.waitpid(forking.pid, 0)[1]")).result == {"text/plain": "0"}


async def test_a_kernel_that_dies_is_found_dead_though_its_child_lives(process_place: Place) -> None:
    code = "import os, signal, time\nif os.fork() == 0:\n    time.sleep(600)\nos.kill(os.getpid(), signal.SIGKILL)"
    async with process_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="SIGKILL"):
            await run(kernel, code)


async def test_a_program_in_the_place_of_a_child_has_no_part_in_the_talk(kernel: Kernel) -> None:
    code = (
        "import ctypes, os\npid = ctypes.CDLL(None).fork()\n"
        "if pid == 0:\n    os.execvp('ls', ['ls', '-l', '/proc/self/fd'])\nos.waitpid(pid, 0)[1]"
    )
    outcome = await run(kernel, code)
    assert outcome.result == {"text/plain": "0"}
    assert "socket:" not in outcome.stdout


async def test_unflushed_output_of_c_is_shown_where_it_was_written(kernel: Kernel) -> None:
    code = (
        "import ctypes\nlibrary = ctypes.CDLL(None)\nlibrary.printf(b'one\\n'); print('two')\n"
        "_ = library.printf(b'three'); library.fflush(None); print(' four'); library.printf(b'last');"
    )
    assert (await run(kernel, code)).stdout == "one\ntwo\nthree four\nlast"


async def test_input_that_one_cell_may_have_is_not_the_next_ones(kernel: Kernel) -> None:
    """Nor that of code between cells: nobody would answer it."""
    code = "class Asking:\n    def __dir__(self):\n        return [input('who?')]\nasking = Asking()"
    assert (await run(kernel, code, allow_input=True)).is_ok
    async with asyncio.timeout(DEADLINE_S):
        await kernel.complete("asking.", 7)
    assert (await run(kernel, "1")).is_ok


async def test_a_slow_consumer_loses_nothing(kernel: Kernel) -> None:
    async def on_event(_: Event) -> None:
        await asyncio.sleep(0.02)

    outcome = await run(kernel, "for number in range(60_000): print(number)", on_event=on_event)
    assert outcome.stdout == "".join(f"{number}\n" for number in range(60_000))


async def test_sys_exit_ends_the_cell_and_not_the_session(kernel: Kernel) -> None:
    await run(kernel, "kept = 1")
    assert (await run(kernel, "import sys; sys.exit(0)")).is_ok
    assert (await run(kernel, "sys.exit()")).is_ok
    assert (await run(kernel, "exit()")).is_ok
    assert (await run(kernel, "kept")).result == {"text/plain": "1"}


@pytest.mark.parametrize("reset", ["", "%reset -f"])
async def test_exit_and_quit_end_the_cell_too_with_brackets_or_without(kernel: Kernel, reset: str) -> None:
    for code in ("exit", "quit", "exit()", "quit(0)"):
        await run(kernel, reset)
        outcome = await run(kernel, code)
        assert (outcome.is_ok, outcome.events) == (True, [outcome.finished])
    outcome = await run(kernel, "kept = 1\nexit(3)")
    assert (outcome.error.name, outcome.error.message) == ("SystemExit", "3")
    assert (await run(kernel, "kept")).result == {"text/plain": "1"}


async def test_sys_exit_with_a_status_is_an_error(kernel: Kernel) -> None:
    outcome = await run(kernel, "import sys; sys.exit(3)")
    assert (outcome.error.name, outcome.error.message) == ("SystemExit", "3")
    assert not outcome.is_ok


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = None; sys.stderr = None",
        "import sys; del sys.stdout",
        "import io, sys; sys.stdout = io.StringIO()",
        "import sys; sys.__stdout__ = sys.__stderr__ = None",
    ],
)
async def test_a_cell_that_breaks_its_streams_does_not_break_the_next(kernel: Kernel, code: str) -> None:
    await run(kernel, code)
    outcome = await run(kernel, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr) == ("out\n", "err\n")


async def test_a_cell_that_takes_sigint_leaves_it_to_the_next(kernel: Kernel) -> None:
    await run(kernel, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    outcome = await interrupt_when_started(kernel, "print('started')\nwhile True: pass")
    assert outcome.error.name == "KeyboardInterrupt"


async def test_an_interrupt_while_printing_repeats_nothing(kernel: Kernel) -> None:
    for _ in range(10):
        outcome = await interrupt_when_started(kernel, "print('started')\nfor number in range(10**9): print(number)")
        _, *numbers = outcome.stdout.split()
        assert numbers == [str(number) for number in range(len(numbers))]


async def test_variables_are_named_without_what_ipython_brings(kernel: Kernel) -> None:
    await run(kernel, "%reset -f")
    assert (await run(kernel, "first = 1; _hidden = 2")).finished.variables == ("first",)


async def test_a_figure_as_last_expression_is_a_picture(kernel: Kernel) -> None:
    outcome = await run(kernel, "import matplotlib.pyplot as plt\nfigure, _ = plt.subplots()\nfigure")
    assert outcome.result is not None
    assert str(outcome.result["image/png"]).startswith(PNG)


async def test_several_figures_are_shown_in_order(kernel: Kernel) -> None:
    code = (
        "import matplotlib.pyplot as plt\nfor number in range(3):\n    plt.figure(); plt.plot([number, 1])\nplt.show()"
    )
    shown = (await run(kernel, code)).displays
    assert [str(one.data["image/png"]).startswith(PNG) for one in shown] == [True] * 3
    assert len({str(one.data["image/png"]) for one in shown}) == 3


async def test_figures_are_shown_where_code_has_chosen_agg(kernel: Kernel) -> None:
    code = (
        "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\n"
        "for number in range(2):\n    plt.figure(); plt.plot([number, 1]); plt.show()\n"
        "plt.savefig('kept.png')"
    )
    try:
        outcome = await run(kernel, code)
        assert [str(one.data["image/png"]).startswith(PNG) for one in outcome.displays] == [True] * 2
        again = await run(kernel, "plt.plot([5, 6]); plt.show()")
        assert len(again.displays) == 1
    finally:
        await run(kernel, "plt.close('all'); plt.switch_backend('module://matplotlib_inline.backend_inline')")


async def test_an_output_over_the_limit_is_said_and_not_sent(kernel: Kernel) -> None:
    outcome = await run(kernel, "display({'text/plain': 'x' * 70_000_000}, raw=True)")
    (shown,) = outcome.displays
    assert "over the limit" in str(shown.data["text/plain"])


async def test_data_of_too_many_values_is_left_out_and_its_other_forms_are_sent(kernel: Kernel) -> None:
    outcome = await run(kernel, "display({'text/plain': 'a chart', 'application/json': [{}] * 100_000}, raw=True)")
    (shown,) = outcome.displays
    said = "<data of more than 90,000 values was left out>"
    assert shown.data == {"text/plain": "a chart", "application/json": said}


_FRAMES = {
    "many-values": 'framed(b\'{"type": "display", "data": {"a": [\' + b\'{},\' * 100_000 + b\'{}]}}\')',
    "garbage": "b'\\xff' * 1000",
    "huge-length": "struct.pack('!I', 2**32 - 1)",
    "not-json": "framed(b'hello')",
    "deep-json": "framed(b'[' * 1_000_000)",
    "deep-data": "framed(b'{\"type\": \"result\", \"data\": {\"a\": ' + b'[' * 5_000 + b']' * 5_000 + b'}}')",
    "unknown-type": 'framed(b\'{"type": "surprise"}\')',
    "wrong-types": 'framed(b\'{"type": "finished", "id": 1, "is_ok": [], "execution_count": {}}\')',
    "not-utf-8": 'framed(b\'{"type": "result", "data": {"a": "\\xff"}}\')',
    "infinite-usage": 'framed(b\'{"type": "finished", "is_ok": true, "execution_count": 1, '
    '"cpu_s": Infinity, "peak_memory_mb": 1}\')',
}


@pytest.mark.parametrize("frame", _FRAMES.values(), ids=_FRAMES)
async def test_a_cell_that_writes_to_the_runners_socket_ends_its_kernel(process_place: Place, frame: str) -> None:
    code = (
        "import os, stat, struct\n"
        "def framed(body): return struct.pack('!I', len(body)) + body\n"
        f"frame = {frame}\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(int(name)).st_mode): os.write(int(name), frame)\n"
        "    except OSError: pass\n"
        "while True: pass"
    )
    async with process_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="so its process was ended"):
            await run(kernel, code)
        with pytest.raises(KernelDied):
            await run(kernel, "1")


async def test_a_cell_that_closes_the_runners_socket_ends_its_kernel(process_place: Place) -> None:
    async with process_place.open("ipython") as kernel:
        with pytest.raises(KernelDied):
            await run(kernel, "import os, time; os.closerange(3, 1000); time.sleep(600)")


async def test_an_interpreter_that_does_not_start_is_quoted(own_place: Place, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no snakes here >&2\nexit 7\n")
    python.chmod(0o755)
    tmp_path.chmod(0o755)
    environment = Environment("broken", python, (tmp_path,))
    with pytest.raises(KernelStartFailed, match="exit status 7") as caught:
        await Place(own_place.provider, environment, own_place.folder).start("ipython")
    assert "no snakes here" in caught.value.hint


async def test_a_closed_kernel_leaves_no_descriptor_open(process_place: Place) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    async with process_place.open("ipython") as kernel:
        await run(kernel, "1")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_look_at_variables_through_a_library_that_hangs_is_given_up_and_the_kernel_lives(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipython, "LOOK_TIMEOUT_S", 1.0)
    made_up = (
        "import sys, types\nclass Table:\n    @property\n    def num_rows(self):\n        while True: pass\n"
        "sys.modules['pyarrow'] = types.ModuleType('pyarrow')\nsys.modules['pyarrow'].Table = Table\n"
        "slow, quick = Table(), 1"
    )
    await run(kernel, made_up)
    assert isinstance(kernel, VariableKernel)
    assert await kernel.rows("slow", TablePart()) is None
    assert (await run(kernel, "quick")).result == {"text/plain": "1"}


async def test_a_name_that_takes_for_ever_to_look_at_is_given_up_and_the_kernel_lives(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipython, "QUESTION_TIMEOUT_S", 1.0)
    await run(kernel, "class Slow:\n    def __dir__(self):\n        while True: pass\nslow, quick = Slow(), 1")
    assert (await kernel.complete("slow.a", 6)).matches == []
    assert "quick" in (await kernel.complete("quic", 4)).matches
    assert (await run(kernel, "quick")).result == {"text/plain": "1"}
