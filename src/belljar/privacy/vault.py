"""Which token stands for which value, in one session. On the host only: nothing of it enters a sandbox.

Knows words and numbers, not what is personal.
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from belljar.privacy.rules import TOKENS

TEXT = "text"
"""The kind of what only looks like a token: kept so that it comes back as it was."""

_WORDS = {**TOKENS, TEXT: "TEXT"}
_KINDS = {word: kind for kind, word in _WORDS.items()}
TOKEN = re.compile(rf"\[({'|'.join(_KINDS)})_([1-9][0-9]{{0,5}})\]")

MOST_VALUES = 100_000
MOST_CHARS = 32 * 1024 * 1024
Value = str | int | float | bool


class Vault:
    """Values and their tokens. The same value has the same token as long as the session lives."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, type, Value], str] = {}
        self._values: dict[str, tuple[str, Value]] = {}
        self._counts: dict[str, int] = {}
        self._chars = 0
        # Answers of tools are hidden in one thread, the output of the cell in another.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def token(self, kind: str, value: Value) -> str:
        """The token of a value. In a full vault it is one without a number, which nothing brings back."""
        # With its type: to Python, 1, 1.0 and True are one key.
        key = (kind, type(value), value)
        with self._lock:
            return self._tokens.get(key) or self._new(key)

    def _new(self, key: tuple[str, type, Value]) -> str:
        kind, _, value = key
        size = len(value) if isinstance(value, str) else 8
        if len(self._values) >= MOST_VALUES or self._chars + size > MOST_CHARS:
            return f"[{_WORDS[kind]}]"
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        token = f"[{_WORDS[kind]}_{number}]"
        self._tokens[key] = token
        self._values[token] = (kind, value)
        self._chars += size
        return token

    def value(self, token: str) -> tuple[str, Value] | None:
        """What a token stands for, with its kind; None for one that was never given out."""
        return self._values.get(token)

    def copy(self) -> "Vault":
        """For a session that goes on from this one's state."""
        other = Vault()
        other._restore(self._values)
        return other

    def save(self, path: Path) -> None:
        """Keep it on disk, for its owner alone."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self._values, file)

    @classmethod
    def load(cls, path: Path) -> "Vault":
        """One that was saved; an empty one where there is none, or none that can be read."""
        vault = cls()
        try:
            kept: Any = json.loads(path.read_text("utf-8"))
            vault._restore({str(token): (kind, value) for token, (kind, value) in kept.items()})
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()
        return vault

    def _restore(self, values: Mapping[str, tuple[str, Value]]) -> None:
        for token, (kind, value) in values.items():
            matched = cast("re.Match[str]", TOKEN.fullmatch(token))
            self._tokens[(kind, type(value), value)] = token
            self._values[token] = (kind, value)
            self._counts[kind] = max(self._counts.get(kind, 0), int(matched.group(2)))
            self._chars += len(value) if isinstance(value, str) else 8
