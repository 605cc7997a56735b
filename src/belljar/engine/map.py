"""A map: pieces of code, each in a fork of its own of one state or in a new session, a bounded number of them together.

The state is a fork of the session, made once, in which nothing ever runs: the session itself may go on meanwhile, or
end. Places, memory and turns at the processors are given by those who give them to all executions
(`sessions/registry.py`, `executions/admission.py`); this only asks for no more than `at_once`. Which piece ran is known
from the journal, by its key.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any, Final

from belljar.engine.contract import MapOptions
from belljar.errors import BelljarError, Busy
from belljar.executions.cell import Cell
from belljar.executions.execution import Execution
from belljar.executions.outcome import SERVER_STOPPED
from belljar.journal.journal import KILLED, ExecutionRecord
from belljar.models import ExecutionResult, MappedResult
from belljar.sessions.registry import FORKS_AT_ONCE, Registry
from belljar.sessions.session import Session

PATIENCE_S: Final = 30.0
"""How long a map waits for room while it has none at all."""
_LOOK_S: Final = 0.5
_FOREVER_S: Final = 3600.0

log = logging.getLogger(__name__)


class Map:
    """One map for one owner. What must not end with its caller, pieces that have begun, is added to `under_way`."""

    def __init__(
        self,
        registry: Registry,
        owner: str,
        cells: Sequence[tuple[Cell, str]],
        options: MapOptions,
        under_way: "set[asyncio.Task[Any]]",
    ) -> None:
        self._registry = registry
        self._owner = owner
        self._cells = cells
        self._options = options
        self._under_way = under_way
        self._base: Session | None = None
        self._name, self._of = "a map", ""
        self._forking = asyncio.Semaphore(FORKS_AT_ONCE)
        self._open = 0
        """How many of its pieces have a session now."""
        self._room = asyncio.Event()
        """Set when one of them has given its place back."""
        self._is_left = False
        """Whether its caller has gone."""
        self._todo = iter(range(len(cells)))

    async def run(self, session_id: str) -> AsyncGenerator[MappedResult]:
        """Yield the results: as they come, or in order."""
        results: asyncio.Queue[MappedResult | Exception] = asyncio.Queue(self._options.at_once)
        workers: list[asyncio.Task[None]] = []
        try:
            await self._prepare(session_id)
            with self._base.in_use() if self._base is not None else nullcontext():
                at_once = min(self._options.at_once, len(self._cells))
                workers = [asyncio.ensure_future(self._work(results)) for _ in range(at_once)]
                waiting: dict[int, MappedResult] = {}
                following = 0
                for _ in self._cells:
                    result = await results.get()
                    if isinstance(result, Exception):
                        raise result
                    if not self._options.in_order:
                        yield result
                        continue
                    waiting[result.index] = result
                    while following in waiting:
                        yield waiting.pop(following)
                        following += 1
        finally:
            self._is_left = True
            # In a task of its own, because whoever cancels a stream may cancel all that it awaits from then on.
            closing = asyncio.ensure_future(self._close(workers))
            self._under_way.add(closing)
            closing.add_done_callback(self._under_way.discard)
            await asyncio.shield(closing)

    async def _close(self, workers: Sequence["asyncio.Task[None]"]) -> None:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        if self._base is not None:
            await self._registry.endings.delete(self._base, "was the state that a map began from")

    async def _prepare(self, session_id: str) -> None:
        """Make room for a first session, and the fork that all pieces begin from."""
        if not session_id:
            await self._registry.make_room(self._owner)
            return
        origin = await self._registry.reach(session_id, self._owner)
        origin.check_forkable("forked")
        origin.queue.check_idle()
        await self._registry.make_room(self._owner, spared=origin)
        self._name, self._of = f"a map of {session_id}", session_id
        self._base = await self._registry.fork_for_map(origin, self._name)
        if self._registry.starter.gpus.of(self._base.id):
            self._forking = asyncio.Semaphore(1)  # what is on a GPU is saved for each fork, to one file

    async def _work(self, results: "asyncio.Queue[MappedResult | Exception]") -> None:
        """Run one piece after the other, until there is none left or the caller has gone."""
        for index in self._todo:
            try:
                begun = await self._begin(index)
                if not isinstance(begun, MappedResult):
                    # It goes on to its end when the caller leaves: its key says that it ran.
                    piece = asyncio.ensure_future(self._finish(index, *begun))
                    self._under_way.add(piece)
                    piece.add_done_callback(self._note_end)
                    begun = await asyncio.shield(piece)
            except Exception as error:  # noqa: BLE001 - it is raised where the results are read
                await results.put(error)
                return
            await results.put(begun)

    def _note_end(self, piece: "asyncio.Task[MappedResult]") -> None:
        self._under_way.discard(piece)
        if not piece.cancelled() and (failure := piece.exception()) is not None and self._is_left:
            log.error("a piece of a map failed, whose caller had gone", exc_info=failure)

    # One piece

    async def _begin(self, index: int) -> MappedResult | tuple[Session, Execution]:
        """Submit a piece in a session of its own; return its result if it ran before, or why it cannot run."""
        cell, key = self._cells[index]
        executions = self._registry.executions
        try:
            async with executions.turn_to_submit(key, self._owner) if key else nullcontext():
                unused, known = self._look_up(cell, key) if key else ("", None)
                if known is None:
                    session = await self._open_session(index)
                    try:
                        return session, session.submit(cell, unused)
                    except BaseException:
                        await self._end(session)
                        raise
            return await self._told(index, known)
        except Busy:
            raise
        except BelljarError as error:
            return MappedResult.rejected(f"{error.code}: {error}", index, key)

    def _look_up(self, cell: Cell, key: str) -> tuple[str, ExecutionRecord | None]:
        """Return the execution of a piece that ran before; without one, the key for one that runs now.

        Each run of a piece that is run again has a key of its own.
        """
        executions, journal = self._registry.executions, self._registry.journal
        for number in count(1):
            name = key if number == 1 else f"{key}~{number}"
            known = executions.submitted(name, cell.code, self._owner)
            record = journal.find(known) if known is not None else None
            if known is not None and (record is None or record.result is None) and self._live(known) is None:
                self._registry.recover_others()
                record = journal.find(known)
            if record is None:
                return name, None
            if self._live(record.id) is not None or record.result is None:
                return name, record
            if record.has_begun and not (self._options.retries_lost and _is_lost(record.result)):
                return name, record
        raise AssertionError("numbers do not end")

    def _live(self, execution_id: str) -> Execution | None:
        return self._registry.executions.find(execution_id, self._owner)

    async def _told(self, index: int, record: ExecutionRecord) -> MappedResult:
        """Return the result of a piece that ran before, or runs now for somebody else."""
        key = self._cells[index][1]
        live = self._live(record.id)
        if live is not None:
            await _end_of(live)
            return MappedResult.of(live.result(), index, key)
        if record.result is None:
            raise Busy("another server is at work on this piece", hint="Make the same call again")
        return MappedResult.of(record.result, index, key)

    async def _open_session(self, index: int) -> Session:
        """Open the session of a piece; wait while there is no room for it, but not for ever if none could be opened."""
        options, reason = self._options, f"piece {index + 1} of {self._name}"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._room.clear()
            try:
                if options.keeps:
                    await self._registry.make_room(self._owner)  # those that are kept may sleep
                if self._base is None:
                    session = self._registry.create(
                        self._owner, environment=options.environment, reason=reason, is_piece=not options.keeps
                    )
                else:
                    async with self._forking:
                        session = await self._registry.fork_for_map(
                            self._base,
                            reason,
                            is_frozen=True,
                            kept_as_of=self._of if options.keeps else "",
                            reseed=options.reseed,
                        )
            except Busy:
                if self._open:
                    deadline = time.monotonic() + PATIENCE_S
                elif time.monotonic() > deadline:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._room.wait()
            else:
                self._open += 1
                return session

    async def _finish(self, index: int, session: Session, execution: Execution) -> MappedResult:
        try:
            await _end_of(execution)
            result = execution.result()
        finally:
            await self._end(session)
        return MappedResult.of(result, index, self._cells[index][1], session.id if self._options.keeps else "")

    async def _end(self, session: Session) -> None:
        try:
            if not self._options.keeps:
                await self._registry.endings.delete(session, "was for one piece of a map")
        finally:
            self._open -= 1
            self._room.set()


async def _end_of(execution: Execution) -> None:
    while not execution.is_finished:
        await execution.wait_for_change(_FOREVER_S)


def _is_lost(result: ExecutionResult) -> bool:
    """Return whether a piece ran when its server ended."""
    cause = result.cause or ""
    return result.state == "lost" and (cause.startswith(KILLED) or cause == SERVER_STOPPED)
