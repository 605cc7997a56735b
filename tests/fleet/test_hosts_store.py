"""Sessions of machines that are lost, end or come back, where the machines have a store."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hosts import Hosts, asleep_in_the_store, both, in_thread, numbers, two_hosts, until_lost
from workers import KEYS

from belljar.environments import Environment
from waiting import until, until_blocking

pytestmark = pytest.mark.anyio
KEYED = ",".join(f"{name}:{key}" for name, key in KEYS.items())


@pytest.fixture
def hosts(default_environment: Environment, tmp_path: Path) -> Generator[Hosts]:
    (tmp_path / "store").mkdir()
    store = {"BELLJAR_STORE": f"file://{tmp_path}/store", "BELLJAR_STORE_KEY": "s" * 40, "BELLJAR_DRAIN_S": "2"}
    short = {"BELLJAR_SWEEP_INTERVAL_S": "0.2", "BELLJAR_POOL_SIZE": "0"}
    with two_hosts(default_environment, tmp_path, BELLJAR_API_KEYS=KEYED, **store, **short) as pair:
        yield pair


def is_seen_as(hosts: Hosts, state: str) -> None:
    """Wait until the first machine sees the second one so."""
    until_blocking(lambda: hosts.states(1).get(hosts.inner_url(2)) == state)


async def test_what_sleeps_on_a_machine_that_ends_wakes_on_another(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        session_id = await hosts.session_of(two, 2)
        done = await two.execute("kept = 42; kept", session_id)
    async with hosts.client(1, name="ada") as one:
        await in_thread(hosts.stop, 2)
        await in_thread(is_seen_as, hosts, "left")
        found = await until_woken(one, session_id)
        assert "42" in found
        assert (await one.get(done.execution_id)).result == "42"
        await one.execute("kept += 1", session_id)
        await in_thread(hosts.start, 2)
        await in_thread(hosts.see_each_other, 1, 2)
        async with hosts.client(2, name="ada") as two:
            assert (await two.execute("kept", session_id)).result == "43"
    assert (hosts.data_directory(1) / "sessions" / session_id).exists()


async def until_woken(caller: object, session_id: str) -> str:
    """What a call says once the session's machine has put it into the store."""
    from calls import Caller, text_of

    assert isinstance(caller, Caller)

    async def call() -> str:
        answer = await caller.call("execute_code", code="kept", session_id=session_id)
        if answer.is_error:
            assert "busy" in text_of(answer)
            return ""
        return text_of(answer)

    return await until(call)


async def test_a_lost_machines_open_session_is_told_and_then_goes_on_from_its_bundle(hosts: Hosts):
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one, hosts.client(1, name="bob") as bob:
        first = await one.execute("kept", session_id)
        assert first.result == "'old'"
        await one.execute("kept = 'new'", session_id)
        hosts.kill(2)
        hosts.write_list(hosts.inner_url(1), f"{hosts.inner_url(2)} gone")
        await in_thread(is_seen_as, hosts, "lost")
        told = await one.refusal("execute_code", code="open('ran', 'w')", session_id=session_id)
        assert "session-lost" in told
        assert "Nothing was run now" in told
        assert "variables kept" in told
        unknown = session_id[:3] + "q" * 14
        for _ in range(2):
            said = [
                (await bob.refusal("execute_code", code="1", session_id=each)).replace(each, "ID")
                for each in (session_id, unknown)
            ]
            assert said[0] == said[1]
            assert "variables kept" not in said[0]
        again = await one.execute("import os; kept, os.path.exists('ran')", session_id)
        assert (again.result, again.state) == ("('old', False)", "rewound")
        assert (await one.execute("kept = 'here'; kept", session_id)).state == "kept"
        # The machine comes back with its disk: the session stays where it went on.
        hosts.stop(2)
        await in_thread(hosts.start, 2)
        hosts.write_list()
        await in_thread(hosts.see_each_other, 1, 2)
        async with hosts.client(2, name="ada") as two:
            assert (await two.execute("kept", session_id)).result == "'here'"
            assert (await one.execute("kept", session_id)).result == "'here'"
    assert len(numbers(hosts, session_id, "owner")) <= 2


async def test_a_server_that_starts_again_tells_of_a_loss_once_and_goes_on(hosts: Hosts):
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one, hosts.client(2, name="ada") as two:
        assert (await one.execute("kept", session_id)).result == "'old'"
        never_slept = await hosts.session_of(two, 2)
    hosts.kill(2)
    hosts.write_list(hosts.inner_url(1), f"{hosts.inner_url(2)} gone")
    await in_thread(is_seen_as, hosts, "lost")
    await in_thread(hosts.stop, 1)
    await in_thread(hosts.start, 1)
    async with hosts.client(1, name="ada") as one:
        told = await until_lost(one, session_id)
        assert "Nothing was run now" in told
        assert "variables kept" in told
        again = await one.execute("import os; kept, os.path.exists('ran')", session_id)
        assert (again.result, again.state) == ("('old', False)", "rewound")
        told = await one.refusal("execute_code", code="1", session_id=never_slept)
        assert "is lost: it was last heard of at" in told
        assert "session-not-found" in await one.refusal("execute_code", code="1", session_id=never_slept)


async def test_a_machine_that_was_frozen_ends_what_went_on_elsewhere(hosts: Hosts):
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one:
        await one.execute("kept = 'new'", session_id)
        os.kill(hosts.pids[2], signal.SIGSTOP)
        try:
            hosts.write_list(hosts.inner_url(1), f"{hosts.inner_url(2)} gone")
            await in_thread(is_seen_as, hosts, "lost")
            assert "session-lost" in await one.refusal("execute_code", code="kept", session_id=session_id)
            assert (await one.execute("kept", session_id)).result == "'old'"
        finally:
            os.kill(hosts.pids[2], signal.SIGCONT)
        async with hosts.client(2, name="ada") as two:
            assert (await two.execute("kept", session_id)).result == "'old'"
        assert not (hosts.data_directory(2) / "sessions" / session_id).exists()
        assert (hosts.data_directory(1) / "sessions" / session_id).exists()
