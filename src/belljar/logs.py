"""The log: lines on stderr, as text or as JSON, with the ids of what they are about and nothing of what callers send.

Our own lines are written with that in mind. Those of libraries are not: of them only warnings and errors are shown,
without the texts they were given, and of an exception its type and where it was raised, but not its text. Libraries
log a line for each malformed request that anyone sends, so only a few lines a minute of each kind are shown.
"""

import hashlib
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Final, Literal, TextIO

from belljar import tracing

Format = Literal["text", "json"]

ID_FIELDS: Final = ("session_id", "execution_id", "principal")
_OURS: Final = "belljar"
_WITHHELD: Final = "…"
_PRINCIPAL_CHARACTERS: Final = 12
_MAX_A_MINUTE: Final = 5
"""Lines that are shown from one place in a library's code."""
_MAX_CHARACTERS: Final = 300
"""Characters that are shown of a library's line, because some have a header of a request in them."""
_MAX_PLACES: Final = 1_000
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""The levels and the numbers that syslog has for them."""
# Control characters, Unicode's line ends, and what reverses the direction of text.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_DIRECTIVE: Final = re.compile(r"%(?:\((?P<name>\w+)\))?[-#0 +]*+(?:\*|\d++)?(?:\.(?:\*|\d++))?[a-zA-Z%]")

_current: ContextVar[dict[str, str] | None] = ContextVar("belljar_log_ids", default=None)


def configure(level: str, form: Format, stream: TextIO | None = None, *, worker: int = 0) -> None:
    """Log to stderr from here on, as the worker of that number if it is one; called once in a process."""
    chosen = stream or sys.stderr
    handler = logging.StreamHandler(chosen)
    handler.addFilter(_is_for_the_log)
    handler.addFilter(_Repetitions())
    formatter = JsonLines(worker) if form == "json" else TextLines(worker)
    handler.setFormatter(WithPriorities(formatter) if is_read_by_systemd(chosen) else formatter)
    logging.basicConfig(level=level, handlers=[handler])


def bind(*, principal: str = "", **ids: str) -> None:
    """Add these ids to every line from here on, in this task and those it starts."""
    named_ids = {**ids, "principal": pseudonym(principal)} if principal else ids
    _current.set({**(_current.get() or {}), **named_ids})


@contextmanager
def about(*, principal: str = "", **ids: str) -> Generator[None]:
    """Add these ids to the lines that are logged inside the block."""
    before = _current.set(_current.get())
    bind(principal=principal, **ids)
    try:
        yield
    finally:
        _current.reset(before)


@lru_cache(maxsize=1_000)
def pseudonym(principal: str) -> str:
    """Return the name of a principal in logs: always the same, and a hash, because it may be somebody's address."""
    return hashlib.sha256(principal.encode()).hexdigest()[:_PRINCIPAL_CHARACTERS]


def is_read_by_systemd(stream: TextIO) -> bool:
    """Return whether the stream goes to systemd's journal, which says so in a variable of the services it starts."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class WithPriorities(logging.Formatter):
    """Formatter that begins each line of another one with its priority, as systemd's journal reads it."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, each with `<4>` for a warning and so on, as sd-daemon(3) has them."""
        priority = f"<{next(number for level, number in _PRIORITIES if record.levelno >= level)}>"
        return "\n".join(priority + line for line in self._lines.format(record).split("\n"))


class TextLines(logging.Formatter):
    """Formatter of lines for people: level, logger, message; before them which of several servers says so."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._prefix = f"[{worker}] " if worker else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it where an exception was raised."""
        # Control characters are escaped, because a line break in the message could make it look like two lines.
        message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], _message(record))
        line = f"{self._prefix}{record.levelname} {record.name}: {message}"
        return "\n".join([line, *_raised(record)])


class JsonLines(logging.Formatter):
    """Formatter of lines for programs: one JSON object each."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._worker = {"worker": worker} if worker else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; it has `exception` when one was raised."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **self._worker,
            **(_current.get() or {}),
            **{name: getattr(record, name) for name in ID_FIELDS if hasattr(record, name)},
            **tracing.current_ids(),
        }
        if raised := _raised(record):
            fields["exception"] = raised
        return json.dumps(fields, ensure_ascii=False)


def _is_for_the_log(record: logging.LogRecord) -> bool:
    # sse_starlette has every answer in its DEBUG lines, mcp the URIs of files in its INFO ones.
    return _is_ours(record) or record.levelno >= logging.WARNING


class _Repetitions(logging.Filter):
    """Filter that lets a few lines a minute through from each place in libraries, and counts those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if _is_ours(record):
            return True
        key, now = (record.pathname, record.lineno), time.monotonic()
        if key not in self._places and len(self._places) >= _MAX_PLACES:
            self._places.clear()
        place = self._places.setdefault(key, _Place(now))
        if now - place.since >= 60:
            record.repeated = place.count - _MAX_A_MINUTE
            place.since, place.count = now, 0
        place.count += 1
        return place.count <= _MAX_A_MINUTE


class _Place:
    __slots__ = ("count", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == _OURS


def _message(record: logging.LogRecord) -> str:
    if _is_ours(record):
        return record.getMessage()
    # A library's first line says what happened; what follows, and the texts it was given, may come from anyone.
    template = str(record.msg).partition("\n")[0]
    message = _filled(template, record.args) if record.args else template
    repeated = getattr(record, "repeated", 0)
    return message[:_MAX_CHARACTERS] + (f" ({repeated} more like this were left out before)" if repeated > 0 else "")


def _filled(template: str, given: tuple[object, ...] | Mapping[str, object]) -> str:
    """Return the template with the numbers that it was given, and every text withheld."""
    values = iter(given if isinstance(given, tuple) else ())

    def fill(directive: re.Match[str]) -> str:
        if directive[0] == "%%":
            return "%"
        value = next(values, None) if isinstance(given, tuple) else given.get(directive["name"])
        return str(value) if isinstance(value, int | float) else _WITHHELD

    return _DIRECTIVE.sub(fill, template)


def _raised(record: logging.LogRecord) -> list[str]:
    """Return the types of an exception and its causes, and the places they were raised at; never their texts."""
    error = record.exc_info[1] if record.exc_info else None
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = [_described(error), *_places(error.__traceback__), *(["led to:", *lines] if lines else [])]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return lines


def _described(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        return f"{type(error).__name__}: {os.strerror(error.errno)}"
    return type(error).__name__


def _places(raised_at: TracebackType | None) -> list[str]:
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(raised_at)]
