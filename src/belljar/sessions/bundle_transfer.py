"""Carries sleeping sessions between this data directory and the store: packed into a bundle, and unpacked from it.

Blocks; call it in a thread. Whether a session may be put or brought is decided in `stored.py`.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from belljar.errors import TooLarge
from belljar.files.fd_walk import remove_tree
from belljar.journal.bundle_records import RowsEntry, rows_of
from belljar.journal.journal import Journal
from belljar.sessions.bundles import (
    BundleRefused,
    Packing,
    compressed,
    compression,
    decompressed,
    unpack,
    unpacking,
)
from belljar.sessions.session_objects import Head, SessionObjects, object_name
from belljar.sessions.store import ObjectMissing
from belljar.settings import MEBIBYTE

MOST_RATIO: Final = 16
"""How much larger than `bundle_mb` a session may be that is packed: so much is made of a bundle at most."""
BRINGING: Final = ".bringing-"
_SEALED_MORE: Final = 1.01


class BundleTransfer:
    """Puts and fetches the bundles of one data directory's sessions, whose folders are in `folder`."""

    def __init__(
        self, objects: SessionObjects, folder: Path, journal: Journal, run: str, bundle_mb: int | None
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._journal = journal
        self._run = run
        self._most_bytes = (bundle_mb or 0) * MEBIBYTE
        """How large a bundle may be; 0 for no limit."""

    def put(self, session_id: str, number: int, before: int, is_wanted: Callable[[], bool]) -> Head:
        """Put a session as it sleeps here; return what is known of the bundle. `Aborted` once somebody wants it.

        `before` is the number of the bundle in the store that it follows, 0 for none.
        """
        most = self._most_bytes
        path, name = self._journal.path, object_name(session_id, number, f"{secrets.token_hex(4)}.bundle")
        head = _head_of(rows_of(path, session_id))
        packing = Packing(
            self._folder / session_id,
            rows_of(path, session_id),
            most * MOST_RATIO if most else 1 << 62,
            is_wanted,
        )
        sealed = self._objects.sealer.seal(name, compressed(packing.chunks()), compression=compression())
        self._objects.store.put(name, _limited(sealed, most))
        self._objects.put_names(session_id, head, before)
        return replace(head, bundle=name, size_bytes=packing.size_bytes)

    def fetch(self, session_id: str, principal: str, number: int, owned: int) -> None:
        """Unpack a bundle into this data directory, in place of what there is of its session."""
        most = self._most_bytes
        head = self._objects.read_head(session_id, number)
        if most and head.size_bytes > most * MOST_RATIO:
            raise TooLarge(
                f"session {session_id} unpacks to {head.size_bytes:,} bytes, and {most * MOST_RATIO:,} are allowed",
                hint="Set bundle_mb as it is at the server that put it",
            )
        entry = RowsEntry(self._journal.path, session_id, principal, self._run)
        try:
            place = self._folder / f"{BRINGING}{self._run}-{session_id}"
            most_sealed = int(most * _SEALED_MORE) + MEBIBYTE if most else 1 << 62
            told, content = self._objects.sealer.open(head.bundle, self._objects.store.read(head.bundle, most_sealed))
            with unpacking(place) as target:
                plain = decompressed(content, str(told.get("compression")), head.size_bytes)
                unpack(plain, target, entry.add)
                if (folder := self._folder / session_id).exists():
                    remove_tree(folder)
                target.rename(folder)
            entry.finish(number, owned)
        except ObjectMissing as error:
            raise BundleRefused(f"bundle {number} of session {session_id} is missing in the store") from error
        finally:
            entry.close()

    def remove_half_brought(self, is_anothers: Callable[[str], bool]) -> None:
        """Remove what servers that were killed had begun to unpack, other than the runs that `is_anothers` names."""
        for path in self._folder.glob(f"{BRINGING}*"):
            run = path.name.removeprefix(BRINGING).rpartition("-")[0]
            if not is_anothers(run):
                remove_tree(path)


def _limited(content: Iterator[bytes], most: int) -> Iterator[bytes]:
    size = 0
    for chunk in content:
        size += len(chunk)
        if most and size > most:
            raise TooLarge(f"its bundle has more than {most:,} bytes")
        yield chunk


def _head_of(rows: Iterator[tuple[str, dict[str, Any]]]) -> Head:
    """Return the head of a session's rows, without its size."""
    ids: dict[str, list[str]] = {"executions": [], "runs": [], "identifiers": [], "keys": []}
    session: dict[str, Any] = {}
    for table, row in rows:
        if table == "sessions":
            session = row
        elif table in ids:
            ids[table].append(row["identifier" if table == "identifiers" else "id"])
        if table == "executions" and row["key"]:
            ids["keys"].append(row["key"])
    return Head(
        principal=session["principal"],
        environment=session["environment"],
        slept_at=session["used_at"],
        end=session["end"],
        variables=tuple(json.loads(session["variables"])),
        unkept=tuple(json.loads(session["unkept"])),
        executions=tuple(ids["executions"]),
        runs=tuple(ids["runs"]),
        identifiers=tuple(ids["identifiers"]),
        keys=tuple(ids["keys"]),
        bundle="",
        size_bytes=0,
    )
