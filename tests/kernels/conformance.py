"""What every kernel must do. A module that has fixtures `place`, `kind` and `kernel` imports it whole and runs it."""

import re
import time
from itertools import groupby

import pytest

from belljar.errors import KernelDied
from belljar.kernels.base import Completeness, Kernel
from belljar.outputs.events import ClearOutput, DisplayData, Event, InputRequest, Stream
from cells import Outcome, Place, interrupt_when_started, run, shared_id, speak_between_cells

pytestmark = pytest.mark.anyio

PNG = "iVBORw0KGgo"
HIGHEST = "🎈 žluťoučký 漢字 \U0010ffff"


async def test_variables_persist_between_cells(kernel: Kernel) -> None:
    await run(kernel, "kept = 20")
    outcome = await run(kernel, "kept + 1")
    assert outcome.result == {"text/plain": "21"}
    assert outcome.is_ok


async def test_the_two_streams_are_told_apart(kernel: Kernel) -> None:
    outcome = await run(kernel, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr) == ("out\n", "err\n")


async def test_the_last_expression_is_the_result_and_a_statement_has_none(kernel: Kernel) -> None:
    assert (await run(kernel, "1\n2")).result == {"text/plain": "2"}
    assert (await run(kernel, "silent = 1")).result is None


async def test_an_empty_cell_is_ok_and_says_nothing(kernel: Kernel) -> None:
    outcome = await run(kernel, "")
    assert outcome.events == [outcome.finished]
    assert outcome.is_ok


async def test_the_execution_count_rises_by_one(kernel: Kernel) -> None:
    first = await run(kernel, "1")
    second = await run(kernel, "1")
    assert second.finished.execution_count == first.finished.execution_count + 1


async def test_an_error_has_name_message_and_a_plain_traceback(kernel: Kernel) -> None:
    outcome = await run(kernel, "def divide(n):\n    return n / 0\ndivide(1)")
    error = outcome.error
    assert (error.name, error.message) == ("ZeroDivisionError", "division by zero")
    traceback = "\n".join(error.traceback)
    assert "return n / 0" in traceback
    assert "\x1b" not in traceback
    assert all("\n" not in line for line in error.traceback)
    assert not outcome.is_ok


async def test_no_code_runs_before_the_one_who_asked_is_ready(kernel: Kernel) -> None:
    ready: list[float] = []

    def get_ready() -> None:
        # Many times what a kernel needs to get at the code.
        while time.monotonic() < asked + 0.1:
            pass
        ready.append(time.monotonic())

    asked = time.monotonic()
    outcome = await run(kernel, "import time\nprint(time.monotonic())", on_begin=get_ready)
    assert float(outcome.stdout) > ready[0]
    # Nor does it matter whether there was any code to run.
    for code in ("", "this is no python", "1"):
        outcome = await run(kernel, code, on_begin=lambda: ready.append(0.0))
    assert outcome.result == {"text/plain": "1"}
    assert len(ready) == 4


async def test_code_that_is_not_python_is_a_syntax_error(kernel: Kernel) -> None:
    outcome = await run(kernel, "this is no python")
    assert outcome.error.name == "SyntaxError"
    assert not outcome.is_ok


async def test_html_is_displayed(kernel: Kernel) -> None:
    outcome = await run(kernel, "from IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))")
    (shown,) = outcome.displays
    assert shown.data["text/html"] == "<b>bold</b>"
    assert not shown.update


async def test_output_comes_in_the_order_it_was_made(kernel: Kernel) -> None:
    outcome = await run(kernel, "print('before')\ndisplay('shown')\nprint('after')\n'result'")
    # A busy machine may cut what is printed in two.
    kinds = [kind for kind, _ in groupby(type(event).__name__ for event in outcome.events)]
    assert kinds == ["Stream", "DisplayData", "Stream", "ExecuteResult", "Finished"]


async def test_a_display_is_updated_under_its_id(kernel: Kernel) -> None:
    outcome = await run(kernel, "shown = display('one', display_id=True)\nshown.update('two')")
    first, second = outcome.displays
    assert first.display_id is not None
    assert second == DisplayData({"text/plain": "'two'"}, first.display_id, update=True)


async def test_clear_output_says_whether_it_waits(kernel: Kernel) -> None:
    code = "from IPython.display import clear_output\nclear_output(wait=True)\nclear_output()"
    outcome = await run(kernel, code)
    assert [event for event in outcome.events if isinstance(event, ClearOutput)] == [
        ClearOutput(wait=True),
        ClearOutput(wait=False),
    ]


async def test_await_works_at_the_top_level(kernel: Kernel) -> None:
    outcome = await run(kernel, "import asyncio\nawait asyncio.sleep(0, 'slept')")
    assert outcome.result == {"text/plain": "'slept'"}


async def test_a_shell_command_is_run_and_heard(kernel: Kernel) -> None:
    assert (await run(kernel, "!echo hi")).stdout.split() == ["hi"]


async def test_the_output_of_a_shell_command_can_be_assigned(kernel: Kernel) -> None:
    assert (await run(kernel, "lines = !echo one; echo two\nlist(lines)")).result == {"text/plain": "['one', 'two']"}


async def test_magics_work(kernel: Kernel) -> None:
    assert re.search("(CPU|Wall) time", (await run(kernel, "%%time\nsum(range(9))")).stdout)
    await run(kernel, "%reset -f\nlonely = 1")
    assert (await run(kernel, "%who")).stdout.split() == ["lonely"]
    await run(kernel, "from IPython.display import display")


async def test_help_is_shown(kernel: Kernel) -> None:
    outcome = await run(kernel, "len?")
    said = outcome.stdout + "".join(str(shown.data.get("text/plain")) for shown in outcome.displays)
    assert "number of items in a container" in said
    assert "\x1b" not in said


async def test_unicode_survives_both_ways(kernel: Kernel) -> None:
    outcome = await run(kernel, f"text = {HIGHEST!r}\nprint(text)\ntext")
    assert outcome.stdout == HIGHEST + "\n"
    assert outcome.result is not None
    assert "🎈" in str(outcome.result["text/plain"])


async def test_a_lone_surrogate_does_not_break_the_kernel(kernel: Kernel) -> None:
    await run(kernel, "display({'text/plain': 'a\\ud800b'}, raw=True)")
    assert (await run(kernel, "1")).is_ok


async def test_five_megabytes_arrive_whole(kernel: Kernel) -> None:
    outcome = await run(kernel, "for number in range(10_000):\n    print(f'{number:0499}')")
    assert outcome.stdout == "".join(f"{number:0499}\n" for number in range(10_000))


@pytest.mark.parametrize(
    "endless",
    ["while True: pass", "import time; time.sleep(600)", "import asyncio; await asyncio.sleep(600)"],
    ids=["loop", "sleep", "await"],
)
async def test_an_interrupt_ends_the_cell_and_keeps_variables(kernel: Kernel, endless: str) -> None:
    await run(kernel, "survivor = 'here'")
    outcome = await interrupt_when_started(kernel, f"print('started', flush=True)\n{endless}")
    assert not outcome.is_ok
    assert (await run(kernel, "survivor")).result == {"text/plain": "'here'"}


async def test_input_is_asked_and_answered(kernel: Kernel) -> None:
    outcome = await _answered(kernel, "name = input('Your name? ')\nname.upper()", "ada")
    assert outcome.questions == [InputRequest("Your name? ", is_password=False)]
    assert outcome.result == {"text/plain": "'ADA'"}


async def test_a_password_is_asked_for_as_one(kernel: Kernel) -> None:
    outcome = await _answered(kernel, "import getpass\nlen(getpass.getpass('Word: '))", "secret")
    assert outcome.questions == [InputRequest("Word: ", is_password=True)]
    assert outcome.result == {"text/plain": "6"}


async def test_a_declined_question_is_an_end_of_file(kernel: Kernel) -> None:
    outcome = await _answered(kernel, "input('?')", None)
    assert outcome.error.name == "EOFError"


async def test_an_interrupt_ends_a_cell_that_waits_for_input(kernel: Kernel) -> None:
    async def on_event(event: Event) -> None:
        if isinstance(event, InputRequest):
            await kernel.interrupt()

    outcome = await run(kernel, "input('?')", allow_input=True, on_event=on_event)
    assert not outcome.is_ok
    assert (await run(kernel, "1")).is_ok


async def test_input_fails_at_once_where_nobody_can_be_asked(kernel: Kernel) -> None:
    outcome = await run(kernel, "input('Your name? ')", allow_input=False)
    assert outcome.questions == []
    assert outcome.error.name in ("EOFError", "StdinNotImplementedError")
    assert not [line for line in outcome.error.traceback if "host_link.py" in line or "hidden" in line]


async def test_a_name_is_completed(kernel: Kernel) -> None:
    # ipykernel's would first read ten seconds long through all that the kernel has imported.
    await run(kernel, "get_ipython().Completer.use_jedi = False\nelephants = 2")
    completion = await kernel.complete("1 + eleph", 9)
    assert "elephants" in completion.matches
    assert (completion.start, completion.end) == (4, 9)


async def test_nothing_to_complete_is_an_empty_completion(kernel: Kernel) -> None:
    assert (await kernel.complete("no_such_name_anywhere", 21)).matches == []


async def test_an_attribute_is_completed_on_the_second_line(kernel: Kernel) -> None:
    await run(kernel, "elephants = 'two'")
    completion = await kernel.complete("1\nelephants.upp", 15)
    assert [match.rpartition(".")[2] for match in completion.matches] == ["upper"]
    assert completion.end == 15


async def test_a_name_is_explained_and_an_unknown_one_is_not(kernel: Kernel) -> None:
    await run(kernel, "def water(plant):\n    'Give it a little.'\n    return plant")
    explained = str((await kernel.inspect("1 + water", 7))["text/plain"])
    assert "Give it a little." in explained
    assert "return plant" not in explained
    assert "\x1b" not in explained
    assert "return plant" in str((await kernel.inspect("water", 3, detail=1))["text/plain"])
    assert await kernel.inspect("no_such_name_anywhere", 5) == {}
    assert await kernel.inspect("", 0) == {}


async def test_half_a_cell_is_told_from_a_whole_one(kernel: Kernel) -> None:
    assert (await kernel.check_complete("1 + 1")).status == "complete"
    assert await kernel.check_complete("for n in range(3):") == Completeness("incomplete", "    ")
    assert (await kernel.check_complete("1 ! 2")).status == "invalid"


async def test_output_of_a_thread_between_cells_is_in_the_next(kernel: Kernel, place: Place, kind: str) -> None:
    await speak_between_cells(kernel, place.workspace(shared_id(kind)), "late")
    assert (await run(kernel, "print('now')")).stdout == "late\nnow\n"


async def test_a_completion_between_cells_loses_no_output(kernel: Kernel, place: Place, kind: str) -> None:
    await speak_between_cells(kernel, place.workspace(shared_id(kind)), "late")
    await kernel.complete("pri", 3)
    assert (await run(kernel, "print('now')")).stdout == "late\nnow\n"


async def test_a_figure_is_shown_as_a_picture(kernel: Kernel) -> None:
    outcome = await run(kernel, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    (shown,) = outcome.displays
    assert str(shown.data["image/png"]).startswith(PNG)


async def test_usage_is_told(kernel: Kernel, place: Place) -> None:
    if place.provider.name == "gvisor" and kernel.name != "ipython":
        pytest.skip("its sockets are not held by the process that computes")
    code = (
        "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nlarge = b'x' * 80_000_000"
    )
    finished = (await run(kernel, code)).finished
    assert 0.2 < finished.cpu_s < 20
    assert finished.peak_memory_mb > 80
    assert kernel.memory_mb() > 80
    await run(kernel, "del large")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ],
    ids=["exit", "kill", "crash"],
)
async def test_a_kernel_that_ends_says_how(own_place: Place, kind: str, code: str, cause: str) -> None:
    async with own_place.open(kind) as kernel:
        with pytest.raises(KernelDied, match=cause):
            await run(kernel, code)
        with pytest.raises(KernelDied):
            await run(kernel, "1")
        with pytest.raises(KernelDied):
            await kernel.complete("a", 1)
        await kernel.interrupt()
        assert kernel.memory_mb() == 0


async def test_a_killed_kernel_ends_its_cell_and_may_be_killed_and_closed_again(own_place: Place, kind: str) -> None:
    async with own_place.open(kind) as kernel:

        async def on_event(event: Event) -> None:
            if isinstance(event, Stream):
                await kernel.kill()

        with pytest.raises(KernelDied, match="SIGKILL"):
            await run(kernel, "print('started', flush=True)\nwhile True: pass", on_event=on_event)
        await kernel.kill()
        await kernel.aclose()
        await kernel.aclose()


async def test_kernels_side_by_side_know_nothing_of_each_other(own_place: Place, kind: str) -> None:
    async with own_place.open(kind, "left") as left, own_place.open(kind, "right") as right:
        await run(left, "name = 'left'")
        assert (await run(right, "name")).error.name == "NameError"
        assert (await run(left, "name")).result == {"text/plain": "'left'"}


async def _answered(kernel: Kernel, code: str, answer: str | None) -> Outcome:
    async def on_event(event: Event) -> None:
        if isinstance(event, InputRequest):
            await kernel.reply_input(answer)

    return await run(kernel, code, allow_input=True, on_event=on_event)
