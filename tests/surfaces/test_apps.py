"""The view of a session in clients that draw pages of servers: who is offered it, and what it is given."""

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from calls import ERAS, Caller, connected, held, text_of, until_said
from mcp.client import advertise
from mcp.server.apps import APP_MIME_TYPE, EXTENSION_ID

from belljar.executions.cell import Cell
from belljar.mcp.apps_extension import APP_TOOL as TOOL
from belljar.mcp.apps_extension import APP_URI as URI
from belljar.mcp.apps_extension import MAX_CELLS
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio
DRAWS = advertise(EXTENSION_ID, {"mimeTypes": [APP_MIME_TYPE]})
FIGURE = "from PIL import Image\nImage.effect_noise((600, 600), 90).convert('RGB')"


@pytest.fixture
async def host(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime, extensions=[DRAWS]) as caller:
        yield caller


@pytest.mark.parametrize("era", ERAS)
async def test_only_clients_that_draw_pages_are_offered_the_tool(runtime: Runtime, era: str):
    async with connected(runtime, era) as plain, connected(runtime, era, extensions=[DRAWS]) as host:
        seen = {tool.name: tool for tool in (await host.client.list_tools()).tools}
        assert seen.keys() - {tool.name for tool in (await plain.client.list_tools()).tools} == {TOOL}
        assert seen[TOOL].meta == {"ui": {"resourceUri": URI}}
        others = advertise(EXTENSION_ID, {"mimeTypes": ["text/html"]})
        async with connected(runtime, era, extensions=[others]) as other:
            assert TOOL not in {tool.name for tool in (await other.client.list_tools()).tools}
        assert [each.uri for each in (await host.client.list_resources()).resources] == []


async def test_the_page_is_one_small_file_that_loads_nothing(host: Caller):
    content = await host.read(URI)
    assert content.mime_type == APP_MIME_TYPE
    assert content.meta == {"ui": {"prefersBorder": True}}
    page = await host.read_text(URI)
    assert len(page.encode()) <= 30_000
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "http:",
        "https:",
        "src=",
        "@import",
    ):
        assert word not in page, word


async def test_the_latest_cells_come_with_pictures_and_the_text_says_all(host: Caller, shared_session: str):
    for number in range(MAX_CELLS):
        await host.execute(f"print('cell', {number})", shared_session)
    await host.execute(FIGURE, shared_session)
    await host.execute("print('before'); 1 / 0", shared_session)
    answer = await host.call(TOOL, session_id=shared_session)
    assert len(json.dumps(answer.structured_content)) < 700_000
    cells = _cells(answer)
    assert [cell["status"] for cell in cells] == ["ok"] * (MAX_CELLS - 1) + ["error"]
    (picture,) = cells[-2]["parts"]
    kind, _, data = picture["src"].partition(";base64,")
    assert kind == "data:image/png"
    assert 0 < len(base64.b64decode(data)) <= 200_000
    assert cells[-1]["parts"] == [{"kind": "text", "text": "before\n", "src": "", "uri": ""}]
    assert "ZeroDivisionError" in cells[-1]["error"]
    assert (await host.read(picture["uri"])).mime_type == "image/png"
    for word in ("cell 9", "1 / 0", "ZeroDivisionError", f"kernel://{shared_session}/figure-1.png"):
        assert word in text_of(answer)


async def test_pictures_beyond_the_room_of_one_answer_can_be_read_one_by_one(host: Caller):
    session_id = await host.new_session()
    shown = f"{FIGURE.splitlines()[0]}\nfor i in range(5): display({FIGURE.splitlines()[1]})"
    await host.execute(shown, session_id)
    answer = await host.call(TOOL, session_id=session_id)
    assert len(json.dumps(answer.structured_content)) < 700_000
    (cell,) = _cells(answer)
    with_picture = [part for part in cell["parts"] if part["src"]]
    assert 0 < len(with_picture) < 5 == len(cell["parts"])
    assert (await host.read(cell["parts"][-1]["uri"])).mime_type == "image/png"


async def test_a_running_cell_is_shown_as_far_as_it_is(host: Caller, runtime: Runtime):
    session_id = await host.new_session()
    running = await host.execute(held(), session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    answer = await host.call(TOOL, session_id=session_id, execution_id=running.execution_id)
    (cell,) = _cells(answer)
    assert (cell["status"], cell["parts"][0]["text"]) == ("running", "held\n")
    await host.release(session_id)
    await host.ended(running.execution_id)


async def test_a_server_with_an_address_says_where_its_console_shows_the_session(
    host: Caller, runtime: Runtime, shared_session: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runtime.sessions.inbox, "console_url", lambda: "https://jar.example.org")
    answer = await host.call(TOOL, session_id=shared_session)
    address = f"https://jar.example.org/console/sessions/{shared_session}"
    assert answer.structured_content is not None
    assert answer.structured_content["console"] == address
    assert f"In the console: {address}" in text_of(answer)


async def test_sessions_of_others_and_wrong_executions_are_refused_as_unknown(
    host: Caller, runtime: Runtime, shared_session: str
):
    foreign = runtime.sessions.create("key:bob")
    theirs = foreign.submit(Cell("1", timeout_s=60))
    unknown = await host.refusal(TOOL, session_id="0" * 32)
    assert (await host.refusal(TOOL, session_id=foreign.id)).replace(foreign.id, "0" * 32) == unknown
    for wrong in (theirs.id, "nonsense"):
        refusal = await host.refusal(TOOL, session_id=shared_session, execution_id=wrong)
        assert refusal.startswith("execution-not-found")
    await runtime.sessions.clear(foreign.id, "key:bob")


async def test_what_a_cell_wrote_for_a_terminal_comes_as_plain_text(host: Caller, shared_session: str):
    code = "print('10%\\r100%\\x1b[31m red\\x1b[0m \\u202e txt')"
    result = await host.execute(code, shared_session)
    answer = await host.call(TOOL, session_id=shared_session, execution_id=result.execution_id)
    (part,) = _cells(answer)[0]["parts"]
    assert part["text"] == "100% red \N{REPLACEMENT CHARACTER} txt\n"


def _cells(answer: Any) -> list[dict[str, Any]]:
    assert not answer.is_error, text_of(answer)
    return answer.structured_content["cells"]
