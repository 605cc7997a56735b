"""The Python API for programs without `async`: the handles of `session_handle.py`, called through a portal.

A portal is an event loop in a thread of its own (anyio's). Every method here calls the one of the same name there and
waits for it; nothing else is done, so that there is one implementation of what sessions do.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from belljar.models import ExecutionResult, FileReference, MappedResult, OutputEvent, Rewinding, SessionFork
from belljar.python.session_handle import ExecutionHandle, OnInput, OutputStream, SessionHandle, SessionOpener
from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome

Answer = Callable[[str], str | None]
"""Gets the prompt of an `input()`, gives the answer; None declines, and `input()` raises EOFError."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@contextmanager
def session(
    environment: str = "",
    settings: Settings | None = None,
    *,
    server: str = "",
    api_key: str | None = None,
    **flags: object,
) -> Generator["SyncSession"]:
    """Open a session, in an engine of its own or on a running server; it and its files are gone when the block ends.

    `server` is the URL of a server's `/mcp`, `api_key` its key. Without it, `flags` are settings, such as
    `memory_mb=512`.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_open_session(environment, settings, server, api_key, flags)) as handle,
    ):
        yield SyncSession(portal, handle)


def map(  # noqa: A001 - people call it as belljar.map
    codes: Iterable[str],
    environment: str = "",
    settings: Settings | None = None,
    *,
    server: str = "",
    api_key: str | None = None,
    keys: Iterable[str] | None = None,
    at_once: int = 16,
    timeout_s: float | None = None,
    in_order: bool = False,
    retry_lost: bool = False,
    **flags: object,
) -> Iterator[MappedResult]:
    """Run each code in a new session of its own, and iterate over the results as they come; see `SessionHandle.map`.

    `server`, `api_key`, `settings` and `flags` are those of `session`.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_open(environment, settings, server, api_key, flags)) as opener,
    ):
        results = opener.map(
            codes,
            environment if server else "",
            keys=keys,
            at_once=at_once,
            timeout_s=timeout_s,
            in_order=in_order,
            retry_lost=retry_lost,
        )
        yield from _iterate(portal, results)


@asynccontextmanager
async def _open_session(
    environment: str, settings: Settings | None, server: str, api_key: str | None, flags: dict[str, object]
) -> AsyncGenerator[SessionHandle]:
    async with (
        _open(environment, settings, server, api_key, flags) as opener,
        opener.open_session(environment if server else "") as handle,
    ):
        yield handle


@asynccontextmanager
async def _open(
    environment: str, settings: Settings | None, server: str, api_key: str | None, flags: dict[str, object]
) -> AsyncGenerator[SessionOpener]:
    """Open an engine of its own, whose usual environment is this one, or connect to a server."""
    # Each way imports what the other never needs.
    if server:
        from belljar.python.remote import connect

        if settings is not None or flags:
            raise TypeError("settings are the server's own: pass none of them together with server")
        async with connect(server, api_key=api_key) as remote:
            yield remote
        return
    from belljar.python.local import open_engine

    if api_key is not None:
        raise TypeError("api_key is the key of a server: pass its URL as server")
    chosen = {"environment": environment} if environment else {}
    async with open_engine(settings, **flags, **chosen) as engine:
        yield engine


class _Caller:
    """Calls coroutines in the portal's thread."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        return self._portal.call(function)


class SyncSession(_Caller):
    """A session: variables, imports and files stay from cell to cell, until its `with` block ends.

    Made by `belljar.session()`. Its methods may be called from any thread.
    """

    def __init__(self, portal: BlockingPortal, handle: SessionHandle) -> None:
        super().__init__(portal)
        self._handle = handle

    @property
    def id(self) -> str:
        """The session's id."""
        return self._handle.id

    def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        on_input: Answer | None = None,
        filename: str = "",
        idempotency_key: str = "",
    ) -> ExecutionResult:
        """Run a cell to its end, and return its result. Code that raises is a result too, with `success` false.

        Past `timeout_s` it is interrupted, and its variables are kept. `on_input` answers its `input()`. With
        `filename` its code is also kept as a file of the session. Calls with one `idempotency_key` run once.
        """
        execute = partial(self._handle.execute, code, timeout_s=timeout_s, on_input=_in_thread(on_input))
        return self._call(partial(execute, filename=filename, idempotency_key=idempotency_key))

    def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> "SyncExecution":
        """Start a cell and return at once; its arguments are those of `execute`. Its `input()` is not answered."""
        submit = partial(self._handle.submit, code, timeout_s=timeout_s)
        submitted = self._call(partial(submit, filename=filename, idempotency_key=idempotency_key))
        return SyncExecution(self._portal, submitted)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: Answer | None = None) -> "SyncStream":
        """Run a cell and give its output while it runs; it starts with the first event asked for."""
        return SyncStream(self._portal, self._handle.stream(code, timeout_s=timeout_s, on_input=_in_thread(on_input)))

    def interrupt(self) -> list[str]:
        """Stop what runs or waits, and return the ids of those executions; called from another thread."""
        return self._call(self._handle.interrupt)

    def upload(self, name: str, content: bytes | str) -> FileReference:
        """Write a file into the session's folder."""
        return self._call(partial(self._handle.upload, name, content))

    def download(self, name: str) -> bytes:
        """Read a file of the session's folder."""
        return self._call(partial(self._handle.download, name))

    def files(self) -> list[FileReference]:
        """Return the files in the session's folder, by name."""
        return self._call(self._handle.files)

    def display(self, uri: str) -> bytes:
        """Return what stands behind the `uri` of a display: a picture, a page."""
        return self._call(partial(self._handle.display, uri))

    def figures(self, result: ExecutionResult) -> list[bytes]:
        """Return the pictures of a result, in order, as the bytes of PNG or JPEG files."""
        return self._call(partial(self._handle.figures, result))

    def images(self, result: ExecutionResult) -> list[Any]:
        """Return the pictures of a result as images of Pillow, which has to be installed here."""
        return self._call(partial(self._handle.images, result))

    def frame(self, expression: str) -> Any:
        """Return a table of the session as a DataFrame of pandas, which has to be installed on both sides."""
        return self._call(partial(self._handle.frame, expression))

    def install(self, packages: Sequence[str]) -> "list[InstallOutcome]":
        """Install packages for this session, and return each one's version, or what kept it away."""
        return self._call(partial(self._handle.install, packages))

    @property
    def forked(self) -> SessionFork | None:
        """Return what came along and what did not, if it is a fork of another session."""
        return self._handle.forked

    @overload
    def fork(self, *, at: str | int = "", reseed: bool = False, count: None = None) -> "SyncSession": ...

    @overload
    def fork(self, *, at: str | int = "", reseed: bool = False, count: int) -> "list[SyncSession]": ...

    def fork(
        self, *, at: str | int = "", reseed: bool = False, count: int | None = None
    ) -> "SyncSession | list[SyncSession]":
        """Return a session of its own that goes on from the state of this one, or from before execution `at`.

        With a `count` return a list of so many, or of as many as there is room for: `forked.unmade` of each says why.
        They end with the same `with` block as this one, or when they are closed.
        """
        forks = self._call(partial(self._handle.fork, at=at, reseed=reseed, count=1 if count is None else count))
        sessions = [SyncSession(self._portal, handle) for handle in forks]
        return sessions[0] if count is None else sessions

    def map(
        self,
        codes: Iterable[str],
        *,
        keys: Iterable[str] | None = None,
        at_once: int = 16,
        timeout_s: float | None = None,
        in_order: bool = False,
        keep: bool = False,
        reseed: bool = False,
        retry_lost: bool = False,
    ) -> Iterator[MappedResult]:
        """Run each code in a fork of its own of this session, as it is now, and iterate over the results as they come.

        See `SessionHandle.map`.
        """
        results = self._handle.map(
            codes,
            keys=keys,
            at_once=at_once,
            timeout_s=timeout_s,
            in_order=in_order,
            keep=keep,
            reseed=reseed,
            retry_lost=retry_lost,
        )
        return _iterate(self._portal, results)

    def rewind(self, to: str | int) -> Rewinding:
        """Undo executions, back to before the one with this id, or this many of the last."""
        return self._call(partial(self._handle.rewind, to))

    def rename(self, reason: str) -> None:
        """Change what the session is for, by which lists and the console name it; empty for no name."""
        self._call(partial(self._handle.rename, reason))

    def close(self) -> None:
        """End the session and delete its files before its block ends; may be called twice."""
        self._call(self._handle.aclose)


class SyncExecution(_Caller):
    """One run of a cell, which goes on whether or not anyone waits for it."""

    def __init__(self, portal: BlockingPortal, handle: ExecutionHandle) -> None:
        super().__init__(portal)
        self._handle = handle

    @property
    def id(self) -> str:
        """The execution's id, by which a later program finds it again at the server."""
        return self._handle.id

    def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """Return its result when it has ended; after `wait_s` seconds what there is, with the status `running`."""
        return self._call(partial(self._handle.wait, wait_s))

    def events(self, since: int = 0) -> Iterator[OutputEvent]:
        """Iterate over its output from after event number `since` to its end, also that of before this call."""
        return _iterate(self._portal, self._handle.events(since))

    def interrupt(self) -> None:
        """Stop it; variables are kept if the code lets them."""
        self._call(self._handle.interrupt)


class SyncStream(_Caller):
    """What a cell says, event by event, in order and whole; leaving the loop early leaves the cell running."""

    def __init__(self, portal: BlockingPortal, stream: OutputStream) -> None:
        super().__init__(portal)
        self._stream = stream
        self._events = _iterate(portal, stream)

    @property
    def result(self) -> ExecutionResult:
        """The result, once the stream has ended."""
        return self._stream.result

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputEvent:
        return next(self._events)


class _Told(Protocol[T_co]):
    """What can be iterated over and left."""

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


def _iterate(portal: BlockingPortal, told: _Told[T]) -> Iterator[T]:
    async def following() -> T | None:
        with suppress(StopAsyncIteration):
            return await told.__anext__()
        return None

    try:
        while (item := portal.call(following)) is not None:
            yield item
    finally:
        with suppress(RuntimeError):  # the portal is closed, and what was open in it
            portal.call(told.aclose)


def _in_thread(answer: Answer | None) -> OnInput | None:
    """Return an answer in a thread, because it may wait for a person."""
    if answer is None:
        return None

    async def ask(prompt: str) -> str | None:
        return await anyio.to_thread.run_sync(answer, prompt, abandon_on_cancel=True)

    return ask
