"""Which limit ended a kernel, told from how its end looked to the server."""

import pytest

from belljar.executions.outcome import fatal_incident
from belljar.sandboxes.base import Incident

MEMORY = Incident("out_of_memory", "used 200 MB, the limit is 200 MB")
FORKS = Incident("too_many_processes", "wanted more than 20")


@pytest.mark.parametrize(
    ("death", "is_fatal"),
    [
        ("the kernel's process ended with SIGKILL", True),
        ("the kernel's process ended", True),
        ("the cell closed the kernel's connection, so its process was ended", True),
        ("the kernel's process ended with SIGSEGV", False),
        ("the kernel's process ended with exit status 3", False),
    ],
)
def test_only_what_looks_like_a_kill_is_for_lack_of_memory(death: str, is_fatal: bool) -> None:
    assert fatal_incident([FORKS, MEMORY], death) == (MEMORY if is_fatal else None)
    assert fatal_incident([FORKS], death) is None
