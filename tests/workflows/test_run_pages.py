"""Runs of workflows in the console and the API: lists, the graph, the steps, what can be done, and who sees them."""

import json
import re
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from calls import FORKS
from workflow_texts import code, condition, form, loop, parallel, workflow

from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.engine.runs import GraphNode
from belljar.environments import Environment
from belljar.errors import InvalidArgument, RunNotFound
from belljar.journal.run_records import RunRecord, RunRecords, StepRecord
from belljar.workflows.run_drawing import drawing
from waiting import until

sys.path.append(str(Path(__file__).parents[1] / "console"))
from consoles import Place, events, opened_place

pytestmark = pytest.mark.anyio

OPERATOR = Access("local", is_operator=True, name="olga")
STRANGER = Access("key:stranger")
FIELDS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HOSTILE = "</svg><script>alert(1)</script>\u202e"


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("runs")
    async with opened_place(default_environment, folder, ask_in_console="always", workflows="on", **FORKS) as opened:
        yield opened


async def started(place: Place, text: str) -> dict[str, Any]:
    answer = await place.agent.call("run_workflow", definition=text, wait_s=60)
    assert answer.structured_content is not None
    return answer.structured_content


def recorded(place: Place, steps: int, *, owner: str = "local", name: str = "thousand") -> str:
    """A run that is on record as done, as if it had run here."""
    journal = place.runtime.sessions.journal
    records, run_id, now = RunRecords(journal, place.runtime.name), f"{name}{steps}".ljust(16, "0"), time.time()
    text = workflow(*(code(f"step_{n}", "1") for n in range(steps)), name=name)
    run = RunRecord(run_id, owner, name, text, "{}", "", run_id, "{}", "", "", "failed", "", now - steps)
    records.enter(run)
    for n in range(steps // 2):
        state = "failed" if n == steps // 2 - 1 else "done"
        began = now - steps + n
        records.put(
            run_id, StepRecord(f"step_{n}", 1, state, value='{"result": 1}', began_at=began, ended_at=began + 1)
        )
    journal.commit()
    return run_id


async def test_a_run_is_listed_and_shown_alike_here_and_through_its_server(place: Place) -> None:
    run = await started(
        place,
        workflow(
            code("load", "7"),
            condition("enough", "load.result > 3", [code("use", "print('used')\n8")], [code("leave", "0")]),
            loop("each", [1, 2], [code("chart", f"{HOSTILE!r}")]),
            parallel("both", [code("one", "1")], [code("two", "2")]),
            form("sure", HOSTILE, fields=FIELDS),
            name="report",
            variables={"month": "March"},
        ),
    )
    remote = servers_of(place.runtime.settings.data_directory)
    for engine in (place.runtime.late_engine.get(), remote):
        (entry,) = (await engine.runs(OPERATOR, state="waiting", text="REPORT")).items
        assert (entry.run_id, entry.step, [one.question_id for one in entry.asks]) == (
            run["run"],
            "sure",
            [f"{run['run']}:sure"],
        )
        assert (await engine.runs(OPERATOR, state="done", text="report")).items == []
        detail = await engine.run(OPERATOR, run["run"])
        assert [(one.path, one.state) for one in detail.steps][:3] == [
            ("load", "done"),
            ("enough", "done"),
            ("enough.use", "done"),
        ]
        assert [node.states for node in detail.graph] == [
            {"done": 1},
            {"done": 1},
            {"done": 1},
            {"done": 1},
            {"waiting": 1},
        ]
        assert detail.graph[1].blocks[1][0].states == {}
        assert detail.graph[2].blocks[0][0].states == {"done": 2}
        assert (detail.steps[0].input, detail.steps[0].result, detail.variables) == ("7", "7", {"month": "March"})
        rounds = await engine.run(OPERATOR, run["run"], node="each.chart", offset=1)
        assert ([one.path for one in rounds.steps], rounds.total_steps) == (["each[1].chart"], 2)
        assert detail.acts == ["stop"]
        with pytest.raises(InvalidArgument, match="is none of"):
            await engine.runs(OPERATOR, state="asleep")
        for who, run_id in ((STRANGER, run["run"]), (OPERATOR, "nowhere")):
            with pytest.raises(RunNotFound):
                await engine.run(who, run_id)
            with pytest.raises(RunNotFound):
                await engine.steer_run(who, run_id, "stop")
        assert (await engine.runs(STRANGER)).items == []
    async with place.operator() as browser:
        page = (await browser.get(f"/console/workflows/{run['run']}")).text
        assert "<script>alert" not in page
        assert "\u202e" not in page
        assert f'href="/console/inbox/{run["run"]}%3Asure"' in page
        assert f'href="/console/sessions/{run["session_id"]}"' in page
        assert "<title>(1) Waiting: report" in page
        listed = (await browser.get("/console/workflows?state=waiting")).text
        assert f'href="/console/workflows/{run["run"]}"' in listed
        assert "No run matches" in (await browser.get("/console/workflows?q=nowhere")).text
        # Its page is open while it is stopped, and while it goes on.
        async with events(browser, f"/console/stream?page=run:{run['run']}") as happened:
            answer = await browser.post(f"/console/workflows/{run['run']}", data={"act": "stop"})
            assert answer.status_code == 303, answer.text
            assert 'value="resume"' in await shown(happened, "stopped")
            assert (await browser.post(f"/console/workflows/{run['run']}", data={"act": "resume"})).status_code == 303
            await shown(happened, "waiting")
            answer = {"action": "accept", "values": {"n": 1}}
            assert (await browser.post(f"/api/v1/questions/{run['run']}:sure", json=answer)).status_code == 200
            assert "<h2>Result</h2>" in await shown(happened, "done")
        refused = await browser.post(f"/console/workflows/{run['run']}", data={"act": "stop"})
        assert (refused.status_code, "is done already" in refused.text) == (400, True)
        refused = await browser.post(f"/console/workflows/{run['run']}", data={"act": "<b>"})
        assert (refused.status_code, "there is no act" in refused.text) == (400, True)


async def shown(happened: AsyncGenerator[dict[str, Any]], state: str) -> str:
    async for event in happened:
        html = event["data"].get("html", "")
        if event["data"].get("target") == "run" and re.search(
            rf'<h1>[^<]*</h1>\s*<span class="state run-{state}"', html
        ):
            return html
    raise AssertionError(state)


async def test_a_failed_run_is_tried_again_from_the_step_that_failed(place: Place) -> None:
    text = workflow(
        code("first", "open('first', 'a').write('x')\n1"),
        code("second", "from pathlib import Path\nPath('there').stat()\nPath('first').read_text()"),
        name="twice",
    )
    run = await started(place, text)
    async with place.operator() as browser:
        page = (await browser.get(f"/console/workflows/{run['run']}")).text
        assert "Retry the failed step" in page
        assert "FileNotFoundError" in page
        upload = {"file": ("there", b"")}
        await browser.post(f"/console/sessions/{run['session_id']}/upload", files=upload)
        await browser.post(f"/console/workflows/{run['run']}", data={"act": "resume"})

        async def is_done() -> dict[str, Any]:
            told = (await browser.get(f"/api/v1/runs/{run['run']}")).json()
            return told if told["state"] == "done" else {}

        told = await until(is_done)
        assert json.loads(told["result"]) == "x"  # the first step ran once
        assert [(one["path"], one["attempt"]) for one in told["steps"]] == [("first", 1), ("second", 2)]
        assert [one["state"] for one in told["steps"][1]["earlier"]] == ["failed"]


async def test_a_run_of_a_thousand_steps_is_a_page_of_bounded_size(place: Place) -> None:
    run_id = recorded(place, 1_000)
    async with place.operator() as browser:
        page = (await browser.get(f"/console/workflows/{run_id}")).text
        assert len(page) < 250_000
        assert "more steps" in page
        assert "492 done" in page
        detail = (await browser.get(f"/api/v1/runs/{run_id}?offset=400&limit=200")).json()
        assert (detail["total_steps"], len(detail["steps"])) == (500, 100)
        drawn = [node["name"] for node in detail["graph"]]
        assert {"step_0", "step_499", "step_500", "step_999"} <= {*drawn}
        assert len(drawn) < 40
        assert sum(node["folded"] for node in detail["graph"]) == 1_000 - len([name for name in drawn if name])
        assert (
            await browser.get(f"/console/workflows/{run_id}?offset=999999999&step={'x' * 2_000}")
        ).status_code == 200


async def test_runs_of_other_owners_are_answered_as_unknown_ones(place: Place) -> None:
    run_id = recorded(place, 2, owner="key:somebody", name="theirs")
    engine = place.runtime.late_engine.get()
    assert (await engine.run(OPERATOR, run_id)).owner == "key:somebody"
    for cause in (run_id, "nowhere"):
        with pytest.raises(RunNotFound) as refused:
            await engine.run(STRANGER, cause)
        assert cause in str(refused.value)


async def test_pages_of_runs_go_on_where_the_last_ended(place: Place) -> None:
    made = {recorded(place, steps, name="paged") for steps in range(2, 7)}
    engine = place.runtime.late_engine.get()
    found: list[str] = []
    cursor = ""
    while True:
        page = await engine.runs(OPERATOR, text="paged", cursor=cursor, limit=2)
        found += [one.run_id for one in page.items]
        if page.next is None:
            break
        cursor = page.next
    assert {*found} == made
    assert len(found) == len(made)


def test_a_graph_is_well_formed_whatever_its_steps_are_called() -> None:
    inner = [GraphNode(node="a.b", name=HOSTILE, type="code_execution", what=HOSTILE, states={"failed": 1, "done": 2})]
    nodes = [
        GraphNode(node='a"><x', name="a", type="loop", blocks=[inner], labels=[HOSTILE]),
        GraphNode(node="", name="", type="", folded=7, states={"done": 7}),
        GraphNode(node="c", name="c", type="condition", blocks=[inner, []], labels=["yes", "no"]),
    ]
    picture = drawing(HOSTILE, nodes)
    root = ElementTree.fromstring(picture)
    boxes = [one for one in root.iter() if "box" in one.get("class", "").split()]
    assert len(boxes) == 5
    assert "script" not in {one.tag for one in root.iter()}
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in boxes:
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.get("width", 0)) <= width
        assert 0 <= y <= y + float(box.get("height", 0)) <= height
    assert "1 failed, 2 done" in picture


async def test_a_browser_that_is_not_signed_in_sees_no_runs(place: Place) -> None:
    async with place.browser() as browser:
        answer: httpx.Response = await browser.get("/console/workflows")
        assert answer.status_code == 303
        assert (await browser.get("/api/v1/runs")).status_code == 401
