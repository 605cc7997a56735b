"""Cells that write to the runner's socket what the runner would: what is not due at that point is refused."""

import asyncio
import json
from typing import get_args

import pytest

from belljar.errors import KernelDied
from belljar.kernels.base import Kernel
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.protocol import Message, read_message
from belljar.outputs.events import CommMessage, Event, Finished, InputRequest, Raised
from cells import Place, run
from sandboxes.escape_attempts import FORGER, SPIN
from waiting import until

pytestmark = pytest.mark.anyio

REFUSED = {
    "input": {"prompt": "?", "is_password": False},
    "ready": {"python": "3.11.0"},
    "comms": {"opened": {}},
    "resumed": {"awaits": "input", "prompt": "?"},
    "completion": {"matches": [], "start": 0, "end": 0},
    "inspection": {"data": {}},
    "checked": {"status": "complete", "indent": ""},
    "imported": {"loaded": [], "errors": {}},
    "forked": {"lost": []},
    "rehearsed": {},
    "warm": {"failed": {}, "threads": 1},
    "state": {"kept": [], "lost": [], "size_bytes": 0},
    "variables": {"items": [], "total": 0},
    "rows": {"name": "x", "kind": "", "problem": "missing"},
    "sync": {"id": 1},
    "finished": {"id": 1, "is_ok": True, "execution_count": 1, "cpu_s": 0},
}


OUTPUT = {"display", "clear", "result", "error", "comm"}
"""What a cell may send at any time: it could print the same."""


def test_every_message_of_a_runner_is_output_or_tried_below() -> None:
    for kind, fields in REFUSED.items():
        read_message(json.dumps({"type": kind, **fields}).encode())  # well-formed: refused for its time alone
    kinds = {kind for model in get_args(Message) for kind in get_args(model.model_fields["type"].annotation)}
    assert kinds == {*OUTPUT, *REFUSED}


def forged(type_: str, **fields: object) -> str:
    return f"forge(**json.loads({json.dumps({'type': type_, **fields})!r}))"


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_message_that_is_not_due_ends_the_kernel_that_sent_it(process_place: Place, kind: str) -> None:
    async with process_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="so its process was ended"):
            await run(kernel, FORGER + forged(kind, **REFUSED[kind]) + SPIN)
        with pytest.raises(KernelDied):
            await run(kernel, "1")


async def test_in_no_sandbox_can_a_cell_ask_that_may_not(own_place: Place) -> None:
    async with own_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="asked for input, which this execution does not allow"):
            await run(kernel, FORGER + forged("input", prompt="?", is_password=False) + SPIN)


async def test_a_second_end_of_a_cell_is_none_of_the_next(process_place: Place) -> None:
    end = forged("finished", is_ok=True, execution_count=1, cpu_s=0)
    async with process_place.open("ipython") as kernel:
        # The first is believed, as a thread that outlives its cell could go on as well.
        assert (await run(kernel, f"{FORGER}x = 1\n{end}")).is_ok
        with pytest.raises(KernelDied, match="'finished', which nobody had asked for"):
            await run(kernel, "x")


async def test_an_answer_left_for_the_next_request_is_refused(process_place: Place) -> None:
    """Requests have numbers that nobody can tell beforehand, and until one is made nothing is due."""
    left = "\n".join(
        f"forge(id=runner._execution + {step}, type='state', kept=['x'], lost=[], size_bytes=1)" for step in range(3)
    )
    async with process_place.open("ipython") as kernel:
        assert isinstance(kernel, IPythonKernel)
        # From a thread that waits for the end of the cell: within it each would be refused at once.
        code = f"{FORGER}import threading\ndef leave():\n    while runner._execution: pass\n    runner._execution = 1\n"
        code += "".join(f"    {line}\n" for line in left.splitlines())
        code += "    runner._execution = None; open('left', 'w').close()\nthreading.Thread(target=leave).start()"
        assert (await run(kernel, code)).is_ok
        await until(lambda: (process_place.workspace() / "left").exists())
        with pytest.raises(KernelDied, match="'state', which nobody had asked for"):
            await kernel.save_state("state")


async def test_a_widgets_callback_cannot_ask(process_place: Place) -> None:
    code = (
        f"{FORGER}import comm\n"
        "def opened(comm, message): forge(type='input', prompt='?', is_password=False)\n"
        "comm.get_comm_manager().register_target('asking', opened)"
    )
    async with process_place.open("ipython") as kernel:
        assert isinstance(kernel, IPythonKernel)
        assert (await run(kernel, code, allow_input=True)).is_ok
        with pytest.raises(KernelDied, match="asked for input, which this execution does not allow"):
            async for _ in kernel.deliver_comm(CommMessage("comm_open", "a", {}, "asking")):
                pass


async def test_what_may_be_said_at_any_time_is_only_shown(process_place: Place) -> None:
    code = FORGER + "\n".join(
        [
            forged("display", id=None, data={"text/plain": "nobody's"}),
            forged("display", data={"text/plain": "mine"}, display_id="of another cell", update=True),
            forged("result", id="", data={"text/plain": "nobody's"}),
            forged("error", id=[], name="E", message="nobody's", traceback=[]),
            forged("comm", id=None, kind="comm_msg", comm_id="a", data={}),
            forged("clear", id={}, wait=True),
        ]
    )
    async with process_place.open("ipython") as kernel:
        outcome = await run(kernel, code)
        assert outcome.is_ok
        assert [display.data for display in outcome.displays] == [{"text/plain": "mine"}]
        assert not [event for event in outcome.events if isinstance(event, Raised)]
        assert (await run(kernel, "1")).result == {"text/plain": "1"}


async def test_an_answer_that_came_too_late_is_no_forgery(process_place: Place) -> None:
    async with process_place.open("ipython") as kernel:
        assert isinstance(kernel, IPythonKernel)
        code = (
            "import time\nclass Slow:\n    def __dir__(self):\n        time.sleep(1)\n        return []\nslow = Slow()"
        )
        assert (await run(kernel, code)).is_ok
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await kernel.complete("slow.", 5)
        assert (await run(kernel, "'still here'")).result == {"text/plain": "'still here'"}


async def test_numbers_that_no_kernel_has_are_refused(process_place: Place) -> None:
    end = forged("finished", is_ok=True, execution_count=10**30, cpu_s=0)
    async with process_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="malformed"):
            await run(kernel, FORGER + end + SPIN)


async def test_a_cell_that_may_ask_is_heard(kernel: Kernel) -> None:
    async def answer(event: Event) -> None:
        if isinstance(event, InputRequest):
            await kernel.reply_input("Ada")

    outcome = await run(kernel, "input('Who? ')", allow_input=True, on_event=answer)
    assert outcome.result == {"text/plain": "'Ada'"}
    assert isinstance(outcome.events[-1], Finished)
