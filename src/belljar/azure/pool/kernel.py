"""A session of an Azure pool behind our contract: one cell is one execution of the pool, sent once and then asked for.

A cell never runs twice. Where its request had no clear answer, the pool is asked for its `operation-id`. It is sent
again, under the same id, only if the pool does not have it, the session is still the one we know, and the request is
either answered or known by its id when it comes late. Otherwise the result says that it is not known. A pool allocates
a new session under the old identifier without a word, so before and after each cell we look whether it is the one we
know.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from belljar.azure.pool.credentials import open_credential
from belljar.azure.pool.mirror import FolderMirror
from belljar.azure.pool.routes import MAX_STREAM_CHARS, PoolExecution, PoolSession, read_execution
from belljar.azure.pool.transport import Backoff, PoolTransport, Unanswered, refused
from belljar.errors import BelljarError, KernelDied, KernelStartFailed, PoolUnavailable
from belljar.files.workspace import Workspace
from belljar.kernels.base import Completeness, Completion
from belljar.kernels.protocol import plain_text
from belljar.outputs.events import DisplayData, Event, ExecuteResult, Finished, MimeBundle, Raised, Stream
from belljar.outputs.forms import picture_named
from belljar.sandboxes.base import Identity, Incident
from belljar.settings import Settings
from belljar.settings.azure import AZURE, check_pool_names, pool_endpoint

FIRST_POLL_S, LONGEST_POLL_S = 0.03, 1.0
# How long a pool may be out of reach while a cell runs in it, before the cell is given up.
SILENCE_S = 120.0
# How long the pool is asked for a cell whose request had no answer.
DOUBT_S = 15.0
# The pool is given this long to end a cell at the time-out that it was told, before its session is deleted.
OWN_TIMEOUT_S = 2.0
GOODBYE_S = 5.0

IN_DOUBT = (
    "the connection broke while the cell was sent, and the pool does not tell of it, so whether it ran is not known. "
    "Look at the session's variables and files before you run it again"
)
FORGOTTEN = "the pool no longer knows the session"
REPLACED = (
    "the pool had ended the session and ran the cell in a new one, without the variables and files of the old one"
)
STOPPED = (
    "the pool can stop a cell only by ending its session, so the session was deleted, and files that the cell wrote "
    "with it"
)
STILL_RUNS = "the pool could not be told to stop the cell, so it may still run there"

T = TypeVar("T")
log = logging.getLogger(__name__)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*+={0,2}\s*+")
# IPython's tracebacks begin with a line of dashes, Python's own with these words; a syntax error has neither.
_TRACEBACK = re.compile(r"^(?:-{40,}$|Traceback \(most recent call last\)|  File |  Cell In)", re.MULTILINE)
_LAST_LINE = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)


async def start_azure(
    settings: Settings, *, workspace: Path, scratch: Path, identity: Identity | None
) -> "AzureKernel":
    """Have the pool allocate a session, and bring it the files that the session's folder holds."""
    check_pool_names(settings)
    endpoint = pool_endpoint(settings)
    if not endpoint:
        raise KernelStartFailed("no Azure session pool is configured", hint="Set azure_endpoint, or the four names")
    resources = AsyncExitStack()
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            credential = open_credential(settings)
            transport = PoolTransport(endpoint, credential, answer_s=settings.start_timeout_s)
            resources.push_async_callback(transport.aclose)
            session = PoolSession(transport)
            await session.open(settings.start_timeout_s)
            owner = (identity.uid, identity.gid) if identity else None
            mirror = FolderMirror(session, Workspace(workspace, owner), scratch, settings.disk_mb or 0)
            kernel = AzureKernel(session, mirror, resources, await session.identity())
            if notices := await mirror.push():
                log.warning("a session in the Azure pool starts without some files: %d kinds of trouble", len(notices))
            return kernel
    except TimeoutError:
        await resources.aclose()
        raise KernelStartFailed(
            f"the Azure pool had no session ready after {settings.start_timeout_s:g} s",
            hint="Try again; raise start_timeout_s, or the ready sessions of the pool",
        ) from None
    except BaseException:
        await resources.aclose()
        raise


class AzureKernel:
    """One session of the pool. It owns `resources`; `identity` is what the pool tells of the session."""

    def __init__(self, session: PoolSession, mirror: FolderMirror, resources: AsyncExitStack, identity: str) -> None:
        self.name = AZURE
        self._session = session
        self._mirror = mirror
        self._resources = resources
        self._identity = identity
        self._count = 0
        self._timeout_s = 0.0
        self._pool_stops_at: float | None = None
        """When the pool itself ends the running cell; None while no cell runs."""
        self._cell_over = asyncio.Event()
        self._death = ""
        """Why the kernel has ended; empty while it has not."""
        self._is_stopping = False
        """Whether the pool is being told to delete the session; a cell may find it gone before the pool answers."""
        self._ended = asyncio.Event()
        self._is_closed = False

    # Cells

    def limit_cell(self, timeout_s: float) -> None:
        """See `RemoteKernel`."""
        self._timeout_s = timeout_s

    async def execute(
        self, code: str, *, allow_input: bool, on_begin: Callable[[], None] | None = None, wants_value: bool = False
    ) -> AsyncIterator[Event]:
        """See `Kernel`. There is no one to ask in a pool: `input()` fails there; a result has no form of a value."""
        self._check_alive()
        for notice in await self._unless_ended(self._mirror.push()):
            yield Stream("stderr", f"[{notice}]\n")
        if on_begin is not None:
            on_begin()
        self._count += 1
        self._pool_stops_at = asyncio.get_running_loop().time() + self._timeout_s
        self._cell_over.clear()
        try:
            execution = await self._unless_ended(self._run(code))
        finally:
            self._pool_stops_at = None
            self._cell_over.set()
        if execution is None:
            yield Raised("PoolConnectionLost", IN_DOUBT, [])
            yield Finished(is_ok=False, execution_count=self._count)
            return
        for event in output_events(execution):
            yield event
        for notice in await self._unless_ended(self._bring_back()):
            yield Stream("stderr", f"[{notice}]\n")
        yield Finished(execution.is_ok, self._count)

    async def _run(self, code: str) -> PoolExecution | None:
        """Run a cell once; return None where it cannot be found out whether it ran."""
        operation_id = secrets.token_hex(16)
        backoff = Backoff()
        while True:
            least_s = 0.0
            try:
                answer = await self._session.submit(operation_id, code, self._timeout_s)
                if answer.is_ok:
                    sent = read_execution(answer)
                    return sent if sent.is_over else await self._follow(operation_id)
                if not answer.is_transient:
                    raise refused(answer)
                # Gateways answer with these two when they lost the way to the session, which may have the request.
                is_on_its_way = answer.status in (502, 504)
                least_s, failure = answer.retry_after_s, refused(answer)
            except Unanswered as unanswered:
                is_on_its_way = unanswered.was_sent
                failure = PoolUnavailable(f"the Azure pool does not answer: {unanswered.reason}")
                if not unanswered.was_sent:
                    await self._pause_or_raise(backoff, failure)
                    continue
            if self._session.is_old:  # it knows no operation-id that could be asked for
                return None
            try:
                found = await self._find(operation_id)
            except PoolUnavailable:
                return None
            if found is not None:
                return found if found.is_over else await self._follow(operation_id)
            if is_on_its_way and not self._session.deduplicates_cells:
                return None
            await self._pause_or_raise(backoff, failure, least_s)

    @staticmethod
    async def _pause_or_raise(backoff: Backoff, failure: PoolUnavailable, least_s: float = 0.0) -> None:
        if backoff.is_over():
            raise failure
        await backoff.pause(least_s)

    async def _find(self, operation_id: str) -> PoolExecution | None:
        """Return the execution if the pool has it; None if it has not, and the session is still the one we know."""
        if (found := await self._session.execution(operation_id, DOUBT_S)) is not None:
            return found
        # An execution is forgotten together with its session, and may have run before.
        await self._check_identity(f"{FORGOTTEN}; whether the cell had run is not known")
        return None

    async def _follow(self, operation_id: str) -> PoolExecution:
        """Ask for an execution that the pool has until it is over."""
        pause_s = FIRST_POLL_S
        while True:
            try:
                found = await self._session.execution(operation_id, SILENCE_S)
            except PoolUnavailable as failure:
                raise self._die(f"{failure.message}; whether the cell has ended is not known") from failure
            if found is None:
                await self._check_identity(f"{FORGOTTEN}; it ended while the cell ran")
                raise self._die("the pool no longer knows the execution; whether the cell has ended is not known")
            if found.is_over:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)

    async def _bring_back(self) -> list[str]:
        """Bring the files that the cell changed; return notices. Raises `KernelDied` if the session was replaced."""
        with contextlib.suppress(PoolUnavailable):  # it is looked for again before the next cell
            await self._check_identity(REPLACED, gone=f"{FORGOTTEN}; it ended right after the cell")
        try:
            return await self._mirror.pull()
        except BelljarError as failure:
            return [f"files that the cell changed are brought with the next cell: {failure.message}"]

    # Whether it is there

    async def look(self) -> str:
        """See `RemoteKernel`."""
        if not self._death:
            with contextlib.suppress(KernelDied):
                await self._check_identity(f"{FORGOTTEN}: it had not been used for long, or the pool ended it")
        return self._death

    async def _check_identity(self, fact: str, gone: str = "") -> None:
        """Raise `KernelDied` with the fact if the session is no longer the one we know, or is `gone`."""
        identity = await self._session.identity()
        if identity != self._identity:
            raise self._die(fact if identity or not gone else gone)

    def is_alive(self) -> bool:
        """See `Kernel`. Only what is known already: `look` asks the pool."""
        return not self._death

    def _check_alive(self) -> None:
        if self._death:
            raise KernelDied(self._death)

    def _die(self, fact: str) -> KernelDied:
        self._death = self._death or (STOPPED if self._is_stopping else fact)
        self._ended.set()
        return KernelDied(self._death)

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """Do the work, but stop when the kernel is ended meanwhile."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._check_alive()
            return await task
        finally:
            for each in (task, ended):
                each.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    # Ending

    async def interrupt(self) -> None:
        """Delete the session, because a pool can stop a cell in no other way, unless its time-out there is now."""
        stops_at, loop = self._pool_stops_at, asyncio.get_running_loop()
        if stops_at is not None and loop.time() >= stops_at - 0.5:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OWN_TIMEOUT_S):
                    await self._cell_over.wait()
                    return
        # A pool that cannot be reached is told again by `kill`.
        with contextlib.suppress(BelljarError):
            await self._delete()

    async def kill(self) -> None:
        """See `Kernel`."""
        if self._death:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._delete()
        except (BelljarError, TimeoutError):
            self._die(STILL_RUNS)

    async def _delete(self) -> None:
        self._is_stopping = True
        try:
            await self._session.delete(GOODBYE_S)
            self._die(STOPPED)
        finally:
            self._is_stopping = False

    async def aclose(self) -> None:
        """End the session in the pool, where it would cost until it expires; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(BelljarError, TimeoutError):
            # Also where it was deleted to stop a cell: a request that was on its way then may have made it anew.
            async with asyncio.timeout(GOODBYE_S):
                await self._session.delete(GOODBYE_S)
        self._die("the session was closed")
        await self._resources.aclose()

    # What a pool does not have

    async def reply_input(self, text: str | None) -> None:
        """See `Kernel`. A pool asks nothing, so there is nothing to answer."""

    async def complete(self, code: str, cursor: int) -> Completion:
        """See `Kernel`. A pool completes no names."""
        return Completion(start=cursor, end=cursor)

    async def inspect(self, code: str, cursor: int, *, detail: int = 0) -> MimeBundle:
        """See `Kernel`. A pool describes no names."""
        return {}

    async def check_complete(self, code: str) -> Completeness:
        """See `Kernel`."""
        return Completeness()

    def incidents(self) -> list[Incident]:
        """Return none, because the limits of a pool are its own."""
        return []

    def memory_mb(self) -> float:
        """Return 0, because a pool does not tell."""
        return 0.0

    def cpu_s(self) -> float:
        """Return 0, because a pool does not tell."""
        return 0.0


def output_events(execution: PoolExecution) -> Iterator[Event]:
    """Yield the output of an execution that is over."""
    output = execution.output
    stdout, stderr = (plain_text(output.stdout), plain_text(output.stderr)) if output else ("", "")
    if stdout:
        yield Stream("stdout", stdout)
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if len(text) >= MAX_STREAM_CHARS:
            yield Stream("stderr", f"[{name} is longer than what the pool sends of it: {len(text):,} characters]\n")
    if execution.is_ok:
        if stderr:
            yield Stream("stderr", stderr)
        if output is not None:
            yield from _result(output.result)
        return
    said, raised = _raised(stderr, execution.error)
    if said:
        yield Stream("stderr", said)
    yield raised


def _result(value: JsonValue) -> Iterator[Event]:
    match value:
        case None | "":  # "" is how pools say that there is no value
            return
        case {"type": "image", "format": str(form), "base64_data": str(data)}:
            kind = picture_named(form)
            if kind and _BASE64.fullmatch(data):
                yield DisplayData({kind: data})
            else:
                yield ExecuteResult({"text/plain": f"<an image of the form {form[:20]!r}>"})
        case str():
            # Text stands for a string as well as for the printed form of any other value; the pool does not say which.
            yield ExecuteResult({"text/plain": plain_text(value)})
        case _:
            yield ExecuteResult({"text/plain": repr(value)})


def _raised(stderr: str, error: JsonValue) -> tuple[str, Raised]:
    """Return what the cell wrote to stderr, and the exception that the text after it or the pool's error tells of."""
    code, message = _pool_error(error)
    found = _TRACEBACK.search(stderr)
    lines = stderr[found.start() :].rstrip("\n").splitlines() if found else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    if not found:
        # No traceback: the whole text may be one line like "NameError: name 'x' is not defined".
        last = stderr.strip().rpartition("\n")[2]
        lines = [last] if last else []
    named = _LAST_LINE.fullmatch(last.strip())
    if named is not None and (named["message"] is not None or found):
        said = stderr[: found.start()] if found else stderr[: stderr.rindex(last)]
        return said, Raised(named["name"].rpartition(".")[2], named["message"] or "", lines)
    return stderr, Raised(code or "ExecutionFailed", message or last.strip() or "the pool says no more", lines)


def _pool_error(error: JsonValue) -> tuple[str, str]:
    match error:
        case {"error": {"code": str(code), "message": str(message)}} | {"code": str(code), "message": str(message)}:
            return re.sub(r"\W", "", code)[:100], plain_text(message)[:2_000]
        case None:
            return "", ""
        case _:
            return "", json.dumps(error)[:2_000]
