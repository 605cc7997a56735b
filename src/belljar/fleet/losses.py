"""What callers are told of sessions whose machine is lost, before anything runs in their place.

A call that names what was on a lost machine is refused once, with what may still happen there; only then is it answered
as a call for what no server has. Nobody knows here which sessions there were, so unknown ids, and those of other
callers, are answered in the same way.
"""

import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Final

from belljar.fleet.peers import Peers
from belljar.fleet.relay import SessionLost

_MOST_TOLD: Final = 10_000


class Losses:
    """Who has been told of what."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._told: OrderedDict[tuple[str, str, float], None] = OrderedDict()

    def tell(self, principal: str, id_: str, server: str) -> None:
        """Raise `SessionLost` for the first call of this caller's that names this since the machine was lost."""
        if self._peers.state_of(server) != "lost":
            return  # it has left in order, and nothing was open there
        since = self._peers.lost_since.get(server, time.time())
        told = (principal, id_, since)
        if told in self._told:
            return
        self._told[told] = None
        if len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)
        at = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        raise SessionLost(
            f"the machine of {id_} is lost: it was last heard of at {at}, and what ran there may have run on since",
            hint="Nothing was run now. Call again to go on with what is left of the session, if anything is; if the "
            "machine comes back, so does the session",
        )
