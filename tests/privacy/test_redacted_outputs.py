"""What executions say, redacted: in pieces, in all forms, and in sessions as users have them."""

import base64
import os
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from personal_data import mixed_texts

import belljar
from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.outputs.events import (
    ClearOutput,
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    Raised,
    Stream,
)
from belljar.outputs.recorder import Screens
from belljar.privacy import redaction as screen_module
from belljar.privacy.redaction import MAX_CHARS, RedactionScreen, SessionRedactor
from belljar.privacy.rules import PrivacyRules
from belljar.runtime import open_runtime
from shared_environment import settings_with

POLICY = '[privacy]\nhide = ["email", "phone", "card", "iban", "national_id"]\n'
RULES = PrivacyRules(hide=("email", "phone", "card", "iban", "national_id"))


def shown(screen: RedactionScreen, *events: Event) -> list[Event]:
    return [*(passed for event in events for passed in screen.screen(event)), *screen.flush()]


@settings(max_examples=40 if os.environ.get("BELLJAR_LONG") else 12, deadline=None, database=None)
@given(mixed_texts(), st.lists(st.integers(1, 30), max_size=30))
def test_pieces_of_a_stream_show_what_the_whole_would(mixed: tuple[str, list[str]], sizes: list[int]) -> None:
    text, values = mixed
    pieces: list[Event] = []
    place = 0
    for size in (*sizes, len(text)):
        pieces.append(Stream("stdout", text[place : place + size]))
        place += size
    said = "".join(
        event.text for event in shown(RedactionScreen(SessionRedactor(RULES)), *pieces) if isinstance(event, Stream)
    )
    assert said == SessionRedactor(RULES).redact_own_text(text)
    assert not [value for value in values if value in said]


def test_the_streams_do_not_hold_each_other_back_and_end_before_what_follows() -> None:
    screen = RedactionScreen(SessionRedactor(RULES))
    events: list[Event] = [Stream("stdout", "4111 1111"), Stream("stderr", "warning\n"), Stream("stdout", " 1111 1111")]
    assert shown(screen, *events, ClearOutput()) == [
        Stream("stderr", "warning\n"),
        Stream("stdout", "[CARD_1]"),
        ClearOutput(),
    ]


def test_what_widgets_say_is_covered() -> None:
    said = CommMessage("comm_open", "id", {"state": {"value": "ann@example.com", "n": 1}}, metadata={"by": "bob@x.org"})
    (covered,) = shown(RedactionScreen(SessionRedactor(RULES)), said)
    assert covered == replace(said, data={"state": {"value": "[EMAIL_1]", "n": 1}}, metadata={"by": "[EMAIL_2]"})


def test_every_form_of_text_is_covered_and_pictures_are_not_touched() -> None:
    screen = RedactionScreen(SessionRedactor(RULES))
    mail = "ann@example.com"
    picture = "4111111111111111"
    bundle = {"text/plain": mail, "text/html": f"<td>{mail}</td>", "application/json": {mail: [mail, 1]}}
    covered = {
        "text/plain": "[EMAIL_1]",
        "text/html": "<td>[EMAIL_1]</td>",
        "application/json": {"[EMAIL_1]": ["[EMAIL_1]", 1]},
    }
    events: list[Event] = [
        DisplayData({**bundle, "image/png": picture}),
        ExecuteResult({**bundle}),
        Raised(f"Bad{mail}", f"no {mail}", [f"raise x({mail!r})"]),
        InputRequest(f"is it {mail}?", is_password=True),
    ]
    assert shown(screen, *events) == [
        DisplayData({**covered, "image/png": picture}),
        ExecuteResult({**covered}),
        Raised("[EMAIL_2]", "no [EMAIL_1]", ["raise x('[EMAIL_1]')"]),
        InputRequest("is it [EMAIL_1]?", is_password=True),
    ]


def test_text_that_is_given_a_binary_type_is_covered() -> None:
    screen = RedactionScreen(SessionRedactor(RULES))
    encoded = base64.b64encode(b"to: ann@example.com").decode()
    (covered,) = shown(screen, DisplayData({"image/png": "ann@example.com", "application/octet-stream": encoded}))
    hidden = base64.b64encode(b"to: [EMAIL_1]").decode()
    assert covered == DisplayData({"image/png": "[EMAIL_1]", "application/octet-stream": hidden})


def test_output_without_end_is_not_shown_unsearched() -> None:
    screen = RedactionScreen(SessionRedactor(RULES))
    line = "x" * 999 + "\n"
    said = shown(
        screen, Stream("stdout", line), Stream("stdout", line * (MAX_CHARS // 1_000)), Stream("stdout", "more\n")
    )
    assert len(said) == 2
    assert said[0] == Stream("stdout", line)
    assert "is not shown" in str(said[1])


def test_output_that_takes_too_long_to_search_is_not_shown_unsearched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "MAX_S", 0.001)
    numbers = "+123456" * 500
    screen = RedactionScreen(SessionRedactor(RULES))
    said = shown(screen, Stream("stdout", f"{numbers}\n"), Stream("stdout", "more\n"), DisplayData({"text/plain": "x"}))
    assert len(said) == 2
    assert "takes too long" in str(said[1])
    (raised,) = screen.screen(Raised("E", "ann@example.com", []))
    assert raised == Raised("E", "[EMAIL_1]", [])


@pytest.mark.anyio
async def test_what_may_take_long_to_search_is_not_searched_in_the_loop() -> None:
    places: list[int] = []

    class Notes:
        def screen(self, event: Event) -> list[Event]:
            places.append(threading.get_ident())
            return [event]

        def flush(self) -> list[Event]:
            return []

    await Screens([Notes()]).apply(Stream("stdout", "+123456" * 100))
    assert places != [threading.get_ident()]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[belljar.Engine]:
    folder = tmp_path_factory.mktemp("redacted")
    (folder / "policy.toml").write_text(POLICY)
    async with belljar.open_engine(
        data_directory=folder / "data",
        environment=str(default_environment.python),
        policy=str(folder / "policy.toml"),
        preload=[],
        pool_size=0,
    ) as engine:
        yield engine


@pytest.mark.anyio
async def test_a_session_shows_tokens_wherever_it_shows_anything(engine: belljar.Engine) -> None:
    code = """
import sys
from IPython.display import HTML, display
sys.stdout.write('card 4111 11'); sys.stdout.flush()
display(HTML('<b>ann@example.com</b>'))
sys.stdout.write('4111 1111'); sys.stdout.flush(); sys.stdout.write(' 1111 1111'); sys.stdout.flush()
print('\\nbob@example.com', file=sys.stderr)
address = 'ann@example.com'
"""
    async with engine.open_session() as session:
        said = await session.execute(code)
        assert (said.status, said.stdout, said.stderr) == ("ok", "card 4111 11[CARD_1]", "\n[EMAIL_2]\n")
        assert [display.text for display in said.displays] == ["<b>[EMAIL_1]</b>"]
        assert (await session.execute("address")).result == "'[EMAIL_1]'"
        raised = await session.execute("raise ValueError(address)")
        assert raised.error == "ValueError: [EMAIL_1]"
        assert "ann@example.com" not in raised.model_dump_json()
        assert (await session.execute("address == 'ann@' + 'example.com'")).result == "True"


@pytest.mark.anyio
async def test_what_was_held_back_is_shown_when_the_process_dies(engine: belljar.Engine) -> None:
    code = "import os, sys\nprint('last words of ann@example.com', end='', flush=True)\nos._exit(3)"
    async with engine.open_session() as session:
        said = await session.execute(code)
    assert (said.status, said.stdout) == ("died", "last words of [EMAIL_1]")


@pytest.mark.anyio
async def test_a_question_is_asked_and_recorded_with_tokens(engine: belljar.Engine) -> None:
    asked: list[str] = []

    async def answer(prompt: str) -> str:
        asked.append(prompt)
        return "bob@example.com"

    async with engine.open_session() as session:
        said = await session.execute("input('for ann@example.com? ')", on_input=answer)
    assert asked == ["for [EMAIL_1]? "]
    assert said.result == "'[EMAIL_2]'"


@pytest.mark.anyio
async def test_a_session_that_slept_knows_its_tokens_and_leaves_no_vault_behind(
    default_environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    chosen = settings_with(
        data_directory=tmp_path / "data",
        environment=str(default_environment.python),
        policy=str(tmp_path / "policy.toml"),
        preload=[],
        pool_size=0,
    )
    async with open_runtime(chosen) as runtime:
        session = runtime.sessions.create("someone")
        await session.submit(make_cell(chosen, "print('ann@example.com')")).wait(60)
        fork, _ = await runtime.sessions.fork(session.id, "someone")
        assert fork.redactor.redact_own_text("bob@example.com ann@example.com") == "[EMAIL_2] [EMAIL_1]"
        vault = session.folders.vault
        assert not vault.exists()
    assert vault.exists()
    async with open_runtime(chosen) as runtime:
        woken = runtime.sessions.get(session.id, "someone")
        assert not vault.exists()
        assert woken.redactor.redact_own_text("carl@example.com ann@example.com") == "[EMAIL_2] [EMAIL_1]"
        await runtime.sessions.clear(session.id, "someone")
        assert not vault.parent.exists()
