import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from belljar.file_lock import open_lock

pytestmark = pytest.mark.anyio


async def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    is_waiting = anyio.Event()

    async def second() -> None:
        async with open_lock(tmp_path / "lock", on_wait=is_waiting.set):
            order.append("second")

    async with anyio.create_task_group() as tasks, open_lock(tmp_path / "lock"):
        tasks.start_soon(second)
        await is_waiting.wait()
        order.append("first")

    assert order == ["first", "second"]


async def test_a_child_with_the_descriptor_holds_the_lock_on(tmp_path: Path) -> None:
    async with open_lock(tmp_path / "lock") as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,), text=True
        )
    states: list[int | None] = []

    def end_child() -> None:
        states.append(child.poll())
        child.communicate("\n")

    async with open_lock(tmp_path / "lock", on_wait=end_child):
        assert states == [None]


async def test_waiting_can_be_cancelled(tmp_path: Path) -> None:
    async with open_lock(tmp_path / "lock"):
        with anyio.CancelScope() as scope:
            async with open_lock(tmp_path / "lock", on_wait=scope.cancel):
                pytest.fail("the lock was held twice")

    assert scope.cancelled_caught
