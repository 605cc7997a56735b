"""Sessions of machines that are lost, end or come back, where the machines have a store."""

import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import httpx2
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
    short = {"BELLJAR_SWEEP_INTERVAL_S": "0.2", "BELLJAR_POOL_SIZE": "0", "BELLJAR_SURFACES": "interpreter,foundry"}
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


async def test_what_a_lost_machines_callers_named_is_found_in_the_store(hosts: Hosts):
    keyed = {"code": "import secrets; secrets.token_hex()", "idempotency_key": "once"}
    header = {"authorization": f"Bearer {KEYS['ada']}"}
    count = {"code": "n = globals().get('n', 0) + 1; n", "codeInputType": "Inline", "executionType": "Synchronous"}
    names = [f"name-{number}" for number in range(6)]

    async def counted(client: httpx2.AsyncClient, number: int, name: str) -> str:
        address = f"{hosts.urls[number]}/executions?api-version=2025-10-02-preview&identifier={name}"
        answer = await client.post(address, json=count)
        assert answer.status_code < 300, answer.text
        return str(answer.json()["result"]["executionResult"])

    async with httpx2.AsyncClient(headers=header, timeout=60) as client:
        async with both(hosts, name="ada") as (one, two):
            done = await two.execute("print('said'); 6 * 7", await hosts.session_of(two, 2))
            first = {f"once-{n}": await one.execute(keyed["code"], idempotency_key=f"once-{n}") for n in range(6)}
            for name in names:
                assert await counted(client, 1, name) == "1"
        theirs = {key for key, each in first.items() if is_at(hosts, 2, each.session_id)}
        assert theirs
        await in_thread(hosts.stop, 2)  # everything of its is in the store
        await in_thread(is_seen_as, hosts, "left")
        await in_thread(shutil.rmtree, hosts.data_directory(2))
        async with hosts.client(1, name="ada") as one, hosts.client(1, name="bob") as bob:
            found = await one.get(done.execution_id)
            assert "execution-not-found" in await bob.refusal("get_execution", execution_id=done.execution_id)
            assert (found.result, found.stdout) == ("42", "said\n")
            for key in theirs:
                again = await one.execute(keyed["code"], idempotency_key=key)
                assert (again.result, again.session_id) == (first[key].result, first[key].session_id)
            key = next(iter(theirs))
            assert (await bob.execute(keyed["code"], idempotency_key=key)).result != first[key].result
            for name in names:
                assert await counted(client, 1, name) == "2"
            listed = [info["session_id"] for info in (await one.fields("list_sessions"))["sessions"]]
            assert len(listed) == len({*listed})


async def test_a_machine_that_drains_puts_its_sessions_into_the_store_and_takes_them_again(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        idle, busy = await hosts.session_of(two, 2), await hosts.session_of(two, 2)
        done = await two.execute("kept = 42; kept", idle)
        running = await two.execute("kept = 43\nimport time\nwhile True: time.sleep(0.1)", busy, wait_s=0)
        tag = hosts.status(2)[0]["tag"]
        said = await in_thread(hosts.command, 1, "fleet", "drain", tag)
        assert (said.returncode, said.stdout) == (0, f"{tag} is draining\n")
        await in_thread(is_seen_as, hosts, "drained")
        assert (await one.get(running.execution_id)).status == "interrupted"
        for session_id, kept in ((idle, "42"), (busy, "43")):
            assert (await two.execute("kept", session_id)).result == kept
            assert is_at(hosts, 1, session_id)
        assert (await two.get(done.execution_id)).result == "42"
        assert is_at(hosts, 1, await two.new_session())
        undone = await in_thread(hosts.command, 1, "fleet", "drain", tag, "--undo")
        assert (undone.returncode, undone.stdout) == (0, f"{tag} is ready\n")
        await in_thread(is_seen_as, hosts, "ready")
        again = await hosts.session_of(two, 2)
        assert (await one.execute("6 * 7", again)).result == "42"
        await in_thread(hosts.stop, 2)
        await in_thread(is_seen_as, hosts, "left")


def is_at(hosts: Hosts, number: int, session_id: str) -> bool:
    return (hosts.data_directory(number) / "sessions" / session_id).exists()


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
