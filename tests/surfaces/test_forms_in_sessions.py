"""The module `forms` in sessions: a person is asked for what is missing as one form; pages are under the egress."""

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import ERAS, LEGACY, MODERN, connected, opened_runtime
from mcp.types import ElicitRequestFormParams, ElicitResult

from belljar.environments import Environment
from belljar.runtime import Runtime
from waiting import until

sys.path.insert(0, str(Path(__file__).parents[1] / "inside"))
import form_pages
import pdf_forms
from form_pages import Site

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "title": "Where"},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "room": {"type": "string", "enum": ["single", "double"]},
        "note": {"type": "string"},
    },
    "required": ["city", "nights", "room"],
}


PLUGIN = """
from pathlib import Path
from belljar.hooks import FormTarget, hookimpl

@hookimpl
def form_targets():
    module = Path(__file__).parent.parent / "letter_target.py"
    return [FormTarget("letter", module), FormTarget("pdf", module)]
"""
TARGET = """
from forms import Field, Form

class Letter(Form):
    kind = "letter"

    def _would_send(self, button):
        return None

    def _send(self, button):
        return self._receipt("sent", answer={"text": f"to {self.values['to']}"})

def open_form(source, options):
    if str(source).startswith("letter:"):
        return Letter(source, [Field("to", {"type": "string"}, is_required=True)])
"""


class Person:
    """Answers from a list: values, or None to decline."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.answers = [*answers]
        self.asked: list[ElicitRequestFormParams] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params)
        answer = self.answers.pop(0)
        return ElicitResult(action="decline") if answer is None else ElicitResult(action="accept", content=answer)


@pytest.fixture(scope="module")
def site() -> Any:
    with form_pages.served() as site:
        yield site


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str,
    default_environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
    site: Site,
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    (folder / "policy.toml").write_text('[privacy]\nhide = ["email"]\nwhere = ["outputs"]\n')
    egress = [site.url.removeprefix("http://")]
    (folder / "plugins").mkdir()
    (folder / "plugins" / "letters.py").write_text(PLUGIN)
    (folder / "letter_target.py").write_text(TARGET)
    async with opened_runtime(
        default_environment,
        folder,
        egress=egress,
        egress_allow_private=True,
        policy=str(folder / "policy.toml"),
        plugins_directory=str(folder / "plugins"),
        fork_start=True,
        hibernate=True,
        sweep_interval_s=3600,
    ) as runtime:
        yield runtime


@pytest.mark.parametrize("era", ERAS)
async def test_only_what_is_missing_or_wrong_is_asked_for_as_one_form(
    runtime: Runtime, shared_session: str, era: str
) -> None:
    person = Person({"nights": 40, "room": "single"}, {"nights": "3"})
    code = f"import forms\nforms.ask({SCHEMA!r}, {{'city': 'Oslo', 'room': 'suite'}}, 'Book a room')"
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute(code, shared_session)
    assert result.result == "{'city': 'Oslo', 'nights': 3, 'room': 'single'}"
    first, second = person.asked
    assert first.message == "Book a room\n- room: 'suite' is not one of 'single', 'double'"
    assert first.requested_schema["properties"] == {
        "nights": {"type": "integer", "minimum": 1, "maximum": 30, "title": "nights"},
        "room": {
            "type": "string",
            "title": "room",
            "oneOf": [{"const": "single", "title": "single"}, {"const": "double", "title": "double"}],
        },
    }
    assert second.message == "Book a room\n- nights: 40 is more than 30"
    assert list(second.requested_schema["properties"]) == ["nights"]


async def test_nobody_to_ask_and_a_person_who_declines_are_told_apart(runtime: Runtime, shared_session: str) -> None:
    code = f"import forms\nforms.ask({SCHEMA!r}, {{'city': 'Oslo', 'room': 'single'}})"
    async with connected(runtime) as caller:
        alone = await caller.execute(code, shared_session)
    async with connected(runtime, elicitation_callback=Person(None)) as caller:
        declined = await caller.execute(code, shared_session)
    assert alone.error == (
        "NobodyToAsk: nobody can be asked here, so pass these values in the code: "
        "'nights' is required, takes a whole number from 1 to 30"
    )
    assert declined.error == "Declined: the person did not give nights"
    assert not [line for line in declined.traceback if "forms/questions.py" in line]


async def test_the_clock_stands_still_while_a_person_fills_in_a_form(runtime: Runtime, shared_session: str) -> None:
    class Thinker(Person):
        async def __call__(self, context: Any, params: Any) -> ElicitResult:
            with anyio.move_on_after(1.5):
                await anyio.sleep_forever()
            return await super().__call__(context, params)

    code = f"forms.ask({SCHEMA!r}, {{'city': 'Oslo', 'room': 'single'}})['nights']"
    async with connected(runtime, LEGACY, elicitation_callback=Thinker({"nights": 2})) as caller:
        await caller.execute("import forms", shared_session)
        result = await caller.execute(code, shared_session, timeout_s=1.2)
    assert (result.status, result.result) == ("ok", "2")


async def test_more_fields_than_one_question_can_have_are_asked_for_in_several(
    runtime: Runtime, shared_session: str
) -> None:
    options = [f"{n} {'x' * 90}" for n in range(60)]
    fields: dict[str, Any] = {f"f{n}": {"type": "string", "enum": options} for n in range(7)}
    fields["last"] = {"type": "boolean"}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    person = Person(*({f"f{n}": options[n] for n in range(7)} | {"last": True} for _ in range(8)))
    async with connected(runtime, elicitation_callback=person) as caller:
        result = await caller.execute(f"import forms\nlen(forms.ask({schema!r}))", shared_session)
        name = await caller.execute(
            "forms.ask({'type': 'object', 'properties': {'n' * 30_000: {}}, 'required': ['n' * 30_000]})",
            shared_session,
        )
    assert result.result == "8", result.error
    assert len(person.asked) > 1
    assert name.error is not None
    assert "is too large for a question" in name.error


async def test_a_password_is_never_part_of_a_form_and_a_bad_schema_is_told(
    runtime: Runtime, shared_session: str
) -> None:
    schema = {"type": "object", "properties": {"word": {"type": "string", "writeOnly": True}}, "required": ["word"]}
    person = Person({"answer": "s3cret"})
    async with connected(runtime, MODERN, elicitation_callback=person) as caller:
        result = await caller.execute(f"import forms\nlen(forms.ask({schema!r})['word'])", shared_session)
        nested = {"type": "object", "properties": {"a": {"type": "object"}}}
        bad = await caller.execute(f"forms.ask({nested!r})", shared_session)
    assert result.result == "6"
    assert "s3cret" not in result.model_dump_json()
    assert list(person.asked[0].requested_schema["properties"]) == ["answer"]
    assert bad.error == "ValueError: the field 'a' is of type 'object': a form is flat"


async def test_a_document_is_filled_in_with_the_person_s_answers_and_the_receipt_says_who_gave_what(
    runtime: Runtime,
) -> None:
    person = Person({"agree": True, "plan": "pro"})
    async with connected(runtime, elicitation_callback=person) as caller:
        session = await caller.new_session()
        (await runtime.sessions.reach(session, "local")).workspace.write("claim.pdf", pdf_forms.claim())
        code = (
            "import forms, json\nform = forms.open('claim.pdf').ask({'name': 'Ada', 'country': 'NO'})\n"
            "receipt = form.save('filled.pdf')\nprint(json.dumps(receipt))"
        )
        result = await caller.execute(code, session)
    assert result.status == "ok", result.error
    receipt = json.loads(result.stdout)
    assert {name: field["by"] for name, field in receipt["fields"].items()} == {
        "name": "code",
        "address.city": "the form",
        "agree": "the person",
        "plan": "the person",
        "country": "code",
    }
    assert "filled.pdf" in [file.name for file in result.files]
    assert person.asked[0].message.startswith("claim.pdf needs 2 values from you.\n- agree: has to be ticked")


async def test_a_page_is_reached_under_the_session_s_egress_and_personal_data_are_tokens_in_its_receipt(
    runtime: Runtime, site: Site
) -> None:
    values = {"name": "Ada", "mail": "ada@example.com", "country": "NO", "terms": True}
    code = (
        # Sessions reach what is on their own loopback without the proxy; the site is on the host's.
        "import os; del os.environ['NO_PROXY'], os.environ['no_proxy']\n"
        f"import forms\nform = forms.open({site.url + '/signup'!r}, form='signup').fill({values!r})\n"
        "print(form.preview())\nform.submit()"
    )
    async with connected(runtime) as caller:
        result = await caller.execute(code)
        away = await caller.execute("import forms\nforms.open('http://example.com/')", result.session_id)
    assert result.status == "ok", result.error
    assert dict(site.sent[-1])["mail"] == "ada@example.com"
    assert result.result is not None
    assert "'mail': {'value': '[EMAIL_1]', 'by': 'code'}" in result.result
    assert "mail [E-mail] = [EMAIL_1]   (by code)" in result.stdout
    assert away.error is not None
    assert "egress to example.com:80 is not allowed" in away.error


async def test_a_forged_form_ends_the_kernel_and_not_the_server(runtime: Runtime) -> None:
    code = (
        "from IPython import get_ipython\n"
        "get_ipython().ask_form('?', {'type': 'object', 'properties': {'a': {'type': 'object', 'properties': {}}}})"
    )
    async with connected(runtime, elicitation_callback=Person()) as caller:
        result = await caller.execute(code)
        assert result.status == "died"
        assert "malformed message" in str(result.error)
        assert (await caller.execute("1")).status == "ok"


async def test_a_plugin_s_target_runs_in_sessions_and_cannot_take_the_place_of_ours(
    runtime: Runtime, shared_session: str
) -> None:
    code = (
        "import forms, os\nreceipt = forms.open('letter:x').fill({'to': 'Ada'}).submit()\n"
        "[receipt['kind'], receipt['answer']['text'], forms.targets(), os.listdir(os.environ['BELLJAR_FORM_TARGETS'])]"
    )
    async with connected(runtime) as caller:
        result = await caller.execute(code, shared_session)
    assert result.result == "['letter', 'to Ada', ['letter', 'browser', 'pdf', 'http'], ['letter.py']]"
    (record,) = [each for each in runtime.plugins.records if each.name == "letters"]
    assert "'pdf' is belljar's own and cannot be replaced" in record.error


async def test_a_form_that_is_half_filled_in_goes_along_into_forks_and_through_sleep(runtime: Runtime) -> None:
    assert await runtime.starter.wait_until_warm(runtime.settings.environment)
    async with connected(runtime) as caller:
        session_id = await caller.new_session()
        session = await runtime.sessions.reach(session_id, "local")
        session.workspace.write("claim.pdf", pdf_forms.claim())
        code = "import forms\nform = forms.open('claim.pdf').fill({'name': 'Ada', 'plan': 'pro'})"
        assert (await caller.execute(code, session_id)).status == "ok"
        fork = (await caller.fields("fork_session", session_id=session_id))["session_id"]
        session.lease._idle_s = 0.0  # pyright: ignore[reportPrivateUsage]

        async def is_asleep() -> bool:
            return session_id in await runtime.sessions.sweep()

        await until(is_asleep)
        for place in (fork, session_id):
            code = "form.fill({'agree': True, 'country': 'NO'}).save('done.pdf')['fields']['name'], forms.targets()[0]"
            result = await caller.execute(code, place)
            assert result.result == "({'value': 'Ada', 'by': 'code'}, 'letter')", result.error
