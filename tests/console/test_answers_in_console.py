"""What people can do with a question beside yes and no: change what they allow, tell the agent why, answer several."""

import json
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from calls import FORKS
from consoles import Place, opened_place

from belljar.console.forms import form_fields, sent_values
from belljar.environments import Environment
from belljar.errors import InvalidArgument, OperatorNeeded
from belljar.questions.models import InboxQuestion
from belljar.questions.schema import checked_values
from waiting import until

pytestmark = pytest.mark.anyio

BOOK = Path(__file__).parents[1] / "privacy" / "address_book.py"
POLICY = """
[privacy]
hide = ["email"]

[[code]]
decision = "deny"
calls = ["os.getlogin"]

[[code]]
decision = "ask"
calls = ["os.getcwd"]

[[code]]
decision = "ask"
calls = ["os.getpgrp"]
answered_in = "console"

[[tools]]
match = "book.publish"
when = 'arguments.text.startsWith("to all")'
decision = "ask"
answered_in = "console"

[[tools]]
match = "book.publish"
when = 'arguments.text.startsWith("rare")'
max_calls = 1

[[tools]]
match = "book.publish"
decision = "ask"
require = [{expression = 'size(arguments.text) < 40', reason = "short notes only"}]
"""


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "policy.toml").write_text(POLICY)
    book = {"command": sys.executable, "args": [str(BOOK), str(folder / "notes")]}
    async with opened_place(
        default_environment,
        folder,
        policy=str(folder / "policy.toml"),
        mcp_servers={"book": book},
        ask_in_console="always",
        **FORKS,
    ) as opened:
        yield opened


async def asked(place: Place, code: str) -> InboxQuestion:
    sessions = place.runtime.sessions.all()
    running = await place.agent.execute(code, sessions[0].id if sessions else "", wait_s=0)

    def found() -> list[InboxQuestion]:
        return [one for one in place.runtime.sessions.inbox.waiting(None) if one.execution_id == running.execution_id]

    (question,) = await until(found)
    return question


async def test_the_code_that_runs_and_is_on_record_is_the_code_that_was_allowed(place: Place) -> None:
    question = await asked(place, "import os\nos.getcwd() and 'asked'")
    async with place.operator() as browser:
        changed = "import os\r\nos.getcwd() and 'allowed'"
        form = {"action": "accept", "edited": changed, "said": "not that\none"}
        answer = await browser.post(f"/console/inbox/{question.id}", data=form)
        assert answer.status_code == 303, answer.text
        result = await place.agent.ended(question.execution_id)
        assert result.result == "'allowed'"
        told = " ".join(one.text for one in result.notices)
        assert "changed what it asked about" in told
        assert "says: not that one" in told
        assert "this ran instead of the cell's code: \"import os\\nos.getcwd() and 'allowed'\"" in told
        entry = (await browser.get(f"/api/v1/executions/{question.execution_id}")).json()
        assert entry["code"] == "import os\nos.getcwd() and 'allowed'"
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert "allowed with changes" in page
        assert "Allowed instead" in page
        assert "asked&#39;" in page
        kept = place.runtime.sessions.inbox.find(question.id, None)
        assert (kept.edited, kept.said) == ("import os\nos.getcwd() and 'allowed'", "not that\none")
        assert kept.answered_by


async def test_the_policy_judges_changed_code_again(place: Place) -> None:
    question = await asked(place, "import os\nos.getcwd()")
    async with place.operator() as browser:
        form = {"action": "accept", "edited": "import os\nos.getlogin()"}
        await browser.post(f"/console/inbox/{question.id}", data=form)
        result = await place.agent.ended(question.execution_id)
        assert result.status == "rejected"
        assert re.search(r"the code that \w+ put in its place did not run", str(result.error))


async def test_who_is_no_operator_changes_nothing_into_what_only_operators_may_allow(place: Place) -> None:
    inbox = place.runtime.sessions.inbox
    question = await asked(place, "import os\nos.getcwd()")
    changed = "import os\nos.getpgrp() and 'allowed'"
    own = {"action": "accept", "by": "eve", "where": "console"}
    await inbox.answer(question.id, "local", edited=changed, **own)

    def again() -> list[InboxQuestion]:
        return [one for one in inbox.waiting(None) if one.execution_id == question.execution_id]

    (second,) = await until(again)
    assert second.in_console
    with pytest.raises(OperatorNeeded):
        await inbox.answer(second.id, "local", **own)
    await inbox.answer(second.id, None, **own)
    assert (await place.agent.ended(question.execution_id)).result == "'allowed'"
    question = await asked(
        place,
        "from servers.book import publish\n"
        "try: said = publish(text='to one')\nexcept Exception as error: said = error\nstr(said)",
    )
    assert not question.in_console
    await inbox.answer(question.id, "local", edited=json.dumps({"text": "to all of them"}), **own)
    assert "the arguments that eve gave" in str((await place.agent.ended(question.execution_id)).result)


async def test_arguments_are_changed_checked_and_sent_as_they_were_allowed(place: Place) -> None:
    code = (
        "from servers.book import publish\n"
        "try: said = publish(text='first')\nexcept Exception as error: said = error\nstr(said)"
    )
    path = Path(place.runtime.settings.mcp_servers["book"]["args"][1])
    async with place.operator() as browser:
        question = await asked(place, code)
        assert question.about is not None
        assert json.loads(question.about.editable) == {"text": "first"}
        for wrong, why in [("[]", "no JSON object"), ("{", "are not JSON"), ("[" * 100_000, "the limit is")]:
            answer = await browser.post(f"/console/inbox/{question.id}", data={"action": "accept", "edited": wrong})
            assert (answer.status_code, why in answer.text) == (400, True), answer.text
        edited = json.dumps({"text": "second"})
        await browser.post(f"/console/inbox/{question.id}", data={"action": "accept", "edited": edited})
        assert (await place.agent.ended(question.execution_id)).status == "ok"
        assert "second" in path.read_text()
        assert "first" not in path.read_text()
        rare = {"text": "rare"}
        for edited, why in [
            ({"text": "x" * 50}, "the arguments that"),
            ({"nothing": 1}, "nothing"),
            (rare, "rare"),
            (rare, "the arguments that"),
        ]:
            question = await asked(place, code)
            form = {"action": "accept", "edited": json.dumps(edited)}
            await browser.post(f"/console/inbox/{question.id}", data=form)
            assert why in str((await place.agent.ended(question.execution_id)).result)


async def test_the_agent_reads_why_somebody_declined(place: Place) -> None:
    async with place.operator() as browser:
        question = await asked(place, "import os\nos.getcwd()")
        form = {"action": "decline", "said": "use the folder data instead"}
        await browser.post(f"/console/inbox/{question.id}", data=form)
        result = await place.agent.ended(question.execution_id)
        assert "says: use the folder data instead" in str(result.error)
        listed = (await browser.get("/console/inbox")).text
        assert '<span class="chip chip-declined">declined</span>' in listed
        too_long = {"action": "accept", "values": {}, "said": "x" * 3_000}
        assert (await browser.post(f"/api/v1/questions/{question.id}", json=too_long)).status_code == 400


async def test_what_has_personal_data_in_it_cannot_be_changed(place: Place) -> None:
    question = await asked(place, "import os\nos.getcwd(), 'eve@example.com'")
    assert question.about is not None
    assert question.about.editable == ""
    async with place.operator() as browser:
        assert "Change the code" not in (await browser.get(f"/console/inbox/{question.id}")).text
        answer = await browser.post(f"/console/inbox/{question.id}", data={"action": "accept", "edited": "1"})
        assert "cannot be changed" in answer.text
        await browser.post(f"/console/inbox/{question.id}", data={"action": "decline"})
    await place.agent.ended(question.execution_id)


async def test_several_are_answered_at_once_and_of_two_people_one_is_first(place: Place) -> None:
    made = [(await place.agent.execute("import os\nos.getcwd()", wait_s=0)).execution_id for _ in range(3)]
    inbox = place.runtime.sessions.inbox
    await until(lambda: len(inbox.waiting(None)) == 3)
    ids = [one.id for one in inbox.waiting(None)]
    async with place.operator() as one, place.operator() as other:
        page = (await one.get("/console/inbox")).text
        assert page.count('form="several"') == 3
        codes: list[int] = []

        async def answer(browser: object, action: str) -> None:
            sent = await browser.post("/console/inbox", data={"question": ids, "action": action})  # pyright: ignore
            codes.append(sent.status_code)

        async with anyio.create_task_group() as people:
            people.start_soon(answer, one, "accept")
            people.start_soon(answer, other, "decline")
        assert sorted(codes) in ([303, 400], [400, 400])
        assert (await one.post("/console/inbox", data={"action": "accept"})).status_code == 400
    for execution_id in made:
        assert (await place.agent.ended(execution_id)).status in ("ok", "rejected")
    assert {inbox.find(each, None).state for each in ids} <= {"answered", "declined"}


async def test_yes_and_no_are_buttons_and_choices_are_told_but_no_typed_text(place: Place) -> None:
    fields = {"ok": {"type": "boolean", "title": "Delete the cache?"}}
    ask = "import forms\nforms.ask({'type': 'object', 'properties': %r, 'required': %r}, message='Sure?')"
    async with place.operator() as browser:
        question = await asked(place, ask % (fields, ["ok"]))
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert 'value="yes"' in page
        assert 'value="no"' in page
        await browser.post(f"/console/inbox/{question.id}", data={"action": "no"})
        assert "False" in str((await place.agent.ended(question.execution_id)).result)
        assert "answered: no" in (await browser.get("/console/inbox")).text
        fields = {"to": {"type": "string", "enum": ["Finance", "All"]}, "note": {"type": "string"}}
        question = await asked(place, ask % (fields, ["to", "note"]))
        page = (await browser.get(f"/console/inbox/{question.id}")).text
        assert page.count(" required>") + page.count(" required ") >= 2
        lacking = await browser.post(f"/console/inbox/{question.id}", data={"value-to": "All", "value-note": ""})
        assert (lacking.status_code, "lacks note" in lacking.text) == (400, True)
        await browser.post(f"/console/inbox/{question.id}", data={"value-to": "All", "value-note": "hunter2"})
        await place.agent.ended(question.execution_id)
        kept = place.runtime.sessions.inbox.find(question.id, None)
        assert (kept.state, kept.chosen) == ("answered", "All")


def test_an_empty_line_answers_input_and_no_other_required_text() -> None:
    for field, is_answer in [({"type": "string", "minLength": 0}, True), ({"type": "string"}, False)]:
        schema = {"type": "object", "properties": {"answer": field}, "required": ["answer"]}
        values = sent_values(schema, {"value-answer": ""})
        assert [one.is_required for one in form_fields(schema)] == [not is_answer]
        if is_answer:
            assert checked_values(schema, values) == {"answer": ""}
        else:
            with pytest.raises(InvalidArgument, match="lacks answer"):
                checked_values(schema, values)
