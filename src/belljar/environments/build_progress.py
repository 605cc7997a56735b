"""What uv says while it makes an environment, with how much of it is done: packages and megabytes.

uv announces each larger file with its size when it begins to fetch it, and again when it has it. Smaller files are not
announced. This module does not know who reads the lines.
"""

import re
from collections.abc import Callable

_RESOLVED = re.compile(r"Resolved (\d+) packages? in ")
_BEGUN = re.compile(r"Downloading (\S+) \(([\d.]+)(KiB|MiB|GiB)\)")
_FETCHED = re.compile(r"Downloaded (\S+)")
_MEGABYTES = {"KiB": 1024 / 1e6, "MiB": 1024**2 / 1e6, "GiB": 1024**3 / 1e6}


class BuildProgress:
    """Passes uv's lines on to `tell`; the lines about files also say how much of everything has been fetched."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._packages = 0
        self._sizes: dict[str, float] = {}
        self._fetched: set[str] = set()

    def on_line(self, line: str) -> None:
        """Take the next line of uv's."""
        if found := _RESOLVED.match(line):
            self._packages = int(found[1])
        if found := _BEGUN.match(line):
            self._sizes[found[1]] = float(found[2]) * _MEGABYTES[found[3]]
            self._tell(f"fetching {found[1]}, {self._sizes[found[1]]:.0f} MB: {self._summary()}")
        elif (found := _FETCHED.match(line)) and found[1] in self._sizes:
            self._fetched.add(found[1])
            self._tell(f"fetched {found[1]}: {self._summary()}")
        elif line and not line.startswith("Activate with:"):  # advice for shells, which use no such environment
            self._tell(line)

    def _summary(self) -> str:
        done = sum(self._sizes[name] for name in self._fetched)
        packages = f" of {self._packages} packages" if self._packages else ""
        return f"{done:.0f} of {sum(self._sizes.values()):.0f} MB{packages}"
