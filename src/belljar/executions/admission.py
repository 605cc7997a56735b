"""Admission: how many sessions are open, how many executions run at once in all of them, how much memory stays free.

Executions of one principal start in the order they were submitted. Between principals the slots go round, so that a
principal who submits a thousand cells delays another by one of them, and cannot fill the queue for the others.
"""

import asyncio
import resource
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from belljar.errors import MORE_DESCRIPTORS, Busy
from belljar.settings import Settings

_BASE_DESCRIPTORS = 16
_SESSION_DESCRIPTORS = 20
"""Without its checkpoints, each of which takes one or two more."""


def descriptor_limit() -> int | None:
    """Return how many files, sockets and pipes this process may have open; None where there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def most_sessions(settings: Settings) -> int:
    """Return how many sessions may be open: `max_sessions`, or fewer where there are too few descriptors for them.

    A quarter of all is for connections of clients, and each session that waits in the pool takes as much as one in use.
    """
    limit = descriptor_limit()
    if limit is None:
        return settings.max_sessions
    each = _SESSION_DESCRIPTORS + 2 * settings.checkpoints
    within = (limit - _BASE_DESCRIPTORS - limit // 4) // each - settings.pool_size
    return max(1, min(settings.max_sessions, within))


class Admission:
    """The bounds on running and waiting executions; one instance for the whole engine."""

    def __init__(self, *, most_running: int, most_waiting: int, headroom_mb: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._headroom_mb = headroom_mb
        self.running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Return how many executions wait for a slot although their session is free."""
        return sum(map(len, self._waiting.values()))

    def waits_for(self, principal: str) -> str:
        """Return, in words, what the next execution of a principal waits for; empty if there is a slot."""
        if principal not in self._waiting:
            return ""
        return f"one of the server's {self._most_running} places for cells that run at once, which are all taken"

    def check_queue(self, principal: str) -> None:
        """Refuse another execution while too many wait, unless the principal has less than its equal share of them."""
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
        """Hold a slot for the principal while one of its cells runs."""
        if self.running >= self._most_running or principal in self._waiting:
            await self._wait(principal)
        else:
            self.running += 1
        try:
            yield
        finally:
            self._pass_slot_on()

    async def _wait(self, principal: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_slot_on()
            else:
                self._stop_waiting(principal, turn)
            raise

    def _stop_waiting(self, principal: str, turn: "asyncio.Future[None]") -> None:
        if (queue := self._waiting.get(principal)) is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[principal]

    def _pass_slot_on(self) -> None:
        """Give the slot to the principal that has waited longest since its last one."""
        while self._waiting:
            principal, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[principal] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


class SessionRoom:
    """Who may open a session more. `owners` returns the principal of each session that is open."""

    def __init__(self, settings: Settings, admission: Admission, owners: Callable[[], Collection[str]]) -> None:
        self._settings = settings
        self._admission = admission
        self._owners = owners
        self._expected: Counter[str] = Counter()
        self.is_closed = False
        """Set when the server is being stopped."""

    @property
    def _most_per_owner(self) -> int:
        most, share = most_sessions(self._settings), self._settings.owner_share
        return most if self._settings.only_owner else max(1, int(most * share))

    def _count(self) -> int:
        """Return how many sessions are open or being forked."""
        return len(self._owners()) + self._expected.total()

    def giver(self, principal: str) -> str | None:
        """Return who has to give up a session so that the principal can open one more; None where nobody has to."""
        if self._count() < self._most_per_owner:
            return None  # without a look at all owners
        counts = Counter(self._owners()) + self._expected
        if counts[principal] >= self._most_per_owner:
            return principal
        if self._count() < most_sessions(self._settings):
            return None
        largest = max(counts, key=lambda owner: (counts[owner], owner == principal))
        return largest if counts[largest] > counts[principal] + 1 else principal

    @contextmanager
    def expecting(self, principal: str) -> Generator[None]:
        """Keep the place of a session that the block opens later, after it has awaited something."""
        self.check(principal)
        self._expected[principal] += 1
        try:
            yield
        finally:
            self._expected[principal] -= 1
            self._expected += Counter()  # removes those that are zero

    def check(self, principal: str) -> None:
        """Refuse another session where there is no room; whoever asks opens it before it awaits anything."""
        if self.is_closed:
            raise Busy(
                "this server is being stopped and takes no new sessions",
                hint="Make the same call again in 10 seconds: the server that takes its place answers it",
            )
        own = [*self._owners()].count(principal) + self._expected[principal]
        most, count = most_sessions(self._settings), self._count()
        if own >= self._most_per_owner and count < most:
            raise Busy(
                f"{own} of your sessions are open and none of them can be put to sleep; owner_share of max_sessions "
                f"allows {self._most_per_owner} for each owner",
                hint="Wait for one to finish, stop it with interrupt_execution, or clear one with clear_session",
            )
        if count >= most:
            hint = "Clear one with clear_session, or try" if own else "They are others': try"
            hint = f"{hint} again when an idle one has expired"
            if most < self._settings.max_sessions:
                raise Busy(
                    f"{count} sessions are open, the most that the server's {descriptor_limit()} file "
                    "descriptors are enough for",
                    hint=f"{hint}; {MORE_DESCRIPTORS}",
                )
            raise Busy(f"{most} sessions are open, the most that max_sessions allows", hint=hint)
        self._admission.check_memory()


def free_memory_mb() -> int | None:
    """Return the memory that is available without swapping; None where `/proc/meminfo` does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    except (OSError, ValueError):
        return None
    return None
