"""What is said of a limit that was hit: the word callers can rely on, the values, and what state survived."""

from collections.abc import Sequence

from belljar.sandboxes.base import Incident

RESUMED = "its server ended while it ran; it went on under the next one"
_SURVIVED = {
    "out_of_memory": "a process of it was killed; the kernel lives, variables are kept",
    "too_many_processes": "starting more was refused; the kernel lives, variables are kept",
    "disk_full": "the kernel lives, variables and files are kept",
}


def survived(incident: Incident) -> str:
    """The kernel is still there."""
    return f"{incident.kind}: the session {incident.detail}; {_SURVIVED[incident.kind]}"


def killed(incident: Incident) -> str:
    """The kernel was killed by it."""
    return f"{incident.kind}: the session {incident.detail}; the kernel was killed, variables are lost, files are kept"


def lethal(incidents: Sequence[Incident], death: str) -> Incident | None:
    """The incident that ended a kernel which died like this: want of memory kills with SIGKILL and nothing else.

    It may also have killed the process that would have told.
    """
    if not death.endswith(("SIGKILL", "process ended")):
        return None
    return next((incident for incident in incidents if incident.kind == "out_of_memory"), None)


def rewound(count: int) -> str:
    """The kernel died, and an earlier state took its place."""
    cells = "this cell" if count == 1 else f"the last {count} cells"
    return f"the kernel died and the session was rewound: variables and files are as they were before {cells}"
