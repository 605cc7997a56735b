"""`belljar map`: a file of many pieces of code, each run in a fork of one session or in a new one; a file of results.

Each result is a line, written when its piece has ended. A command that was killed is started again with the same
arguments: what has a line is not asked for, and what ran is told by its key. The keys begin with a name of the map that
is drawn when it is first started, and kept beside the results until all of them are there.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import stat
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast

import typer

from belljar.cli.progress import progress_bar
from belljar.engine.contract import MAX_FORKS, MAX_PIECES, Access, Engine, MapOptions
from belljar.engine.many import servers_of
from belljar.engine.models import Piece
from belljar.errors import InvalidArgument
from belljar.models import MappedResult
from belljar.settings import Settings, load_command_settings
from belljar.settings.keys import LOCAL_PRINCIPAL

_NAME: Final = re.compile(r"[a-z0-9]{16}")
_KEY: Final = re.compile(r"([a-z0-9]{16})-([0-9]{1,9})-([0-9a-f]{8})")
_MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_REQUEST_BYTES: Final = 8 * 1024 * 1024
INTERRUPTED: Final = 130


def command(
    file: Annotated[Path, typer.Argument(help='Lines of JSON: {"code": "…"}, or the code alone as a string.')],
    out: Annotated[Path, typer.Option(help="File for the results, a line of JSON each; it is gone on with.")],
    session: Annotated[
        str, typer.Option(help="Fork this live session of a running server; without it, each has a new session.")
    ] = "",
    environment: Annotated[str, typer.Option(help="Environment of new sessions.")] = "",
    at_once: Annotated[int, typer.Option(min=1, max=MAX_FORKS, help="How many run together at most.")] = 16,
    timeout: Annotated[float | None, typer.Option(help="Interrupt each after this many seconds.")] = None,
    retry_lost: Annotated[
        bool, typer.Option("--retry-lost", help="Run again what ran when its server ended, and may have had effects.")
    ] = False,
    data_directory: Annotated[Path | None, typer.Option(help="Data directory of the servers.")] = None,
) -> None:
    """Run many pieces of code, each in a fork of one session or a new session, and write a line for each result.

    Started again with the same arguments it goes on where it was; no piece runs twice. Exits with 1 if a piece could
    not be run; one that fails when it runs has a result like others.
    """
    settings = load_command_settings({"data_directory": data_directory})
    codes = _read_codes(file)
    with _opened_results(out, file, codes) as results:
        left = results.left(retry_lost=retry_lost)
        print(f"{len(codes) - len(left)} of {len(codes)} have their results in {out}", file=sys.stderr)
        options = MapOptions(environment, at_once, timeout, retries_lost=retry_lost)
        try:
            asyncio.run(_map(settings, session, results, left, options))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("hint: the same command goes on where this one was", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        refused = results.finish()
    for index, reason in refused[:10]:
        print(f"piece {index} did not run: {reason}", file=sys.stderr)
    if refused:
        print(f"hint: {len(refused)} did not run; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)


async def _map(
    settings: Settings,
    session_id: str,
    results: "_Results",
    left: Sequence[int],
    options: MapOptions,
) -> None:
    asking = asyncio.current_task()
    if asking is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
    if not left:
        return
    with progress_bar(len(left)) as tell:
        async with _open_engine(settings, session_id) as (engine, access):
            for part in _parts(left, results.codes):
                pieces = [Piece(code=results.codes[index], key=results.key(index)) for index in part]
                told = engine.map(access, pieces, session_id, options)
                async with aclosing(told) as mapped:
                    async for result in mapped:
                        results.write(result, part[result.index])
                        tell(result.status)


def _parts(left: Sequence[int], codes: Sequence[str]) -> Generator[list[int]]:
    """Yield what fits into one request each."""
    part: list[int] = []
    size = 0
    for index in left:
        size += len(codes[index])
        if part and (len(part) >= MAX_PIECES or size > _REQUEST_BYTES):
            yield part
            part, size = [], len(codes[index])
        part.append(index)
    yield part


@asynccontextmanager
async def _open_engine(settings: Settings, session_id: str) -> AsyncGenerator[tuple[Engine, Access]]:
    """Open what has the session; without one, an engine of this process."""
    if session_id:
        yield servers_of(settings.data_directory), Access(LOCAL_PRINCIPAL, is_operator=True, via="terminal")
        return
    from belljar.http.server_socket import open_reachable_runtime

    # What runs ends with this process, and the sessions are nobody's afterwards.
    async with open_reachable_runtime(settings.model_copy(update={"keep_alive": False})) as runtime:
        yield runtime.late_engine.get(), Access(LOCAL_PRINCIPAL, via="terminal")


# The pieces


def _read_codes(file: Path) -> list[str]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
    codes: list[str] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number} of {file} is no JSON: {error}") from error
        code: Any = cast("dict[str, Any]", value).get("code") if isinstance(value, dict) else value
        if not isinstance(code, str):
            raise InvalidArgument(f"line {number} of {file} has no code", hint='Write {"code": "…"} or a string')
        codes.append(code)
    if not codes:
        raise InvalidArgument(f"{file} has no pieces", hint='Write a line {"code": "…"} for each')
    return codes


# The results


@dataclass(slots=True)
class _Line:
    """The latest result of one piece, as far as going on needs it."""

    status: str
    is_lost: bool
    reason: str

    @property
    def has_run(self) -> bool:
        return self.status != "rejected"


class _Results:
    """The file of results, open for this command alone, and the name of the map that it belongs to."""

    def __init__(self, file: BinaryIO, path: Path, codes: list[str]) -> None:
        self.codes = codes
        self._file = file
        self._note = path.with_name(f"{path.name}.map")
        self._name = ""
        self._lines: dict[int, _Line] = {}

    def read(self, path: Path, source: Path) -> None:
        """Read what there is, without a last line that was not finished."""
        self._file.seek(0)
        end = 0
        while line := self._file.readline(_MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            self._read_line(line, path, source)
        self._file.truncate(end)
        self._file.seek(end)
        self._name = self._name or self._noted()

    def _read_line(self, line: bytes, path: Path, source: Path) -> None:
        try:
            told: Any = json.loads(line)
            key = _KEY.fullmatch(told["key"])
            status, is_lost = str(told["status"]), told.get("state") == "lost"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            key, told, status, is_lost = None, {}, "", False
        if key is None:
            raise InvalidArgument(f"{path} has lines that are no results of a map", hint="Choose another --out")
        index = int(key[2])
        if self._name not in ("", key[1]) or index >= len(self.codes) or key[3] != _digest(self.codes[index]):
            raise InvalidArgument(
                f"{path} has the results of other pieces than those in {source}", hint="Choose another --out"
            )
        self._name = key[1]
        self._lines[index] = _Line(status, is_lost, str(told.get("error") or ""))

    def _noted(self) -> str:
        """Return the name that was drawn when the map was first started, or draw it now."""
        try:
            note = os.open(self._note, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"{self._note} cannot be opened: {error.strerror}", hint="It may be a link; remove it"
            ) from error
        _check_regular(note, self._note)
        with os.fdopen(note, "r+b") as opened:
            known = opened.read(64).decode("ascii", "replace").strip()
            if _NAME.fullmatch(known):
                return known
            name = secrets.token_hex(8)
            opened.seek(0)
            opened.truncate()
            opened.write(f"{name}\n".encode())
            opened.flush()
            os.fsync(opened.fileno())
            return name

    def left(self, *, retry_lost: bool) -> list[int]:
        """Return the pieces that have no result yet."""
        done = {index for index, line in self._lines.items() if line.has_run and not (retry_lost and line.is_lost)}
        return [index for index in range(len(self.codes)) if index not in done]

    def key(self, index: int) -> str:
        """Return the key of a piece."""
        return f"{self._name}-{index}-{_digest(self.codes[index])}"

    def write(self, result: MappedResult, index: int) -> None:
        """Add a line."""
        told = result.model_copy(update={"index": index, "key": self.key(index)})
        line = told.model_dump_json(exclude_defaults=True, exclude={"sequence", "session_info"})
        self._file.write(f"{line}\n".encode(errors="replace"))
        self._file.flush()
        self._lines[index] = _Line(result.status, result.state == "lost", result.error or "")

    def finish(self) -> list[tuple[int, str]]:
        """Return what could not be run, and why; where all has run, remove what was needed to go on."""
        os.fsync(self._file.fileno())
        refused = [(index, line.reason) for index, line in sorted(self._lines.items()) if not line.has_run]
        if not refused and len(self._lines) == len(self.codes):
            self._note.unlink(missing_ok=True)
        return refused


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode(errors="surrogatepass")).hexdigest()[:8]


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"{path} is no regular file", hint="Remove it, or choose another --out")


@contextmanager
def _opened_results(path: Path, source: Path, codes: list[str]) -> Generator[_Results]:
    try:
        # What sessions leave in a folder may be a link to a file of the person's own.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        is_link = path.is_symlink()
        why = "is a link" if is_link else f"cannot be written: {error.strerror}"
        raise InvalidArgument(f"{path} {why}", hint="Choose another --out") from error
    _check_regular(descriptor, path)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidArgument(f"another `belljar map` writes {path} now", hint="Wait until it has ended") from error
        results = _Results(file, path, codes)
        results.read(path, source)
        yield results
