"""Secrets of the host that code may name and never sees: `${secret:NAME}`.

A value comes from the variable `BELLJAR_SECRET_NAME`, or else from the file of the setting `secrets_file`. It is read
when it is needed, so that a change takes effect at once. Knows nothing of who may have it.
"""

import os
import re
import tomllib
from pathlib import Path

from belljar.errors import SettingsError

PREFIX = "BELLJAR_SECRET_"
REFERENCE = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_]{0,63})\}")


class Secrets:
    """The host's secrets: where they come from, and their current values."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._read_at = -1
        self._kept: dict[str, str] = {}

    def check(self) -> None:
        """Raise SettingsError for a file that cannot be read, before anyone needs it."""
        self._from_file()

    def get(self, name: str) -> str | None:
        """Return the value; None where the host has none of that name."""
        return os.environ.get(PREFIX + name) or self._from_file().get(name)

    def _from_file(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            changed_at = self._file.stat().st_mtime_ns
            if changed_at != self._read_at:
                values = tomllib.loads(self._file.read_text("utf-8"))
                self._kept = {name: value for name, value in values.items() if isinstance(value, str)}
                self._read_at = changed_at
        except (OSError, ValueError) as error:
            # Without the error's own text, which may quote a line of the file.
            raise SettingsError(
                f"secrets_file {self._file} cannot be read: {type(error).__name__}",
                hint='Write one NAME = "value" a line, as TOML has it',
            ) from None
        return self._kept
