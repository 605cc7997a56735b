"""Remembers in the data directory which machines there were: a server that starts again has to know which are lost."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from belljar.fleet.identity import About
from belljar.fleet.peer import Peer

_FILE: Final = "hosts.json"
_MOST: Final = 1_000
_MOST_BYTES: Final = 8 * 1024 * 1024

log = logging.getLogger(__name__)


class KnownHost(BaseModel, frozen=True):
    """A server of another machine, as it was when this one ran last."""

    url: str = Field(max_length=300)
    name: str = Field(default="", max_length=300)
    """That its certificate has to be for, if not its address."""
    about: About
    silent_since: float | None = None
    """When it was heard last, in seconds since the epoch, if it was lost or had left; None for others."""
    has_left: bool = False

    def restore(self, peer: Peer) -> Peer:
        """Have a server that was not heard yet be what it was: whether it is there now is found out at once."""
        peer.about, peer.misses, peer.has_left = self.about, 1, self.has_left
        if self.silent_since is not None:
            peer.heard_at -= max(0.0, time.time() - self.silent_since)
        return peer


_LIST: Final = TypeAdapter(list[KnownHost])


class KnownHosts:
    """The file of one data directory."""

    def __init__(self, data_directory: Path) -> None:
        self._path = data_directory / _FILE

    def read(self) -> list[KnownHost]:
        """Return what was known; nothing where that cannot be read."""
        try:
            with self._path.open("rb") as file:
                return _LIST.validate_json(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            log.warning("which machines there were cannot be read in %s: %s", self._path, error)
            return []

    def write(self, peers: Iterable[Peer]) -> None:
        """Keep those that were ever heard, of many the latest."""
        latest = sorted(peers, key=lambda peer: -peer.heard_at)[:_MOST]
        known = [
            KnownHost(
                url=str(peer.place),
                name=peer.tls_name,
                about=peer.about,
                silent_since=time.time() - peer.silent_s if peer.state in ("lost", "left") else None,
                has_left=peer.has_left,
            )
            for peer in latest
            if peer.about is not None and not peer.refusal
        ]
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(_LIST.dump_json(known))
            new.replace(self._path)
        except OSError as error:
            log.warning("which machines there are cannot be kept in %s: %s", self._path, error.strerror)
