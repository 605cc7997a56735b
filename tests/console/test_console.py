"""The console and its API as browsers and scripts use them: who gets in, what they see, what comes live."""

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from calls import FORKS, held, until_said
from consoles import Place, events, opened_place

from belljar.console import templating
from belljar.console.app import PATHS, console_app
from belljar.console.forms import form_fields
from belljar.console.frames import _follows_theme
from belljar.console.server import ServedConsole
from belljar.environments import Environment
from belljar.http.auth.browser import BrowserSignIn, FailedSignIns
from belljar.settings import hash_key
from waiting import until

pytestmark = pytest.mark.anyio

ALICE, BOB = "alice-" + "a" * 30, "bob-" + "b" * 30
HOSTILE = "<script>alert(1)</script>\u202ereversed"


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(
        default_environment,
        tmp_path_factory.mktemp("console"),
        api_keys=[f"alice:sha256:{hash_key(ALICE)}", f"bob:sha256:{hash_key(BOB)}"],
        **FORKS,
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
async def ran(place: Place) -> dict[str, str]:
    """A session of the agent with a few cells: text, an error, a table, a figure, a file."""
    first = await place.agent.execute("print('hello <b>world</b>')\nopen('note.txt', 'w').write('hi')")
    await place.agent.execute("1/0", first.session_id)
    table = await place.agent.execute(
        "from IPython.display import HTML, Markdown, SVG, display\n"
        "display(HTML('<table><tr><td>7</td></tr></table>'))\n"
        "display(HTML('<script>parent.document.title = 1</script>'))\n"
        "display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"><script>1</script></svg>'))",
        first.session_id,
    )
    return {"session": first.session_id, "first": first.execution_id, "table": table.execution_id}


async def test_a_cookie_does_not_work_from_another_origin(place: Place) -> None:
    async with place.operator() as browser:
        for site in ("cross-site", "same-site", "none"):
            answer = await browser.post("/api/v1/sessions", json={}, headers={"Sec-Fetch-Site": site})
            assert answer.status_code == 403, site
        del browser.headers["Sec-Fetch-Site"]
        assert (await browser.post("/api/v1/sessions", json={})).status_code == 403
        foreign = {"Origin": "http://127.0.0.1:1"}
        assert (await browser.post("/api/v1/sessions", json={}, headers=foreign)).status_code == 403
        answer = await browser.get("/api/v1/sessions", headers={"Sec-Fetch-Site": "same-site"})
        assert answer.status_code == 403
        answer = await browser.get("/console", headers={"Host": "evil.example"})
        assert answer.status_code == 421


async def test_a_link_works_once(place: Place) -> None:
    token = place.console.sign_in.links.make()
    async with place.browser() as browser, place.browser() as second:
        entered = await browser.post("/console/enter", data={"token": token})
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert (await browser.get("/console")).status_code == 200
        again = await second.post("/console/enter", data={"token": token})
        assert (again.status_code, "has been used" in again.text) == (401, True)


async def test_signing_out_ends_every_browser_of_the_person(place: Place) -> None:
    async with place.person(ALICE) as one, place.person(ALICE) as other, place.person(BOB) as bob:
        assert (await one.post("/console/leave")).status_code == 303
        assert (await other.get("/console")).status_code == 303
        assert (await bob.get("/console")).status_code == 200


async def test_a_next_page_is_one_of_ours(place: Place) -> None:
    async with place.browser() as browser:
        for wanted in ("//evil.example", "https://evil.example", "/console/../x//y", "/\\evil"):
            answer = await browser.post("/console/enter", data={"key": ALICE, "next": wanted})
            assert answer.headers["location"] == "/console", wanted
        answer = await browser.post("/console/enter", data={"key": ALICE, "next": "/console/sessions/a"})
        assert answer.headers["location"] == "/console/sessions/a"


async def test_scripts_use_keys(place: Place) -> None:
    async with httpx.AsyncClient(base_url=place.url, headers={"Authorization": f"Bearer {BOB}"}) as script:
        made = await script.post("/api/v1/sessions", json={"reason": HOSTILE})
        assert made.status_code == 201, made.text
        session_id = made.json()["session_id"]
        queued = await script.post(
            f"/api/v1/sessions/{session_id}/executions", json={"code": "6*7"}, headers={"Idempotency-Key": "once"}
        )
        again = await script.post(
            f"/api/v1/sessions/{session_id}/executions", json={"code": "6*7"}, headers={"Idempotency-Key": "once"}
        )
        assert queued.status_code == 202
        assert queued.json() == again.json()
        execution_id = queued.json()["execution_id"]

        async def is_done() -> bool:
            return (await script.get(f"/api/v1/executions/{execution_id}")).json()["status"] == "ok"

        await until(is_done)
        result = (await script.get(f"/api/v1/executions/{execution_id}/result")).json()
        assert (result["result"], result["execution_count"]) == ("42", 1)
        put = await script.put(f"/api/v1/sessions/{session_id}/files/a%2Fb.txt", content=b"0123456789")
        assert put.status_code == 204, put.text
        part = await script.get(f"/api/v1/sessions/{session_id}/files/a/b.txt", headers={"Range": "bytes=2-4"})
        assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
        assert part.headers["content-disposition"].startswith("attachment")
        async with place.person(BOB) as bob:
            page = (await bob.get("/console")).text
            assert "<script>alert" not in page
            assert "&lt;script&gt;alert(1)&lt;/script&gt;reversed" in page
        assert (await script.delete(f"/api/v1/sessions/{session_id}")).status_code == 204
        assert (await script.get(f"/api/v1/sessions/{session_id}/executions")).json()["items"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/sessions?limit=0", None, 400),
        ("GET", "/sessions?limit=x", None, 400),
        ("GET", "/sessions?cursor=%00", None, 400),
        ("GET", "/sessions?cursor=AAAA", None, 400),
        ("GET", "/sessions?state=nope", None, 400),
        ("GET", "/sessions/%ED%A0%80", None, 404),
        ("GET", "/executions/é", None, 404),
        ("GET", "/nowhere", None, 404),
        ("POST", "/sessions", "{", 400),
        ("POST", "/sessions", '{"unknown": 1}', 400),
        ("POST", "/sessions", '{"environment": "no-such"}', 400),
        ("POST", "/questions/1", '{"action": "accept"}', 404),
        ("POST", "/questions/1", '{"action": "maybe"}', 400),
        ("PATCH", "/sessions", None, 405),
    ],
)
async def test_bad_requests_get_a_clear_answer(
    place: Place, method: str, path: str, body: str | None, status: int
) -> None:
    async with place.operator() as browser:
        answer = await browser.request(method, f"/api/v1{path}", content=body)
        assert answer.status_code == status, answer.text
        if status != 405:
            assert answer.json()["error"]["message"]


async def test_the_description_has_every_route(place: Place) -> None:
    async with place.operator() as browser:
        document = (await browser.get("/api/v1/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    guard = place.console.apps[PATHS[0]]
    served = {
        (method, re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path))
        for route in guard._app.routes  # pyright: ignore[reportAttributeAccessIssue]
        if route.path.startswith("/api/v1/") and not route.path.endswith("openapi.json")
        for method in route.methods - {"HEAD"}
    }
    assert described == served
    # Every reference leads somewhere.
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= document["components"]["schemas"].keys()


async def test_a_notebook_page_shows_escaped_text_and_frames(place: Place, ran: dict[str, str]) -> None:
    async with place.operator() as browser:
        answer = await browser.get(f"/console/sessions/{ran['session']}")
        assert answer.status_code == 200, answer.text
        page = answer.text
        assert "hello &lt;b&gt;world&lt;/b&gt;" in page
        assert "ZeroDivisionError" in page
        assert "note.txt" in page
        assert f'<iframe src="/frames/{ran["table"]}/' in page
        assert f'data-run-frame="/frames/{ran["table"]}/' in page
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        # Nothing of ours is inline either.
        assert not re.search(r"<script(?! type=\"module\" src=)", page)
        assert not re.search(r"\s(on\w+|style)=", page)
        for source in re.findall(r"/frames/[0-9a-f]+/\d+\.\w+", page):
            framed = await browser.get(source)
            assert framed.status_code == 200, source
            policy = framed.headers["content-security-policy"]
            assert policy.startswith("sandbox")
            assert "default-src 'none'" in policy
            assert "allow-same-origin" not in policy


async def test_scripts_of_a_frame_run_only_when_asked_for(place: Place, ran: dict[str, str]) -> None:
    async with place.operator() as browser:
        quiet = (await browser.get(f"/frames/{ran['table']}/2.html")).headers["content-security-policy"]
        asked = (await browser.get(f"/frames/{ran['table']}/2.html?scripts=1")).headers["content-security-policy"]
    assert re.search(r"script-src 'nonce-[\w-]+'", quiet)
    assert "'unsafe-inline'" in asked.partition("script-src")[2]
    assert "connect-src 'none'" in asked


async def test_a_cell_streams_while_it_runs_and_a_reader_resumes_without_gap_or_repeat(place: Place) -> None:
    session_id = await place.agent.new_session()
    code = "for n in range(5): print('line', n, flush=True)\n" + held("go") + "print('after')"
    running = await place.agent.execute(code, session_id, wait_s=0)
    await until_said(place.runtime, running.execution_id, "held")
    texts: list[str] = []
    async with place.operator() as browser:
        path = f"/api/v1/sessions/{session_id}/events"
        async with events(browser, path) as happened:
            async for event in happened:
                if event["event"] == "output":
                    texts.append(event["data"]["output"]["text"])
                    last = event["id"]
                if "held" in "".join(texts):
                    break
        await place.agent.release(session_id, "go")
        kinds: list[str] = []
        async with events(browser, path, **{"Last-Event-ID": last}) as happened:
            async for event in happened:
                kinds.append(event["event"])
                if event["event"] == "output":
                    texts.append(event["data"]["output"]["text"])
                if event["event"] == "ended":
                    assert event["data"]["execution"]["status"] == "ok"
                    break
        assert "".join(texts) == "".join(f"line {n}\n" for n in range(5)) + "held\nafter\n"
        assert "cell" not in kinds
        async with events(browser, f"{path}?after={'0' * 32}:1") as happened:
            assert (await anext(happened))["event"] == "reset"


async def test_a_page_that_is_open_gets_what_changes(place: Place) -> None:
    session_id = await place.agent.new_session()
    async with place.operator() as browser:
        page = (await browser.get(f"/console/sessions/{session_id}")).text
        assert "Nothing has run yet" in page
        done: list[str] = []
        async with events(browser, f"/console/stream?page=session:{session_id}&after=") as happened:
            code = "print('<i>one</i>')\nimport os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
            await place.agent.fields("execute_code", code=code, session_id=session_id, wait_s=0)
            async for event in happened:
                change = event["data"]
                done.append(change["do"])
                assert "<i>" not in change.get("html", "")
                if change["do"] == "append":
                    await browser.put(f"/api/v1/sessions/{session_id}/files/go", content=b"")
                if "end-" in change["target"]:
                    break
        assert {"cell", "append"} <= set(done)


async def test_a_cell_that_has_ended_when_the_page_hears_of_it_comes_whole(place: Place) -> None:
    session_id = await place.agent.new_session()
    async with place.operator() as browser:
        for number in range(3):
            await place.agent.execute(f"print('<i>{number}</i>')\n{number}", session_id)
        async with events(browser, f"/console/stream?page=session:{session_id}&after=") as happened:
            cells: list[str] = []
            async for event in happened:
                change = event["data"]
                if change["do"] == "cell":
                    cells.append(change["html"])
                if len(cells) == 3:
                    break
        for number, html in enumerate(cells):
            assert f"&lt;i&gt;{number}&lt;/i&gt;" in html
            assert 'id="end-' in html


async def test_a_display_of_an_earlier_cell_is_updated_by_one_that_has_ended(place: Place) -> None:
    session_id = await place.agent.new_session()
    async with place.operator() as browser:
        await place.agent.execute(
            "shown = display({'text/html': '<b>before</b>'}, raw=True, display_id=True)", session_id
        )
        await place.agent.execute("shown.update({'text/html': '<b>after</b>'}, raw=True)", session_id)
        done: list[str] = []
        async with events(browser, f"/console/stream?page=session:{session_id}&after=") as happened:
            async for event in happened:
                done.append(event["data"]["do"])
                if done.count("cell") == 2:
                    break
        assert "update" in done


async def test_looking_does_not_use_a_session(place: Place) -> None:
    session_id = await place.agent.new_session()
    session = place.runtime.sessions.find_open(session_id)
    assert session is not None
    used_at = session.lease.used_at
    async with place.operator() as browser:
        for path in (f"/console/sessions/{session_id}", f"/api/v1/sessions/{session_id}", "/console"):
            assert (await browser.get(path)).status_code == 200
        async with events(browser, f"/console/stream?page=session:{session_id}"):
            assert session.is_idle
            assert not session.watchers
    assert session.lease.used_at == used_at


async def test_the_health_page_changes_while_it_is_open(place: Place) -> None:
    async with place.operator() as browser, events(browser, "/console/stream?page=health") as happened:
        first = (await anext(happened))["data"]
        assert (first["do"], first["target"]) == ("replace", "health")
        assert "Limits of a session" in first["html"]
        await place.agent.new_session()
        # Nothing but a question wakes it before its time: what it shows is looked at every few seconds.
        await until(lambda: place.runtime.sessions.inbox.may_ask("local"))
        asking = await place.agent.execute("input('?')", wait_s=0)
        async for event in happened:
            if event["data"]["do"] == "replace":
                assert event["data"]["html"] != first["html"]
                break
        await place.agent.call("interrupt_execution", execution_id=asking.execution_id)


async def test_the_list_changes_while_it_is_open(place: Place) -> None:
    async with place.operator() as browser, events(browser, "/console/stream?page=sessions") as happened:
        session_id = await place.agent.new_session()
        async for event in happened:
            change = event["data"]
            if change["target"] == f"session-{session_id}":
                assert (change["do"], change["list"]) == ("row", "live")
                break
        await place.agent.fields("clear_session", session_id=session_id)
        async for event in happened:
            if event["data"]["do"] == "remove":
                assert event["data"]["target"] == f"session-{session_id}"
                break


async def test_a_session_is_renamed_by_a_form_and_open_pages_show_it(place: Place) -> None:
    session_id = await place.agent.new_session()
    page, name = f"/console/sessions/{session_id}", "Oslo <b>& 'Bergen'</b>"
    shown = "Oslo &lt;b&gt;&amp; &#39;Bergen&#39;&lt;/b&gt;"
    async with (
        place.operator() as browser,
        events(browser, f"/console/stream?page=session:{session_id}") as of_session,
        events(browser, "/console/stream?page=sessions") as of_list,
    ):
        assert f'action="{page}/rename"' in (await browser.get(page)).text
        answer = await browser.post(f"{page}/rename", data={"reason": name})
        assert (answer.status_code, answer.headers["location"]) == (303, f"{page}?done=rename")
        assert 'role="status">Renamed.' in (await browser.get(answer.headers["location"])).text
        for happened, place_of_name in ((of_session, f'data-name="{shown}"'), (of_list, f">{shown}</a>")):
            async for event in happened:
                if place_of_name in event["data"].get("html", ""):
                    break
        text = (await browser.get(page)).text
        assert f"<title>{shown} · belljar</title>" in text
        assert f'<h1 id="session-name">{shown}</h1>' in text
        assert f'value="{shown}"' in text
        await browser.post(f"{page}/rename", data={"reason": ""})
        assert f"Session {session_id[:8]}</h1>" in (await browser.get(page)).text


@pytest.mark.parametrize(
    ("act", "sent", "said"),
    [
        ("rename", {"reason": "x" * 201}, "reason: String should have at most 200 characters"),
        ("map", {"pieces": "[]"}, "there is no act"),  # a stream
        ("installs", {}, "there is no act"),
        ("{session_id}", {}, "there is no act"),
    ],
)
async def test_a_form_that_the_api_would_refuse_or_does_not_know_is_refused_with_the_reason(
    place: Place, act: str, sent: dict[str, str], said: str
) -> None:
    first = await place.agent.execute("x = 1")
    async with place.operator() as browser:
        answer = await browser.post(f"/console/sessions/{first.session_id}/{act}", data=sent)
    assert (answer.status_code, said in answer.text) == (400, True)
    assert (await place.agent.execute("x", first.session_id)).result == "1"


async def test_acts_of_a_person_are_told_to_the_agent(place: Place) -> None:
    first = await place.agent.execute("x = 1")
    async with place.operator() as browser:
        path = f"/api/v1/sessions/{first.session_id}"
        queued = await browser.post(f"{path}/executions", json={"code": "x = 2"})
        await place.agent.ended(queued.json()["execution_id"])
        await browser.put(f"{path}/files/from-me.txt", content=b"hi")
        entry = (await browser.get(f"/api/v1/executions/{queued.json()['execution_id']}")).json()
        assert entry["author"]
    told = await place.agent.execute("x", first.session_id)
    assert told.result == "2"
    said = "".join(told.output)
    assert f"{entry['author']} ran a cell" in said
    assert f"{entry['author']} put 'from-me.txt' into the session folder" in said


async def test_a_question_that_the_client_cannot_ask_is_answered_in_the_console(place: Place) -> None:
    async with place.operator() as browser, events(browser, "/console/stream?page=inbox") as happened:
        # Somebody who may answer is there, so the cell may ask.
        await until(lambda: place.runtime.sessions.inbox.may_ask("local"))
        asking = await place.agent.execute("name = input('Who <b>are</b> you? ')\nprint('hello', name)", wait_s=0)
        async for event in happened:
            if event["data"]["do"] == "question":
                break
        page = (await browser.get("/console/inbox")).text
        assert "Who &lt;b&gt;are&lt;/b&gt; you?" in page
        question_id = f"{asking.execution_id}-1"
        async with place.person(BOB) as bob:
            assert question_id not in (await bob.get("/console/inbox")).text
            foreign = await bob.post(f"/api/v1/questions/{question_id}", json={"action": "decline"})
            assert foreign.status_code == 404
        form = {"value-answer": "Olga", "action": "accept"}
        assert (await browser.post(f"/console/inbox/{question_id}", data=form)).status_code == 303
        assert "hello Olga" in (await place.agent.ended(asking.execution_id)).stdout
        late = await browser.post(f"/api/v1/questions/{question_id}", json={"action": "decline"})
        assert (late.status_code, "answered already" in late.json()["error"]["message"]) == (409, True)
        async for event in happened:
            if event["data"]["do"] == "waiting" and f"question-{question_id}" not in event["data"]["ids"]:
                break


async def test_files_are_downloaded_by_range_and_looked_at(place: Place) -> None:
    code = """
import os
os.makedirs('data', exist_ok=True)
open('data/long.bin', 'wb').write(bytes(range(256)) * 12_000)
open('data/<b>.txt', 'w').write('<script>alert(1)</script>' + 'z' * 300_000)
open('data/fake.png', 'wb').write(b'<svg onload=alert(1)>')
"""
    session_id = (await place.agent.execute(code)).session_id
    content = bytes(range(256)) * 12_000
    async with place.operator() as browser:
        path = f"/api/v1/sessions/{session_id}/files/data/long.bin"
        whole = await browser.get(path)
        assert (whole.content == content, whole.headers["content-length"]) == (True, "3072000")
        tag = whole.headers["etag"]
        for asked, first, end in [("0-9", 0, 10), ("2000000-", 2_000_000, None), ("-7", len(content) - 7, None)]:
            part = await browser.get(path, headers={"Range": f"bytes={asked}", "If-Range": tag})
            assert (part.status_code, part.content) == (206, content[first:end])
        assert (await browser.get(path, headers={"Range": "bytes=0-1", "If-Range": '"old"'})).status_code == 200
        assert (await browser.get(path, headers={"Range": "bytes=9999999-"})).status_code == 416
        console = f"/console/sessions/{session_id}"
        listing = (await browser.get(f"{console}/files?path=data")).text
        assert "&lt;b&gt;.txt" in listing
        page = (await browser.get(f"{console}/view", params={"name": "data/<b>.txt"})).text
        assert "&lt;script&gt;alert(1)" in page
        assert "more are not shown here" in page
        assert "No preview" in (await browser.get(f"{console}/view", params={"name": "data/long.bin"})).text
        fake = await browser.get(f"{console}/picture", params={"name": "data/fake.png"})
        assert fake.status_code == 404
        assert (await browser.get(f"{console}/view", params={"name": "../../secret"})).status_code == 400
        form = {"folder": "data"}
        sent = await browser.post(f"{console}/upload", data=form, files={"file": ("new.txt", b"up")})
        assert sent.headers["location"].endswith("/files?done=uploaded&path=data")
        assert (await browser.get(f"/api/v1/sessions/{session_id}/files/data/new.txt")).content == b"up"


async def test_cookies_are_for_https_where_the_public_address_is(place: Place) -> None:
    sign_in = BrowserSignIn(verifier=place.console.sign_in._verifier, public_url="https://jar.example.org")
    app = console_app(place.runtime.late_engine.get(), sign_in, place.runtime.settings)
    transport = httpx.ASGITransport(app)
    own = {"Sec-Fetch-Site": "same-origin"}
    async with httpx.AsyncClient(transport=transport, base_url="http://jar.example.org", headers=own) as behind:
        answer = await behind.post("/console/enter", data={"key": ALICE})
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-belljar-443=")
        assert "Secure" in cookie
        name, _, value = cookie.partition(";")[0].partition("=")
        assert (await behind.get("/console", headers={"Cookie": f"{name}={value}"})).status_code == 200
    # What a caller says of the way it came is not believed.
    forwarded = {**own, "X-Forwarded-Proto": "https"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=forwarded) as direct:
        cookie = (await direct.post("/console/enter", data={"key": ALICE})).headers["set-cookie"]
        assert cookie.startswith("belljar-80=")
        assert "Secure" not in cookie


def test_links_have_the_name_that_people_reach_the_server_by() -> None:
    console = ServedConsole(BrowserSignIn(), url="http://127.0.0.1:8000")
    assert console.link().link.startswith("http://127.0.0.1:8000/console/enter#")
    console.public_url = "http://belljar.localhost:8000"
    assert console.link().link.startswith("http://belljar.localhost:8000/console/enter#")


async def test_the_other_pages_show_what_there_is(place: Place, ran: dict[str, str]) -> None:
    async with place.operator() as browser:
        made = await browser.post("/console/sessions/new", data={"reason": HOSTILE})
        assert "&lt;script&gt;" in (await browser.get(made.headers["location"])).text
        for path, words in [
            (f"/console/sessions/{ran['session']}/calls", "No tool was called"),
            (f"/console/sessions/{ran['session']}/timeline", "ok"),
            (f"/console/executions/{ran['first']}/output", "hello &lt;b&gt;world"),
            (f"/console/executions/{ran['first']}/lines?first=1", 'data-total="1"'),
            ("/console/health", "Sessions idle"),
            ("/console/decisions?q=nothing", "No decision matches"),
        ]:
            page = await browser.get(path)
            assert (page.status_code, words in page.text) == (200, True), path
        assert (await browser.get("/console/inbox/none-1")).status_code == 404
        assert (await browser.get("/api/v1/usage")).json()["interval_s"] == 5


async def test_search_finds_cells_and_shows_what_they_printed_as_text(place: Place) -> None:
    ran = await place.agent.execute("print('<script>alert(1)</script> platypus')  # <b>")
    for _ in range(52):
        await place.agent.execute("1", ran.session_id)
    async with place.operator() as browser, place.person(BOB) as bob:
        page = (await browser.get("/console/search", params={"q": "platyp"})).text
        assert "&lt;script&gt;alert(1)&lt;/script&gt; <mark>platypus</mark>" in page
        assert "<script>alert" not in page
        link = f"/console/sessions/{ran.session_id}?cell={ran.execution_id}"
        assert f'href="{link}#cell-{ran.execution_id}"' in page
        # The page of the session begins with the cell, although 50 others came after it.
        assert f'id="cell-{ran.execution_id}"' in (await browser.get(link)).text
        assert f'id="cell-{ran.execution_id}"' not in (await browser.get(f"/console/sessions/{ran.session_id}")).text
        assert "No cell has this" in (await bob.get("/console/search", params={"q": "platyp"})).text
        for text, words in [("x" * 10_000, "10,000 characters"), ('"', "no word"), ("", "The code and the output")]:
            answer = await browser.get("/console/search", params={"q": text})
            assert (answer.status_code, words in answer.text) == (200, True)
        assert (await browser.get("/console/search?q=a&cursor=AAAA")).status_code == 200
        hostile = await browser.get("/console/search?q=%22%00%ED%A0%80%3Cscript%3Eplatypus")
        assert (hostile.status_code, "<script>platypus" in hostile.text) == (200, False)


async def test_wrong_keys_are_slowed_down(place: Place) -> None:
    place.console.sign_in.failures = FailedSignIns()
    async with place.browser() as browser:
        statuses = [(await browser.post("/console/enter", data={"key": f"wrong{n}"})).status_code for n in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    place.console.sign_in.failures = FailedSignIns()


def test_templates_mark_nothing_safe_and_scripts_parse_no_text_into_the_page() -> None:
    folder = Path(templating.__file__).parent
    unsafe = ("|safe", "| safe", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc")
    for path in [*folder.glob("templates/*.html"), *folder.glob("static/*.js")]:
        text = path.read_text()
        for word in unsafe:
            assert word not in text, (path.name, word)


@pytest.mark.parametrize(
    ("html", "follows"),
    [
        (
            "<style scoped>.dataframe tr th { vertical-align: top; }</style><table border=1><tr><td>7</table>",
            True,
        ),
        ("<table><tr><th>color</th><td>background: red</td></tr></table>", True),
        ("<h1>Title</h1><pre>text", True),
        ("<style>@media (prefers-color-scheme: dark) { p { color: white } }</style><p>both", True),
        ("<style>td { background-color: yellow }</style><table><tr><td>7</table>", False),
        ('<td style="color: #000">7', False),
        ("<table bgcolor=white><tr><td>7</table>", False),
        ("<svg><rect/></svg>", False),
        ("<IMG src=data:,>", False),
        ("x" * 65_536 + "<p style='color: red'>beyond what is judged", True),
    ],
)
def test_what_brings_no_colours_follows_the_theme(html: str, follows: bool) -> None:
    assert _follows_theme(html) is follows


def test_choices_with_titles_are_a_list_to_choose_from() -> None:
    titled = [{"const": "a", "title": "All leads"}, {"const": "f"}, {"title": "no value"}, 7]
    schema = {"type": "object", "properties": {"to": {"type": "string", "oneOf": titled}}, "required": ["to"]}
    (field,) = form_fields(schema)
    assert (field.kind, field.choices) == ("choice", (("a", "All leads"), ("f", "f")))


async def test_while_the_journal_cannot_be_written_nothing_is_made_that_the_console_could_not_show(
    default_environment: Environment, tmp_path: Path
) -> None:
    keys = [f"alice:sha256:{hash_key(ALICE)}", f"bob:sha256:{hash_key(BOB)}"]
    async with (
        opened_place(default_environment, tmp_path, api_keys=keys, pool_size=0) as own,
        own.person(ALICE) as alice,
    ):
        sessions = own.runtime.sessions
        first = sessions.find_open((await alice.post("/api/v1/sessions", json={})).json()["session_id"])
        assert first is not None
        # What SQLite says when its file may not grow is what it says on a full disk.
        sessions.journal._connection.execute("PRAGMA max_page_count = 1")
        await own.agent.execute("print('y' * 3_000_000)")
        assert sessions.journal.is_failing
        for _ in range(2):
            refused = await alice.post("/api/v1/sessions", json={})
            assert refused.json()["error"]["code"] == "busy"
            assert "the journal, from which this is read, cannot be written now" in refused.text
        assert sessions.of(first.principal) == [first]
        made = sessions.create(first.principal)
        seen = await alice.get(f"/api/v1/sessions/{made.id}")
        assert "cannot be written now" in seen.text
        async with own.person(BOB) as bob:
            assert (await bob.get(f"/api/v1/sessions/{made.id}")).status_code == 404
