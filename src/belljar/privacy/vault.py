"""The vault of a session: which token stands for which value, the tokens' numbers, and a log that outlives the server.

On the host only: nothing of it enters a sandbox. Knows text and numbers, not what is personal.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from belljar.files.private import replace_file
from belljar.privacy.rules import TOKENS

# Token numbers: none is used twice in a session, however its server dies. What the tokens of a killed server stood for
# is lost, but files of the session may still have some, and these must not come to stand for other values. So numbers
# are reserved in a file, a thousand ahead. No values are in it.

AHEAD = 1_000
MAX = 999_999
"""The largest number that a token has room for."""

log = logging.getLogger(__name__)


class TokenCounter:
    """The token numbers of a session; with the file of an earlier server they begin after all it may have used."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._reserved: dict[str, int] = _read(path) if path else {}
        self._last = {**self._reserved}

    def next(self, kind: str) -> int | None:
        """Return the next number of a kind; None when all are used."""
        number = self._last.get(kind, 0) + 1
        if number > MAX:
            return None
        self.reach(kind, number)
        return number

    def restart(self) -> None:
        """Start from the beginning, because all used numbers are known and will be passed to `reach`."""
        self._last.clear()

    def reach(self, kind: str, number: int) -> None:
        """Record that a number is used, by this session or by the one that it goes on from."""
        if self._path is not None and number > self._reserved.get(kind, 0):
            self._reserved[kind] = min(number + AHEAD - 1, MAX)
            _write(self._path, self._reserved)
        self._last[kind] = max(self._last.get(kind, 0), number)

    def reached(self) -> dict[str, int]:
        """Return the last number of each kind that may have been used, also where its value is not known any more."""
        return {**self._last}


def _read(path: Path) -> dict[str, int]:
    try:
        kept: Any = json.loads(path.read_text("utf-8"))
        return {str(kind): int(number) for kind, number in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the numbers of tokens cannot be read and begin anew: %s", type(error).__name__)
        return {}


def _write(path: Path, reserved: dict[str, int]) -> None:
    try:
        replace_file(path, json.dumps(reserved))
    except OSError as error:
        log.warning("the numbers of tokens are not kept: %s", error.strerror)


# The token log, which a redactor needs beyond the end of its server: a line for each value, token and secret, in an
# anonymous file in memory (memfd). A supervisor that holds its descriptor meanwhile does not look into it.
# Never on disk, and never inside a sandbox. Knows lines, not what they mean.


Line = list[Any]


class TokenLog:
    """The token log of one session; `descriptor` is that of an earlier server's log, which this object owns now."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-vault")
        self._size = os.fstat(self.descriptor).st_size
        self._lock = threading.Lock()

    def lines(self) -> Iterator[Line]:
        """Yield the lines, without one that a kill has cut in two."""
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            file.seek(0)
            for text in file:
                try:
                    yield json.loads(text)
                except ValueError:
                    continue

    def add(self, line: Line) -> None:
        """Append a line."""
        # Begins with a line end, because a kill may have cut the line before it in two.
        text = f"\n{json.dumps(line)}\n".encode()
        with self._lock:
            if self.descriptor < 0:
                return
            try:
                self._size += os.pwrite(self.descriptor, text, self._size)
            except OSError as error:
                log.warning("what tokens stand for is not kept for the next server: %s", error.strerror)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


TEXT = "text"
"""The kind of text that only looks like a token: stored so that it comes back as it was."""

_TOKEN_NAMES = {**TOKENS, TEXT: "TEXT"}
_KINDS = {name: kind for kind, name in _TOKEN_NAMES.items()}
TOKEN = re.compile(rf"\[({'|'.join(_KINDS)})_([1-9][0-9]{{0,5}})\]")

MAX_VALUES = 100_000
MAX_CHARS = 32 * 1024 * 1024
Value = str | int | float | bool

_VALUE, _LENT, _SECRET, _REACHED = "value", "lent", "secret", "reached"


class Vault:
    """The values of one session and their tokens. The same value has the same token as long as the session lives."""

    def __init__(self, numbers: TokenCounter | None = None) -> None:
        self._tokens: dict[tuple[str, type, Value], str] = {}
        self._values: dict[str, tuple[str, Value]] = {}
        self._numbers = numbers or TokenCounter()
        self._chars = 0
        self.given_out: set[str] = set()
        """Tokens that were sent to a tool as they are: a tool that gives one back means ours."""
        self.secrets: dict[str, str] = {}
        """Secrets of the host that a tool was given, by name; the value is empty where only the name is known."""
        self._token_log: TokenLog | None = None
        # Answers of tools are redacted in one thread, the output of the cell in another.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._values)

    def token(self, kind: str, value: Value) -> str:
        """Return the token of a value. In a full vault it is one without a number, which nothing turns back."""
        # The type is part of the key, because 1, 1.0 and True are the same key to Python.
        key = (kind, type(value), value)
        with self._lock:
            return self._tokens.get(key) or self._new(kind, value)

    def _new(self, kind: str, value: Value) -> str:
        is_full = len(self._values) >= MAX_VALUES or self._chars + _size(value) > MAX_CHARS
        number = None if is_full else self._numbers.next(kind)
        if number is None:
            return f"[{_TOKEN_NAMES[kind]}]"
        token = f"[{_TOKEN_NAMES[kind]}_{number}]"
        self._take([_VALUE, token, kind, value])
        return token

    def value(self, token: str) -> tuple[str, Value] | None:
        """Return what a token stands for, with its kind; None for one that was never made."""
        return self._values.get(token)

    def allow_back(self, token: str) -> None:
        """Record that a token is sent to a tool as it is."""
        with self._lock:
            if token not in self.given_out:
                self._take([_LENT, token])

    def fill(self, name: str, value: str) -> None:
        """Record that a tool is given this secret."""
        with self._lock:
            if self.secrets.get(name) != value:
                self._take([_SECRET, name, value])

    def copy(self, numbers: TokenCounter | None = None) -> "Vault":
        """Return the vault of a session that goes on from this one's state."""
        other = Vault(numbers)
        other._fill(self._lines())
        return other

    # Beyond the end of the server

    def log_to(self, token_log: TokenLog) -> None:
        """Record everything in a log, so far and from now on; what the log has already is loaded."""
        with self._lock:
            earlier = [*token_log.lines()]
            for line in self._lines():
                if not earlier or line[0] != _REACHED:  # the log is more exact than the reserved numbers
                    token_log.add(line)
            if earlier:
                self._fill(earlier)
            self._token_log = token_log

    def save(self, path: Path) -> None:
        """Save the vault to a file that only its owner can read; of secrets nothing but their names."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump([[*line[:2], ""] if line[0] == _SECRET else line for line in self._lines()], file)

    def restore(self, path: Path) -> None:
        """Load what was saved; do nothing where there is no file, or none that can be read."""
        try:
            kept: Any = json.loads(path.read_text("utf-8"))
            # Tried with another vault first, because half of a broken file must not stay.
            Vault()._fill(kept)
        except (OSError, ValueError, TypeError, LookupError):
            return
        with self._lock:
            self._fill(kept)

    def _lines(self) -> list[Line]:
        with self._lock:
            values = [[_VALUE, token, kind, value] for token, (kind, value) in self._values.items()]
            given_out = ([_LENT, token] for token in self.given_out)
            secrets = ([_SECRET, *each] for each in self.secrets.items())
            return [*values, *given_out, *secrets, *([_REACHED, *each] for each in self._numbers.reached().items())]

    def _fill(self, lines: Iterable[Line]) -> None:
        """Load lines, which are all that there are of this session."""
        self._numbers.restart()
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        kind_of_line, name, *rest = line
        if kind_of_line == _VALUE:
            kind, value = rest
            if (matched := TOKEN.fullmatch(name)) is None or kind not in _TOKEN_NAMES:
                raise ValueError("no token")
            self._numbers.reach(kind, int(matched.group(2)))
            self._tokens[(kind, type(value), value)] = name
            self._values[name] = (kind, value)
            self._chars += _size(value)
        elif kind_of_line == _LENT:
            self.given_out.add(name)
        elif kind_of_line == _REACHED:
            self._numbers.reach(name, int(rest[0]))
        else:
            (self.secrets[name],) = rest
        if self._token_log is not None:
            self._token_log.add(line)


def _size(value: Value) -> int:
    return len(value) if isinstance(value, str) else 8
