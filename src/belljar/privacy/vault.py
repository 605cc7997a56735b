"""Which token stands for which value, in one session. On the host only: nothing of it enters a sandbox.

Knows words and numbers, not what is personal.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from belljar.files.private import write_file
from belljar.privacy.rules import TOKENS

# Numbers for tokens, none of them twice in the life of a session, whatever its server dies of.
# A killed server takes along what its tokens stood for, and files of the session may still have some. A token must
# not come to stand for another value then, so numbers are promised to a file, a thousand ahead. No values are in it.

AHEAD = 1_000
MOST = 999_999
"""The widest number that a token has room for."""

log = logging.getLogger(__name__)


class TokenCounter:
    """One session's; with the file of an earlier server they begin after all that it may have given out."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._promised: dict[str, int] = _read(path) if path else {}
        self._last = {**self._promised}

    def next(self, kind: str) -> int | None:
        """The next one; None when all are given out."""
        number = self._last.get(kind, 0) + 1
        if number > MOST:
            return None
        self.reach(kind, number)
        return number

    def restart(self) -> None:
        """Everything that was given out is known, and will be told of by `reach`."""
        self._last.clear()

    def reach(self, kind: str, number: int) -> None:
        """This one was given out, by this session or by the one that it goes on from."""
        if self._path is not None and number > self._promised.get(kind, 0):
            self._promised[kind] = min(number + AHEAD - 1, MOST)
            _write(self._path, self._promised)
        self._last[kind] = max(self._last.get(kind, 0), number)

    def reached(self) -> dict[str, int]:
        """The last of each kind that may have been given out, also where nobody knows any more for what."""
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


def _write(path: Path, promised: dict[str, int]) -> None:
    draft = path.with_suffix(".new")
    try:
        write_file(draft, json.dumps(promised))
        draft.replace(path)
    except OSError as error:
        log.warning("the numbers of tokens are not kept: %s", error.strerror)


# What a veil must not forget with its server: a line for each value, token and secret, in memory without a name.
# Whoever holds the descriptor beyond the end of the server, a supervisor, holds bytes that it does not look into.
# Never on disk, and never inside a sandbox. Knows lines, not what they mean.


Line = list[Any]


class TokenLog:
    """One session's; `descriptor` is that of an earlier server's, which is its own now."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-vault")
        self._size = os.fstat(self.descriptor).st_size
        self._lock = threading.Lock()

    def lines(self) -> Iterator[Line]:
        """What is in it; a line that a kill has cut in two is none."""
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            file.seek(0)
            for text in file:
                try:
                    yield json.loads(text)
                except ValueError:
                    continue

    def add(self, line: Line) -> None:
        """Keep one more."""
        # Begun with the end of the one before, which a kill may have cut in two.
        text = f"\n{json.dumps(line)}\n".encode()
        with self._lock:
            if self.descriptor < 0:
                return
            try:
                self._size += os.pwrite(self.descriptor, text, self._size)
            except OSError as error:
                log.warning("what tokens stand for is not kept for the next server: %s", error.strerror)

    def close(self) -> None:
        """Let go of it; may be called twice."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


TEXT = "text"
"""The kind of what only looks like a token: kept so that it comes back as it was."""

_WORDS = {**TOKENS, TEXT: "TEXT"}
_KINDS = {word: kind for kind, word in _WORDS.items()}
TOKEN = re.compile(rf"\[({'|'.join(_KINDS)})_([1-9][0-9]{{0,5}})\]")

MOST_VALUES = 100_000
MOST_CHARS = 32 * 1024 * 1024
Value = str | int | float | bool

_VALUE, _LENT, _SECRET, _REACHED = "value", "lent", "secret", "reached"


class Vault:
    """Values and their tokens. The same value has the same token as long as the session lives."""

    def __init__(self, numbers: TokenCounter | None = None) -> None:
        self._tokens: dict[tuple[str, type, Value], str] = {}
        self._values: dict[str, tuple[str, Value]] = {}
        self._numbers = numbers or TokenCounter()
        self._chars = 0
        self.lent: set[str] = set()
        """Tokens that went out as they are: a tool that gives one back means ours."""
        self.secrets: dict[str, str] = {}
        """Secrets of the host's that a tool was given, by name; without a value where only that is known."""
        self._box: TokenLog | None = None
        # Answers of tools are hidden in one thread, the output of the cell in another.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._values)

    def token(self, kind: str, value: Value) -> str:
        """The token of a value. In a full vault it is one without a number, which nothing brings back."""
        # With its type: to Python, 1, 1.0 and True are one key.
        key = (kind, type(value), value)
        with self._lock:
            return self._tokens.get(key) or self._new(kind, value)

    def _new(self, kind: str, value: Value) -> str:
        is_full = len(self._values) >= MOST_VALUES or self._chars + _size(value) > MOST_CHARS
        number = None if is_full else self._numbers.next(kind)
        if number is None:
            return f"[{_WORDS[kind]}]"
        token = f"[{_WORDS[kind]}_{number}]"
        self._take([_VALUE, token, kind, value])
        return token

    def value(self, token: str) -> tuple[str, Value] | None:
        """What a token stands for, with its kind; None for one that was never given out."""
        return self._values.get(token)

    def lend(self, token: str) -> None:
        """It goes out as it is."""
        with self._lock:
            if token not in self.lent:
                self._take([_LENT, token])

    def fill(self, name: str, value: str) -> None:
        """A tool is given this secret."""
        with self._lock:
            if self.secrets.get(name) != value:
                self._take([_SECRET, name, value])

    def copy(self, numbers: TokenCounter | None = None) -> "Vault":
        """For a session that goes on from this one's state."""
        other = Vault(numbers)
        other._fill(self._lines())
        return other

    # Beyond the end of the server

    def keep_in(self, box: TokenLog) -> None:
        """Have everything in a box, from now on and so far; what is in there already is taken back first."""
        with self._lock:
            earlier = [*box.lines()]
            for line in self._lines():
                if not earlier or line[0] != _REACHED:  # the box knows better than a promise does
                    box.add(line)
            if earlier:
                self._fill(earlier)
            self._box = box

    def save(self, path: Path) -> None:
        """Keep it on disk, for its owner alone; of secrets nothing but their names."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump([[*line[:2], ""] if line[0] == _SECRET else line for line in self._lines()], file)

    def restore(self, path: Path) -> None:
        """Take back what was saved; nothing, where there is none or none that can be read."""
        try:
            kept: Any = json.loads(path.read_text("utf-8"))
            # Tried elsewhere first: half of a broken one must not stay.
            Vault()._fill(kept)
        except (OSError, ValueError, TypeError, LookupError):
            return
        with self._lock:
            self._fill(kept)

    def _lines(self) -> list[Line]:
        with self._lock:
            values = [[_VALUE, token, kind, value] for token, (kind, value) in self._values.items()]
            lent, secrets = ([_LENT, token] for token in self.lent), ([_SECRET, *each] for each in self.secrets.items())
            return [*values, *lent, *secrets, *([_REACHED, *each] for each in self._numbers.reached().items())]

    def _fill(self, lines: Iterable[Line]) -> None:
        """These are all that there are of this session's."""
        self._numbers.restart()
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        kind_of_line, name, *rest = line
        if kind_of_line == _VALUE:
            kind, value = rest
            if (matched := TOKEN.fullmatch(name)) is None or kind not in _WORDS:
                raise ValueError("no token")
            self._numbers.reach(kind, int(matched.group(2)))
            self._tokens[(kind, type(value), value)] = name
            self._values[name] = (kind, value)
            self._chars += _size(value)
        elif kind_of_line == _LENT:
            self.lent.add(name)
        elif kind_of_line == _REACHED:
            self._numbers.reach(name, int(rest[0]))
        else:
            (self.secrets[name],) = rest
        if self._box is not None:
            self._box.add(line)


def _size(value: Value) -> int:
    return len(value) if isinstance(value, str) else 8
