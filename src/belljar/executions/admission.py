"""Who may begin: a bound on what runs at once, shared fairly between principals, and on memory that must stay free.

Within one principal first come is first served; between principals the slots go round, so that one who submits a
thousand cells delays another by one of them. Nor can one who fills the line keep another out of it.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from belljar.errors import Busy


class Admission:
    """One for the whole engine."""

    def __init__(self, *, most_running: int, most_waiting: int, headroom_mb: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._headroom_mb = headroom_mb
        self.running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Executions whose session is free, but no slot is."""
        return sum(map(len, self._waiting.values()))

    def check_queue(self, principal: str) -> None:
        """Refuse another execution while too many wait, unless they are others' and the principal has few of them."""
        if self.waiting < self._most_waiting:
            return
        others = self._waiting.keys() - {principal}
        share = max(1, self._most_waiting // (len(others) + 1))
        if len(self._waiting.get(principal, ())) >= share:
            raise Busy(
                f"{self.waiting} executions wait for one of {self._most_running} slots, as many as max_waiting allows",
                hint="Try again in 10 seconds",
            )

    def check_memory(self) -> None:
        """Refuse another kernel while the machine has too little memory left."""
        free_mb = free_memory_mb()
        if free_mb is not None and free_mb < self._headroom_mb:
            raise Busy(
                f"the machine has {free_mb:,} MB of memory left, memory_headroom_mb keeps {self._headroom_mb:,} free",
                hint="Clear sessions that are not needed with clear_session, or try again in 30 seconds",
            )

    @asynccontextmanager
    async def slot(self, principal: str) -> AsyncGenerator[None]:
        """While a cell of theirs runs."""
        if self.running >= self._most_running or principal in self._waiting:
            await self._wait(principal)
        else:
            self.running += 1
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, principal: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._hand_on()
            else:
                self._leave(principal, turn)
            raise

    def _leave(self, principal: str, turn: "asyncio.Future[None]") -> None:
        if (line := self._waiting.get(principal)) is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[principal]

    def _hand_on(self) -> None:
        """The slot goes to the principal that has waited longest since its last one."""
        while self._waiting:
            principal, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[principal] = line
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


def free_memory_mb() -> int | None:
    """What the machine could give without swapping; None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    except (OSError, ValueError):
        return None
    return None
