"""Which servers speak the older protocol only: found out once, and kept for the next start.

Servers that were built on an early SDK die of the newer protocol's first request, or never answer it. Finding that out
costs a start and some seconds. What is kept is a digest of the command or the address and when it was seen; it is
forgotten after a week, because servers are updated.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Final, cast

from belljar.toolbox.config import ServerConfig, StdioServer, UnusableServer

log = logging.getLogger(__name__)

_KEPT_S: Final = 7 * 24 * 3600.0
_MOST: Final = 1_000
_MOST_BYTES: Final = 200_000


class Eras:
    """In a file, or in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen = _read(path) if path else {}

    def is_legacy(self, server: ServerConfig) -> bool:
        """Whether it was last seen to speak the older protocol only."""
        return time.time() - self._seen.get(_digest(server), -_KEPT_S) < _KEPT_S

    def learn(self, server: ServerConfig, *, is_legacy: bool) -> None:
        """Keep which it is; what is known already is not written again."""
        if is_legacy == self.is_legacy(server):
            return
        if is_legacy:
            self._seen[_digest(server)] = time.time()
        else:
            self._seen.pop(_digest(server), None)
        if self._path is not None:
            # Other servers of belljar may have learnt something meanwhile: at worst they learn it again.
            newest = dict(sorted(self._seen.items(), key=lambda item: item[1])[-_MOST:])
            _write(self._path, newest)


def _digest(server: ServerConfig) -> str:
    if isinstance(server, UnusableServer):
        return ""
    known = [server.command, *server.arguments] if isinstance(server, StdioServer) else [server.url]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, float]:
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    listed = cast("dict[object, object]", found) if isinstance(found, dict) else {}
    return {str(name): float(seen) for name, seen in listed.items() if isinstance(seen, int | float)}


def _write(path: Path, seen: dict[str, float]) -> None:
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(seen, file)
        draft.replace(path)
    except OSError as error:
        log.warning("which protocol servers speak cannot be kept: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
