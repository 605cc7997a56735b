"""How long a session may stay."""

import pytest

from belljar.models import iso
from belljar.sessions.session import Lease, idle_time


def test_the_first_caller_is_told_how_long_it_stays_and_nobody_else_is() -> None:
    lease = Lease("a session", idle_s=90, is_in_use=lambda: False)
    notice = lease.notice()
    assert notice is not None
    assert notice.session_id == "a session"
    assert notice.instructions.endswith("It ends after 1.5 idle minutes.")
    sleeper = Lease("a session", idle_s=1800, is_in_use=lambda: False, sleeps=True).notice()
    assert sleeper is not None
    assert sleeper.instructions.endswith("It sleeps after 30 idle minutes and wakes with the next call.")
    assert lease.notice() is None


@pytest.mark.parametrize(
    ("idle_s", "words"),
    [(2, "2 idle seconds"), (60, "1 idle minutes"), (100, "1.7 idle minutes"), (86_400, "1440 idle minutes")],
)
def test_a_time_without_use_is_told_without_a_row_of_decimals(idle_s: float, words: str) -> None:
    assert idle_time(idle_s) == words


def test_a_session_that_is_older_than_its_server_was_told_of() -> None:
    lease = Lease("a session", idle_s=90, is_in_use=lambda: False)
    lease.restore(1_000.0)
    assert (lease.created_at, lease.notice()) == (1_000.0, None)


def test_what_is_in_use_has_all_its_time_left() -> None:
    lease = Lease("a session", idle_s=0, is_in_use=lambda: True)
    assert lease.left_s == 0
    idle = Lease("a session", idle_s=0, is_in_use=lambda: False)
    while idle.left_s == 0:  # until the clock has gone on
        pass
    assert idle.left_s < 0


def test_times_are_told_in_universal_time() -> None:
    assert iso(0.9) == "1970-01-01T00:00:00Z"
