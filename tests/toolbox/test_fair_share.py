"""The event loop's time, divided between owners and between the sessions of each."""

import asyncio
from collections import Counter

import pytest

from belljar.toolbox.fair_share import SAVED_S, SLICE_S, FairShare, FairShares

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _nothing() -> None: ...


async def test_what_one_session_spends_is_missing_to_its_owners_others_and_to_nobody_else():
    paces = FairShares()
    spending, same, other = (FairShare(paces, lambda owner=owner: owner, _nothing) for owner in ("ada", "ada", "bob"))
    spending.spend(SAVED_S / 2)
    assert spending.has_time()
    spending.spend(SAVED_S)
    assert [pace.has_time() for pace in (spending, same, other)] == [False, False, True]


async def test_sessions_of_one_owner_take_turns():
    paces, turns, done = FairShares(), Counter[str](), asyncio.Event()
    flooding: dict[str, FairShare] = {}

    def go_on(name: str) -> None:
        turns[name] += 1
        # As a flood does: whatever there is to be had is taken.
        while flooding[name].has_time():
            flooding[name].spend(2 * SLICE_S)
        if turns.total() >= 60:
            done.set()

    for name in ("a", "b", "c"):
        flooding[name] = FairShare(paces, lambda: "ada", lambda name=name: go_on(name))
    go_on("a")  # what was saved is its own
    turns.clear()
    go_on("b")
    go_on("c")
    async with asyncio.timeout(20):
        await done.wait()
    assert max(turns.values()) - min(turns.values()) <= 1


async def test_a_session_that_becomes_somebodys_is_on_their_account():
    paces, owner = FairShares(), ""
    session = FairShare(paces, lambda: owner, _nothing)
    session.spend(2 * SAVED_S)
    assert not session.has_time()
    owner = "ada"
    assert session.has_time()


async def test_a_session_that_ends_leaves_its_turn_to_the_next():
    paces, rested = FairShares(), asyncio.Event()
    ending, waiting = FairShare(paces, lambda: "ada", _nothing), FairShare(paces, lambda: "ada", rested.set)
    ending.spend(SAVED_S + SLICE_S)
    assert not ending.has_time()
    assert not waiting.has_time()
    ending.close()
    async with asyncio.timeout(20):
        await rested.wait()
    assert waiting.has_time()
