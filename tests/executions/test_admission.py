import asyncio

import pytest

from belljar.errors import Busy
from belljar.executions import admission
from belljar.executions.admission import Admission
from waiting import until

pytestmark = pytest.mark.anyio


def an_admission(most_running: int = 1, most_waiting: int = 100, headroom_mb: int = 0) -> Admission:
    return Admission(most_running=most_running, most_waiting=most_waiting, headroom_mb=headroom_mb)


class Cells:
    """Cells that run until they are let go, in the order they began."""

    def __init__(self, slots: Admission) -> None:
        self.began: list[str] = []
        self._slots = slots
        self._gates: dict[str, asyncio.Event] = {}

    def submit(self, principal: str, name: str) -> "asyncio.Task[None]":
        self._gates[name] = asyncio.Event()
        return asyncio.create_task(self._run(principal, name))

    async def _run(self, principal: str, name: str) -> None:
        async with self._slots.slot(principal):
            self.began.append(name)
            await self._gates[name].wait()

    async def finish(self, name: str) -> None:
        await until(lambda: name in self.began)
        self._gates[name].set()


async def test_no_more_run_at_once_than_there_are_slots() -> None:
    slots = an_admission(2)
    cells = Cells(slots)
    tasks = [cells.submit("ann", name) for name in ("one", "two", "three")]
    await until(lambda: slots.waiting == 1)
    assert cells.began == ["one", "two"]
    for name in ("two", "three", "one"):
        await cells.finish(name)
    await asyncio.gather(*tasks)
    assert (slots.running, slots.waiting) == (0, 0)


async def test_slots_go_round_between_principals() -> None:
    slots = an_admission()
    cells = Cells(slots)
    tasks = [cells.submit("ann", f"ann {number}") for number in range(4)]
    await until(lambda: slots.waiting == 3)
    tasks += [cells.submit("bob", "bob 0"), cells.submit("bob", "bob 1")]
    await until(lambda: slots.waiting == 5)
    for _ in range(6):
        await cells.finish(cells.began[-1])
        count = len(cells.began)
        if count < 6:
            await until(lambda count=count: len(cells.began) > count)
    await asyncio.gather(*tasks)
    assert cells.began == ["ann 0", "ann 1", "bob 0", "ann 2", "bob 1", "ann 3"]


async def test_who_gives_up_waiting_leaves_no_hole() -> None:
    slots = an_admission()
    cells = Cells(slots)
    tasks = [cells.submit("ann", name) for name in ("one", "two", "three")]
    await until(lambda: slots.waiting == 2)
    tasks[1].cancel()
    await until(lambda: slots.waiting == 1)
    await cells.finish("one")
    await cells.finish("three")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert cells.began == ["one", "three"]
    assert (slots.running, slots.waiting) == (0, 0)


async def test_a_slot_that_comes_as_its_waiter_leaves_goes_to_the_next() -> None:
    slots = an_admission()
    cells = Cells(slots)
    tasks = [cells.submit("ann", name) for name in ("one", "two", "three")]
    await until(lambda: slots.waiting == 2)
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[1].cancel()
    await cells.finish("three")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (slots.running, slots.waiting) == (0, 0)


async def test_a_queue_that_is_too_long_is_refused_with_a_time_to_come_back() -> None:
    slots = an_admission(most_waiting=1)
    cells = Cells(slots)
    tasks = [cells.submit("ann", "one"), cells.submit("ann", "two")]
    await until(lambda: slots.waiting == 1)
    with pytest.raises(Busy, match="1 executions wait for one of 1 slots") as refusal:
        slots.check_queue("ann")
    assert "10 seconds" in refusal.value.hint
    for name in ("one", "two"):
        await cells.finish(name)
    await asyncio.gather(*tasks)
    slots.check_queue("ann")


async def test_who_fills_the_queue_keeps_no_other_principal_out() -> None:
    slots = an_admission(most_waiting=4)
    cells = Cells(slots)
    tasks = [cells.submit("ann", f"ann {number}") for number in range(5)]
    await until(lambda: slots.waiting == 4)
    for number in range(2):
        slots.check_queue("bob")
        tasks.append(cells.submit("bob", f"bob {number}"))
        await until(lambda number=number: slots.waiting == 5 + number)
    slots.check_queue("cid")
    for full in ("ann", "bob"):
        with pytest.raises(Busy, match="6 executions wait"):
            slots.check_queue(full)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_machine_short_of_memory_takes_no_more_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "free_memory_mb", lambda: 100)
    with pytest.raises(Busy, match="100 MB of memory left, memory_headroom_mb keeps 256 free"):
        an_admission(headroom_mb=256).check_memory()
    an_admission(headroom_mb=64).check_memory()
    monkeypatch.setattr(admission, "free_memory_mb", lambda: None)
    an_admission(headroom_mb=256).check_memory()
