"""Which of the host's users sessions may be."""

import pytest

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import HostUsers, usable_numbers

WHOLE = "         0          0 4294967295\n"


def test_on_a_host_of_its_own_the_numbers_are_far_from_every_account() -> None:
    assert usable_numbers(WHOLE, WHOLE) == range(0x70000000, 0x7FFFFFFF)


@pytest.mark.parametrize(
    "mapping", ["0 1000 1\n1 100000 65536\n", "0 100000 65536\n"], ids=["a rootless container", "a mapped container"]
)
def test_in_a_container_they_are_the_upper_part_of_what_it_has(mapping: str) -> None:
    numbers = usable_numbers(mapping, mapping)
    assert numbers is not None
    assert (numbers.start > 32_000, numbers.stop) == (True, 60_000)


def test_a_wide_container_has_them_above_the_ones_that_mean_something() -> None:
    assert usable_numbers("0 100000 1000000\n", "0 100000 1000000\n") == range(500_000, 1_000_000)


@pytest.mark.parametrize(
    ("uids", "gids"),
    [("0 1000 1\n", "0 1000 1\n"), (WHOLE, "0 1000 1\n"), ("0 0 1001\n", WHOLE), ("", "")],
    ids=["one user", "one group", "few users", "nothing"],
)
def test_where_there_are_too_few_there_are_none(uids: str, gids: str) -> None:
    assert usable_numbers(uids, gids) is None


def test_each_is_given_out_once_until_it_is_released() -> None:
    identities = HostUsers(range(0x70000000, 0x70000000 + 5))
    taken = [identities.take() for _ in range(5)]
    assert {identity.uid for identity in taken} == set(range(0x70000000, 0x70000000 + 5))
    assert all(identity.uid == identity.gid for identity in taken)
    with pytest.raises(SandboxUnavailable, match="5 of the 5"):
        identities.take()
    identities.release(taken[3])
    identities.release(taken[3])
    assert identities.take() == taken[3]


def test_a_number_with_an_account_is_passed_over() -> None:
    with pytest.raises(SandboxUnavailable):
        HostUsers(range(1)).take()
    assert isinstance(HostUsers(range(0x70000000, 0x7FFFFFFF)).take(), Identity)
