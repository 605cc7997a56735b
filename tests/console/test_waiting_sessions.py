"""A session that waits for a person says so wherever it is shown, with what is asked and where to answer it."""

import re
from collections.abc import AsyncGenerator

import httpx
import pytest
from calls import FORKS
from consoles import Place, events, opened_place

from belljar.engine.contract import Access, SessionFilter
from belljar.engine.many import servers_of
from belljar.environments import Environment
from waiting import until

pytestmark = pytest.mark.anyio

OPERATOR = Access("local", is_operator=True, name="olga")
HOSTILE = "<b>Go on?</b>\u202e"
FIELDS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORM = {
    "name": "release",
    "steps": [{"name": "sure", "type": "form", "config": {"message": HOSTILE, "fields": FIELDS}}],
}


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("waiting")
    async with opened_place(default_environment, folder, ask_in_console="always", workflows="on", **FORKS) as opened:
        yield opened


async def shown_state(browser: httpx.AsyncClient, session_id: str) -> str:
    row = (await browser.get(f"/api/v1/sessions/{session_id}")).json()
    return row["state"]


async def test_a_session_whose_cell_asks_says_waiting_in_the_list_its_header_and_its_title(place: Place) -> None:
    asking = await place.agent.execute(f"input({HOSTILE!r})", wait_s=0)
    remote = servers_of(place.runtime.settings.data_directory)
    async with place.operator() as browser:

        async def waits() -> bool:
            return await shown_state(browser, asking.session_id) == "waiting"

        await until(waits)
        for engine in (place.runtime.late_engine.get(), remote):
            (entry,) = (await engine.sessions(OPERATOR, SessionFilter(state="waiting"))).items
            assert entry.session_id == asking.session_id
            assert entry.asks is not None
            assert entry.asks.question_id == f"{asking.execution_id}-1"
            assert entry.asks.title == "<b>Go on?</b>\ufffd"
            assert (await engine.sessions(OPERATOR, SessionFilter(state="running"))).items == []
        link = f'href="/console/inbox/{asking.execution_id}-1"'
        listed = (await browser.get("/console?state=waiting")).text
        page = (await browser.get(f"/console/sessions/{asking.session_id}")).text
        for text in (listed, page):
            assert link in text
            assert "&lt;b&gt;Go on?&lt;/b&gt;" in text
            assert "state-waiting" in text
        assert re.search(r"<title>\(1\) Waiting: ", page)
        await browser.post(f"/console/inbox/{asking.execution_id}-1", data={"value-answer": "yes"})
        await place.agent.ended(asking.execution_id)
        assert await shown_state(browser, asking.session_id) == "idle"
        page = (await browser.get(f"/console/sessions/{asking.session_id}")).text
        assert "Waiting: " not in page


async def test_the_session_of_a_run_that_waits_says_so_and_an_open_list_hears_of_it(place: Place) -> None:
    async with place.operator() as browser, events(browser, "/console/stream?page=sessions") as happened:
        run = await place.agent.fields("run_workflow", definition=FORM, wait_s=30)
        session_id = run["session_id"]

        async def row() -> str:
            async for event in happened:
                if event["data"].get("target") == f"session-{session_id}" and "html" in event["data"]:
                    return event["data"]["html"]
            raise AssertionError

        while "state-waiting" not in (html := await row()):
            pass
        assert f'href="/console/inbox/{run["run"]}%3Asure"' in html
        assert "&lt;b&gt;Go on?" in html
        assert "workflow release, step" not in re.sub(r"title=\"[^\"]*\"", "", html)
        answer = await browser.post(f"/console/inbox/{run['run']}:sure", data={"value-n": "1"})
        assert answer.status_code == 303, answer.text
        while "state-waiting" in await row():
            pass


async def test_the_second_of_two_people_who_answer_a_run_is_told_that_somebody_was_first(place: Place) -> None:
    run = await place.agent.fields("run_workflow", definition=FORM, wait_s=30)
    path = f"/api/v1/questions/{run['run']}:sure"
    async with place.operator() as one, place.operator() as other:
        answer = {"action": "accept", "values": {"n": 1}}
        assert (await one.post(path, json=answer)).json()["state"] == "answered"
        refused = await other.post(path, json=answer)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "question-closed")
        assert "answered already" in refused.json()["error"]["message"]
