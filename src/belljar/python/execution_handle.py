"""An execution as Python code holds it: its output, its result and its questions; with `async`, and without.

Without, a portal (anyio's: an event loop in a thread of its own) runs the methods of a handle, and its caller waits.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar

import anyio

from belljar.engine.contract import MAX_WAIT_S, Access, Engine
from belljar.engine.models import ClientQuestion, ExecutionProgress
from belljar.errors import UsageError, named_error
from belljar.models import ExecutionResult, OutputEvent
from belljar.questions.schema import typed_prompt, values_of
from belljar.settings.keys import LOCAL_PRINCIPAL

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal  # takes 30 ms, which programs with `async` save

OnInput = Callable[[str], Awaitable[str | None]]
"""Gets the prompt of an `input()`, gives the answer; None declines, and `input()` raises EOFError.

Tools that a cell calls may ask too: a yes or no, the text of one field, or a JSON object of several."""
Answer = Callable[[str], str | None]
"""The same without `async`."""
CALLER: Final = Access(LOCAL_PRINCIPAL, via="client")
"""Who asks an engine of this process; a server knows its callers by their keys."""
_EVENTS_AT_ONCE: Final = 100
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
H = TypeVar("H")


class ExecutionHandle:
    """One run of a cell, which goes on whether or not anyone waits for it. Nobody answers its questions."""

    def __init__(self, engine: Engine, execution_id: str) -> None:
        self._engine = engine
        self._id = execution_id

    @property
    def id(self) -> str:
        """The execution's id, by which a later program or connection finds it again."""
        return self._id

    async def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """Return its result when it has ended; after `wait_s` seconds what there is, with the status `running`."""
        deadline = anyio.current_time() + (float("inf") if wait_s is None else wait_s)
        nobody, asked = Asker(None), 0
        while True:
            left = max(0.0, deadline - anyio.current_time())
            progress = await self._engine.wait(CALLER, self._id, asked=asked, wait_s=min(left, MAX_WAIT_S))
            if progress.result is not None:
                return accepted(progress.result)
            asked = await answer_question(self._engine, self._id, progress, nobody)
            if left <= 0:
                return accepted(await self._engine.result(CALLER, self._id))

    def events(self, since: int = 0) -> AsyncGenerator[OutputEvent]:
        """Yield its output from after event `since` to its end, also what came before this call."""
        return output_of(self._engine, self._id, since, Asker(None))

    async def interrupt(self) -> None:
        """Stop it; variables are kept if the code lets them."""
        await self._engine.interrupt(CALLER, execution_id=self._id)


async def output_of(engine: Engine, execution_id: str, since: int, asker: "Asker") -> AsyncGenerator[OutputEvent]:
    """Yield the output of an execution after event `since` to its end, and answer its questions meanwhile."""
    asked = 0
    while True:
        # Read before the events, so that output which comes in between is found in the next round.
        progress = await engine.wait(CALLER, execution_id, since=since, asked=asked)
        has_more = True
        while has_more:
            events, has_more = await engine.output(CALLER, execution_id, since, _EVENTS_AT_ONCE)
            for event in events:
                since = event.sequence
                yield event
        if progress.result is not None:
            return
        asked = await answer_question(engine, execution_id, progress, asker)  # behind what it printed before it asked


async def answer_question(engine: Engine, execution_id: str, progress: ExecutionProgress | None, asker: "Asker") -> int:
    """Answer the question of an execution, if it has one; return its number, to wait for a later one."""
    question: ClientQuestion | None = progress.question if progress is not None else None
    if question is None:
        return 0
    values = None
    try:
        values = values_of(question.fields, await asker.ask(typed_prompt(question.message, question.fields)))
    finally:
        # Also where the caller's function fails, because the cell would wait for an answer that never comes.
        await engine.reply(
            CALLER, execution_id, question.number, "decline" if values is None else "accept", values or {}
        )
    return question.number


class OutputStream:
    """What a cell says, event by event, in order and whole. A slow reader loses nothing: it reads from the journal.

    Leaving the loop early leaves the cell running; `SessionHandle.interrupt` stops it.
    """

    def __init__(self, source: AsyncGenerator[OutputEvent | ExecutionResult]) -> None:
        self._source = source
        self._result: ExecutionResult | None = None

    @property
    def result(self) -> ExecutionResult:
        """The result, once the stream has ended."""
        if self._result is None:
            raise UsageError("the stream has not ended and has no result yet", hint="Iterate over it to its end first")
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputEvent:
        item = await anext(self._source)
        if isinstance(item, ExecutionResult):
            self._result = item
            await self._source.aclose()
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Stop reading."""
        await self._source.aclose()


class Asker:
    """Puts the questions of one cell to its caller, until an interrupt withdraws them."""

    def __init__(self, on_input: OnInput | None) -> None:
        self._on_input = on_input
        self._scope = anyio.CancelScope()

    async def ask(self, prompt: str) -> str | None:
        """Return the answer; None when there is nobody to give it, or no need for it any more."""
        if self._on_input is None or self._scope.cancel_called:
            return None
        with anyio.CancelScope() as self._scope:
            return await self._on_input(prompt)
        return None

    def withdraw(self) -> None:
        """Withdraw the current question and all later ones, because the cell is being stopped."""
        self._scope.cancel()


class Askers:
    """The askers of a session's cells that run or wait."""

    def __init__(self) -> None:
        self._askers: set[Asker] = set()

    @contextlib.contextmanager
    def of_cell(self, on_input: OnInput | None) -> Generator[Asker]:
        """Yield an asker for the time that a cell is followed."""
        asker = Asker(on_input)
        self._askers.add(asker)
        try:
            yield asker
        finally:
            self._askers.discard(asker)

    def withdraw(self) -> None:
        """Withdraw the questions of all cells, because every cell of the session is being stopped."""
        for asker in self._askers:
            asker.withdraw()


def accepted(result: ExecutionResult) -> ExecutionResult:
    """Return the result of a cell that had its turn; for one that was refused, raise the error that it names."""
    if result.status == "rejected":
        raise named_error(result.error or "the cell was refused")
    return result


# Without `async`


class Blocking(Generic[H]):
    """What has the methods of a handle without `async`. They may be called from any thread."""

    def __init__(self, portal: "BlockingPortal", handle: H) -> None:
        self.portal = portal
        self.handle = handle


def waited(method: Callable[Concatenate[H, P], Awaitable[T]]) -> Callable[Concatenate[Blocking[H], P], T]:
    """Return the method of a handle without `async`: it has the portal call that one, and waits for it."""

    @wraps(method)
    def call(self: Blocking[H], /, *given: P.args, **named: P.kwargs) -> T:
        return self.portal.call(partial(method, self.handle, *given, **named))

    return call


class _Told(Protocol[T_co]):
    """What can be iterated over and left."""

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


def iterate(portal: "BlockingPortal", told: _Told[T]) -> Iterator[T]:
    """Iterate over what a handle tells; leaving the loop early leaves it."""

    async def following() -> T | None:
        with contextlib.suppress(StopAsyncIteration):
            return await told.__anext__()
        return None

    try:
        while (item := portal.call(following)) is not None:
            yield item
    finally:
        with contextlib.suppress(RuntimeError):  # the portal is closed, and what was open in it
            portal.call(told.aclose)


def iterated(method: Callable[Concatenate[H, P], _Told[T]]) -> Callable[Concatenate[Blocking[H], P], Iterator[T]]:
    """Return the method of a handle without `async`, as an iterator over what that one tells."""

    @wraps(method)
    def call(self: Blocking[H], /, *given: P.args, **named: P.kwargs) -> Iterator[T]:
        return iterate(self.portal, method(self.handle, *given, **named))

    return call


class SyncExecution(Blocking[ExecutionHandle]):
    """One run of a cell, which goes on whether or not anyone waits for it."""

    wait = waited(ExecutionHandle.wait)
    interrupt = waited(ExecutionHandle.interrupt)
    events = iterated(ExecutionHandle.events)

    @property
    def id(self) -> str:
        """The execution's id, by which a later program finds it again at the server."""
        return self.handle.id


class SyncStream(Blocking[OutputStream]):
    """What a cell says, event by event, in order and whole; leaving the loop early leaves the cell running."""

    def __init__(self, portal: "BlockingPortal", stream: OutputStream) -> None:
        super().__init__(portal, stream)
        self._events = iterate(portal, stream)

    @property
    def result(self) -> ExecutionResult:
        """The result, once the stream has ended."""
        return self.handle.result

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputEvent:
        return next(self._events)


def in_thread(answer: Answer | None) -> OnInput | None:
    """Return an answer in a thread, because it may wait for a person."""
    if answer is None:
        return None

    async def ask(prompt: str) -> str | None:
        from anyio import to_thread

        return await to_thread.run_sync(answer, prompt, abandon_on_cancel=True)

    return ask
