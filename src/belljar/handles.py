"""A session as Python code holds it: one interface, whether the engine runs here (`api.py`) or elsewhere (`client/`).

Knows neither of the two. Code that raises is a result; what belljar refuses is raised as the error it names.
"""

import abc
import io
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, Self

import anyio

from belljar.errors import InvalidArgument, UsageError, named_error
from belljar.models import ExecutionResult, FileReference, OutputEvent, Rewinding, SessionFork
from belljar.outputs.forms import PICTURES

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome

OnInput = Callable[[str], Awaitable[str | None]]
"""Gets the prompt of an `input()`, gives the answer; None declines, and `input()` raises EOFError.

Tools that a cell calls may ask too: a yes or no, the text of one field, or a JSON object of several."""


class SessionHandle(Protocol):
    """A session: variables, imports and files stay from cell to cell, until its `async with` block ends."""

    @property
    def id(self) -> str:
        """The session's id."""
        ...

    async def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        on_input: OnInput | None = None,
        filename: str = "",
        idempotency_key: str = "",
    ) -> ExecutionResult:
        """Run a cell to its end. Cells of one session take turns; one whose caller stops waiting goes on.

        Past `timeout_s` it is interrupted, and its variables are kept. `on_input` answers its `input()`. With
        `filename` its code is also kept as a file of the session. Calls with one `idempotency_key` run once.
        """
        ...

    async def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> "ExecutionHandle":
        """Start a cell and return at once; its arguments are those of `execute`. Its `input()` is not answered."""
        ...

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> "OutputStream":
        """Run a cell and give its output while it runs; it starts with the first event asked for."""
        ...

    async def interrupt(self) -> list[str]:
        """Stop what runs or waits, and tell the ids of those executions; variables are kept if the code lets them."""
        ...

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """Write a file into the session's folder."""
        ...

    async def download(self, name: str) -> bytes:
        """Read a file of the session's folder."""
        ...

    async def files(self) -> list[FileReference]:
        """List the files in the session's folder, by name."""
        ...

    async def display(self, uri: str) -> bytes:
        """Return what stands behind the `uri` of a display: a picture, a page."""
        ...

    async def figures(self, result: ExecutionResult) -> list[bytes]:
        """Return the pictures of a result, in order, as the bytes of PNG or JPEG files."""
        ...

    async def images(self, result: ExecutionResult) -> list[Any]:
        """Return the pictures of a result as images of Pillow, which has to be installed here."""
        ...

    async def frame(self, expression: str) -> Any:
        """Return a table of the session as a DataFrame of pandas, which has to be installed on both sides.

        `expression` is a variable, or anything else that pandas makes a table of. It is evaluated in a cell of its own.
        """
        ...

    async def install(self, packages: Sequence[str]) -> "list[InstallOutcome]":
        """Install packages for this session: each one's version, or what kept it away."""
        ...

    @property
    def forked(self) -> SessionFork | None:
        """Return what came along and what did not, if it is a fork of another session."""
        ...

    async def fork(self, *, at: str | int = "", reseed: bool = False) -> "SessionHandle":
        """Fork the session: return one of its own that goes on from this state, or from before execution `at`.

        `at` is an execution's id, or its number counted back from the last one, which is 1. The new session ends with
        the same `async with` block as this one, or when it is closed.
        """
        ...

    async def rewind(self, to: str | int) -> Rewinding:
        """Undo executions, back to before the one with this id, or this many of the last."""
        ...

    async def rename(self, reason: str) -> None:
        """Change what the session is for, by which lists and the console name it; empty for no name."""
        ...

    async def aclose(self) -> None:
        """End the session and delete its files before its block ends; may be called twice."""
        ...


class ExecutionHandle(Protocol):
    """One run of a cell, which goes on whether or not anyone waits for it."""

    @property
    def id(self) -> str:
        """The execution's id, by which a later program or connection finds it again."""
        ...

    async def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """Return its result when it has ended; after `wait_s` seconds what there is, with the status `running`."""
        ...

    def events(self, since: int = 0) -> AsyncIterator[OutputEvent]:
        """Yield its output from after event `since` to its end, also what came before this call."""
        ...

    async def interrupt(self) -> None:
        """Stop it; variables are kept if the code lets them."""
        ...


_TABLE = """
import pandas as _belljar_pandas
_belljar_pandas.DataFrame({expression}).to_json({name!r}, orient="table", date_unit="ns")
del _belljar_pandas
"""


class SessionBase(abc.ABC):
    """What a `SessionHandle` can do by its other methods, wherever its engine is."""

    @abc.abstractmethod
    async def execute(self, code: str, *, timeout_s: float | None = None) -> ExecutionResult:
        """See `SessionHandle`."""

    @abc.abstractmethod
    async def display(self, uri: str) -> bytes:
        """See `SessionHandle`."""

    @abc.abstractmethod
    async def download(self, name: str) -> bytes:
        """See `SessionHandle`."""

    async def figures(self, result: ExecutionResult) -> list[bytes]:
        """See `SessionHandle`."""
        shown = [each for display in result.displays for each in (display, *display.also)[:1]]
        return [await self.display(each.uri) for each in shown if each.mime in PICTURES and each.uri]

    async def images(self, result: ExecutionResult) -> list[Any]:
        """See `SessionHandle`."""
        pillow = _require("PIL.Image", "pillow")
        return [pillow.open(io.BytesIO(content)) for content in await self.figures(result)]

    async def frame(self, expression: str) -> Any:
        """See `SessionHandle`."""
        pandas = _require("pandas", "pandas")
        name = f".belljar-{secrets.token_hex(8)}.json"
        try:
            compile(expression, "expression", "eval")
        except (SyntaxError, ValueError) as error:
            raise InvalidArgument(f"{expression[:120]!r} is no Python expression", hint="Pass a variable") from error
        made = await self.execute(_TABLE.format(expression=f"(\n{expression}\n)", name=name))
        if not made.success:
            raise UsageError(f"no table can be made of {expression[:120]!r}: {made.error}", hint="Pass a DataFrame")
        try:
            # JSON and not a pickle, because what comes out of a session must not be able to run anything here.
            content = await self.download(name)
            return pandas.read_json(io.BytesIO(content), orient="table", precise_float=True)
        except ValueError as error:
            raise UsageError(f"the table of {expression[:120]!r} cannot be read: {error}") from error
        finally:
            await self.execute(f"import os as _belljar_os; _belljar_os.remove({name!r}); del _belljar_os")


def _require(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"{package} is not installed here", hint=f"pip install {package}") from error


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

    @contextmanager
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


def as_list(packages: Sequence[str]) -> list[str]:
    """Return the packages as a list; a single one may be a string, which is not taken for a list of its letters."""
    return [packages] if isinstance(packages, str) else [*packages]


def accepted(result: ExecutionResult) -> ExecutionResult:
    """Return the result of a cell that had its turn; for one that was refused, raise the error that it names."""
    if result.status == "rejected":
        raise named_error(result.error or "the cell was refused")
    return result
