"""What a sandbox is made with, and where it stands: whose it is, and how deep below the server's namespaces."""

from pathlib import Path
from typing import NamedTuple

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.child import StartChild, start_own_child
from belljar.sandboxes.namespace.branches import branch_footing
from belljar.sandboxes.namespace.last_will import OF_THIS_SERVER, LastWill
from belljar.sandboxes.namespace.sealing import Seal

MOST_LEVELS = 32
"""Of user namespaces, which are nested deeper than pid namespaces here."""


class Tools(NamedTuple):
    """What sandboxes are made with."""

    bubblewrap: Path
    seal: Seal
    start: StartChild = start_own_child
    will: LastWill | None = OF_THIS_SERVER
    """None where another process sees to what the server leaves."""


class Place(NamedTuple):
    """What a sandbox is to those that are branched from it."""

    user: Identity
    """Whom its code is, as numbered inside."""
    stage: int = -1
    """Root's view of the host's files, for bubblewrap to start in; negative where the server is an ordinary user."""
    levels: int = 0
    """How many user namespaces it is away from the server's."""


def branch_place(origin: Place, identity: Identity | None) -> Place:
    """Of a branch: whose it is, and how deep."""
    user = identity or origin.user
    footing = branch_footing(user, origin.user)
    if (levels := origin.levels + footing.levels) > MOST_LEVELS:
        raise SandboxUnavailable(
            f"The branch would be {levels} user namespaces deep, Linux nests {MOST_LEVELS}",
            hint="Branch from an earlier one, or from the trunk",
        )
    return Place(user, origin.stage, levels)
