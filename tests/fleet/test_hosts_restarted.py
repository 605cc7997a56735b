"""Machines whose servers forget, or hear less than others do: what was lost there is still told once, and goes on."""

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from calls import text_of
from hosts import Hosts, asleep_in_the_store, in_thread, until_lost
from workers import KEYS

from belljar.environments import Environment
from waiting import until_blocking

pytestmark = pytest.mark.anyio


@pytest.fixture
def hosts(default_environment: Environment, tmp_path: Path) -> Generator[Hosts]:
    (tmp_path / "store").mkdir()
    store = {"BELLJAR_STORE": f"file://{tmp_path}/store", "BELLJAR_STORE_KEY": "s" * 40, "BELLJAR_DRAIN_S": "2"}
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    made = Hosts(default_environment, tmp_path, BELLJAR_API_KEYS=keys, BELLJAR_POOL_SIZE="0", **store)
    try:
        yield made
    finally:
        made.close()


async def test_a_server_on_a_new_disk_gives_up_a_machine_that_nobody_has_seen(hosts: Hosts):
    await in_thread(hosts.start, 1)
    await in_thread(hosts.start, 2)
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one:
        assert (await one.execute("kept", session_id)).result == "'old'"
    hosts.kill(2)
    await in_thread(hosts.stop, 1)
    hosts.write_list(hosts.inner_url(1))
    await in_thread(shutil.rmtree, hosts.data_directory(1))
    await in_thread(hosts.start, 1)
    async with hosts.client(1, name="ada") as one:
        assert "variables kept" in await until_lost(one, session_id)
        again = await one.execute("import os; kept, os.path.exists('ran')", session_id)
        assert (again.result, again.state) == ("('old', False)", "rewound")


async def test_a_machine_that_one_other_hears_is_not_given_up(hosts: Hosts):
    hosts.link(1, 2, 3)
    for number in (1, 2, 3):
        await in_thread(hosts.start, number)
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one, hosts.client(3, name="ada") as three:
        assert (await one.execute("kept", session_id)).result == "'old'"
        hosts.links[1, 2].cut(is_dark=False)
        hosts.write_list_of(1, 2)
        await in_thread(until_blocking, lambda: hosts.states(1)[hosts.url_of(2, 1)] == "lost")
        for _ in range(2):
            # Told to come again, or passed on by the third machine.
            said = text_of(await one.call("execute_code", code="kept", session_id=session_id))
            assert "busy" in said or "'old'" in said
            assert "rewound" not in said
        assert (await three.execute("kept", session_id)).state == "kept"


async def test_a_machine_that_others_do_not_hear_asks_the_store_before_it_answers(hosts: Hosts):
    hosts.link(1, 2)
    for number in (1, 2):
        await in_thread(hosts.start, number)
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one, hosts.client(2, name="ada") as two:
        assert (await two.execute("kept", session_id)).result == "'old'"
        await two.execute("kept = 'new'", session_id)
        hosts.links[1, 2].cut(is_dark=False)  # the second machine still hears the first one
        hosts.write_list_of(1, 2)
        await in_thread(until_blocking, lambda: hosts.states(1)[hosts.url_of(2, 1)] == "lost")
        await until_lost(one, session_id)
        assert (await one.execute("kept", session_id)).result == "'old'"
        assert (await two.execute("kept", session_id)).result == "'old'"


async def test_a_machine_that_hears_nobody_and_has_no_store_stops_its_cells_and_ends_what_goes_on_elsewhere(
    hosts: Hosts,
):
    hosts.link(1, 2)
    for number in (1, 2):
        await in_thread(hosts.start, number)
    session_id = await asleep_in_the_store(hosts, 2, "old")
    async with hosts.client(1, name="ada") as one, hosts.client(2, name="ada") as two:
        endless = "import time\nwhile True: time.sleep(0.1)"
        running = await two.execute(endless, session_id, wait_s=0)
        new = await two.execute(endless, wait_s=0)  # nobody else can have this one
        for link in hosts.links.values():
            link.cut(is_dark=True)
        store, away = hosts.folder / "store", hosts.folder / "away"
        store.rename(away)
        stopped = await two.get(running.execution_id, wait_s=50)
        assert stopped.status == "interrupted"
        assert "reaches neither another one nor the store" in str(stopped.cause)
        assert "busy" in await two.refusal("execute_code", code="1", session_id=session_id)
        assert (await two.get(new.execution_id)).status == "running"
        away.rename(store)
        await until_lost(one, session_id)
        assert (await one.execute("kept", session_id)).result == "'old'"
        await in_thread(until_blocking, lambda: not (hosts.data_directory(2) / "sessions" / session_id).exists())
        assert (await two.get(new.execution_id)).status == "running"
