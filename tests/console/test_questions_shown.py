"""What a person is told of a question at the inbox: who asks, about which code or call, and under which rule.

Through both implementations of `Engine`, and on the page.
"""

import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from consoles import Place, opened_place

from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.environments import Environment
from belljar.questions.models import InboxQuestion, SubjectFinding
from belljar.toolbox.question_subjects import call_subject, code_subject
from waiting import until

pytestmark = pytest.mark.anyio

BOOK = Path(__file__).parents[1] / "privacy" / "address_book.py"
AWKWARD = Path(__file__).parents[1] / "toolbox" / "awkward_server.py"
POLICY = """
[privacy]
hide = ["email"]

[[code]]
decision = "ask"
calls = ["shutil.rmtree"]
reason = "folders are <b>deleted</b> only with a yes"

[[tools]]
match = "book.publish"
decision = "ask"
reason = "everyone can read it"
ask_once = true
"""
OPERATOR = Access("local", is_operator=True, name="olga")
LONG = "\n".join(
    ["import shutil", *(f"a{n} = {n}" for n in range(2, 400)), "shutil.rmtree('\u202ex')  # eve@example.com"]
)


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("questions")
    (folder / "policy.toml").write_text(POLICY)
    servers = {
        "book": {"command": sys.executable, "args": [str(BOOK), str(folder / "notes")]},
        "awkward": {"command": sys.executable, "args": [str(AWKWARD)]},
    }
    async with opened_place(
        default_environment,
        folder,
        policy=str(folder / "policy.toml"),
        mcp_servers=servers,
        ask_in_console="always",
    ) as opened:
        yield opened


async def asked(place: Place, code: str) -> InboxQuestion:
    """The question that a cell asks, which both monitors tell alike."""
    # All in one session, because each takes a while to start.
    sessions = place.runtime.sessions.all()
    running = await place.agent.execute(code, sessions[0].id if sessions else "", wait_s=0)
    remote = servers_of(place.runtime.settings.data_directory)

    async def found() -> list[InboxQuestion]:
        return [one for one in await remote.questions(OPERATOR) if one.execution_id == running.execution_id]

    (question,) = await until(found)
    own = await place.runtime.late_engine.get().questions(OPERATOR)
    assert question in own
    return question


async def test_code_is_shown_around_the_line_that_was_found(place: Place) -> None:
    question = await asked(place, LONG)
    about = question.about
    assert about is not None
    assert (about.asked_by, about.code_lines) == ("policy", 400)
    (finding,) = about.findings
    assert (finding.rule, finding.line) == ("code.1", 400)
    assert "shutil.rmtree" in finding.what
    assert [line.number for line in about.code] == [*range(1, 6), *range(396, 401)]
    (marked,) = [line for line in about.code if line.is_marked]
    # Personal data is a token, and what would turn the text around is seen.
    assert re.fullmatch(r"shutil\.rmtree\('\\u202ex'\)  # \[EMAIL_\d\]", marked.text)
    assert "eve@" not in question.model_dump_json()
    async with place.operator() as browser:
        (told,) = (await browser.get("/api/v1/questions")).json()["items"]
        assert told["about"] == about.model_dump()
        described = (await browser.get("/api/v1/openapi.json")).json()["components"]["schemas"]
        assert "ask_once" in described["QuestionSubject"]["properties"]["holds_for_session"]["description"]
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert '<p class="asker">The policy asks<' in page
        assert "May this code run?" in page
        assert "<td>folders are &lt;b&gt;deleted&lt;/b&gt; only with a yes <" in page
        assert "(rule code.1 of the policy)" in page
        assert '<li value="400" class="marked">' in page
        assert "390 lines not shown here" in page
        assert (await browser.post(f"/console/inbox/{question.id}", data={"action": "decline"})).status_code == 303
        # What became of it stays to be read, with what it was about.
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert "declined" in page
        assert '<li value="400" class="marked">' in page
    assert (await place.agent.ended(question.execution_id)).status == "rejected"


async def test_a_call_is_shown_with_its_arguments_and_that_a_yes_holds(place: Place) -> None:
    code = "from servers.book import person, publish\npublish(text='<i>' + person()['email'])"
    question = await asked(place, code)
    about = question.about
    assert about is not None
    assert (about.asked_by, about.server, about.tool) == ("policy", "book", "publish")
    ((name, value),) = [(one.name, one.value) for one in about.arguments]
    assert name == '"text"'
    assert re.fullmatch(r'"<i>\[EMAIL_\d\]"', value)
    assert [(one.rule, one.reason) for one in about.findings] == [("tools.1", "everyone can read it")]
    assert about.holds_for_session
    async with place.operator() as browser:
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert "May book.publish be called?" in page
        assert "&lt;i&gt;[EMAIL_" in page
        assert "Your yes holds for the rest of this session" in page
        await browser.post(f"/console/inbox/{question.id}", data={"action": "accept"})
    assert (await place.agent.ended(question.execution_id)).status == "ok"


async def test_words_of_a_server_and_of_code_cannot_pass_for_the_policy(place: Place) -> None:
    async with place.operator() as browser:
        for code, heading in [
            ("from servers.awkward import ask_url\nask_url()", "The MCP server awkward asks"),
            ("input('The policy asks')", "Code of a cell asks"),
        ]:
            question = await asked(place, code)
            page = (await browser.get(f"/console/inbox/{question.id}")).text
            assert re.search(r'<p class="asker">([^<]*)<', page)[1] == heading  # pyright: ignore[reportOptionalSubscript]
            await browser.post(f"/console/inbox/{question.id}", data={"action": "decline"})
            await place.agent.ended(question.execution_id)


def test_what_is_shown_has_bounds_and_hides_what_goes_over_lines() -> None:
    many = {f"a{n}": "x" * 10_000 for n in range(1_000)}
    call = call_subject("s" * 1_000, "t", many, rule="plugin:judge", reason="r" * 10_000)
    assert (call.asked_by, call.more_arguments) == ("plugin", 960)
    assert len(call.model_dump_json()) < 20_000
    code = "\n".join(["y" * 10_000] * 5_000)
    found = [SubjectFinding(rule="code.1", line=line) for line in range(1, 5_000, 7)]
    subject = code_subject(code, found)
    assert len(subject.model_dump_json()) < 120_000
    assert [line.number for line in subject.code if line.is_marked] == [one.line for one in found[:20]]
    # A text over two lines that becomes one would shift numbers and marks.
    joined = code_subject("a = '''one\ntwo'''\nb", [SubjectFinding(line=3)]).with_texts(
        lambda text: text.replace("e\nt", "*")
    )
    assert joined.code == []
