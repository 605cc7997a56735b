"""The webhook of the inbox, told by real HTTP servers on loopback: what they get, and all that they may do wrong."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import FORKS, connected, opened_runtime

from belljar import metrics
from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.questions.inbox import Inbox, WaitingQuestion
from belljar.questions.models import InboxQuestion, Question, QuestionSubject, SubjectLine
from belljar.questions.webhook import MAX_WAITING, open_webhook
from belljar.settings import load_settings
from waiting import until

pytestmark = pytest.mark.anyio

KEY = bytes(range(32))
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"
TOKEN = "T0KEN-of-the-chat"
OK = b"HTTP/1.1 204 No Content\r\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
LIMIT_S = 20.0


@dataclass
class Told:
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def is_signed(self) -> bool:
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        return f"v1,{expected}" in self.headers["webhook-signature"].split(" ")


@dataclass
class Receiver:
    """A server that answers with `answers`, one for each request and the last for all others; None is silence."""

    answers: list[bytes | None]
    endless: bytes = b""
    """What it sends after an answer until the connection ends."""
    port: int = 0
    told: list[Told] = field(default_factory=list[Told])
    hung_up: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/{TOKEN}?sig={TOKEN}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = [line.partition(": ") for line in head.splitlines()[1:] if line]
            headers = {name.lower(): value for name, _, value in lines}
            assert head.startswith(f"POST /hooks/{TOKEN}?sig={TOKEN} ")
            self.told.append(Told(headers, await reader.readexactly(int(headers["content-length"]))))
            answer = self.answers[min(len(self.told), len(self.answers)) - 1]
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                while self.endless:
                    writer.write(self.endless)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.hung_up += 1
            writer.close()


@asynccontextmanager
async def open_receiver(*answers: bytes | None, endless: bytes = b"") -> AsyncGenerator[Receiver]:
    receiver = Receiver([*answers], endless)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()


class NoTable:
    """Records nothing."""

    def put(self, question: InboxQuestion) -> None: ...
    def end(self, question: InboxQuestion) -> None: ...
    def find(self, question_id: str) -> InboxQuestion | None: ...
    def ended(self, owner: str | None, most: int) -> list[InboxQuestion]:
        return []


@asynccontextmanager
async def told_inbox(receiver: Receiver, *, deadline_s: float = 10.0, **given: Any) -> AsyncGenerator[Inbox]:
    """An inbox whose questions a receiver is told of, three times tried without pauses."""
    values = {"inbox_webhook": receiver.url, "egress": [f"127.0.0.1:{receiver.port}"]} | given
    settings = load_settings({"inbox_webhook_secret": SECRET, **values})
    inbox = Inbox(NoTable(), "always")
    inbox.console_url = lambda: "https://belljar.example.org"
    async with open_webhook(settings, inbox, "name of {}".format, deadline_s=deadline_s, pauses_s=(0, 0)):
        yield inbox


def put(
    inbox: Inbox, question_id: str, message: str = "Go on?", about: QuestionSubject | None = None
) -> WaitingQuestion:
    """Put a question. Nothing of it may wait for the webhook, so this is no coroutine."""
    at = "2026-11-03T20:26:10.344Z"
    entry = InboxQuestion(id=question_id, owner="local", session_id="s", message=message, about=about, put_at=at)
    waiting = WaitingQuestion(Question(message), entry)
    inbox.put(waiting)
    return waiting


def counted(before: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    return {name: now - before[name,] for (name,), now in metrics.webhooks.values.items() if now != before[name,]}


@pytest.fixture
def before() -> dict[tuple[str, ...], int]:
    return dict(metrics.webhooks.values)


async def test_a_cell_that_asks_is_told_with_a_signature_that_others_can_check(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with open_receiver(OK) as receiver:
        options: dict[str, Any] = {"inbox_webhook": receiver.url, "inbox_webhook_secret": SECRET}
        options |= {"egress": [f"127.0.0.1:{receiver.port}"], "ask_in_console": "always", **FORKS}
        async with opened_runtime(default_environment, tmp_path, **options) as runtime, connected(runtime) as caller:
            asking = await caller.execute("secret = 'x-1'; input('Go on?\\nline two')", wait_s=0)
            (told,) = await until(lambda: receiver.told)
            assert told.is_signed
            assert abs(int(told.headers["webhook-timestamp"]) - time.time()) < 60
            content = told.content
            assert content.pop("timestamp").startswith("20")
            assert content == {
                "type": "question.waiting",
                "text": "A question waits for a person: `belljar inbox` on the machine of the server shows it",
                "data": {
                    "question_id": f"{asking.execution_id}-1",
                    "kind": "code",
                    "title": "Go on?",
                    "session_id": asking.session_id,
                    "session_name": "",
                    "url": "",
                },
            }


async def test_neither_code_nor_words_of_whoever_asks_come_where_chat_programs_read_marks(before: Any) -> None:
    code = QuestionSubject(asked_by="policy", code=[SubjectLine(number=1, text="os.remove('x')")])
    async with open_receiver(OK) as receiver, told_inbox(receiver) as inbox:
        put(inbox, "code-1", "May this code run? os.remove('x')", code)
        put(inbox, "long-1", "os.remove('x') may run?", QuestionSubject(asked_by="policy"))
        put(inbox, "run:step/<!here>", "workflow w, step s: <!channel>\u202e " + "x" * 5_000)
        await until(lambda: counted(before) == {"sent": 3})
    contents = [told.content for told in receiver.told]
    assert not [told for told in receiver.told if b"os.remove" in told.body or len(told.body) > 2_000]
    assert [content["data"]["title"] for content in contents[:2]] == ["May this code run?"] * 2
    assert contents[2]["data"]["title"].startswith("workflow w, step s: <!channel>\ufffd xxx")
    assert len(contents[2]["data"]["title"]) == 120
    link = "https://belljar.example.org/console/inbox/run%3Astep%2F%3C%21here%3E"
    assert contents[2]["text"] == f"A question waits for a person: {link}"
    assert contents[2]["data"]["session_name"] == "name of s"


async def test_what_is_not_taken_is_sent_again_with_the_same_id(before: Any) -> None:
    async with open_receiver(BUSY, b"no HTTP\r\n\r\n", OK) as receiver, told_inbox(receiver) as inbox:
        put(inbox, "a-1")
        await until(lambda: counted(before) == {"sent": 1})
        put(inbox, "b-1")
        await until(lambda: counted(before) == {"sent": 2})
    first, second, third, other = receiver.told
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == third.headers["webhook-id"]
    assert other.headers["webhook-id"] != third.headers["webhook-id"]
    assert first.headers["webhook-id"].startswith("msg_")
    assert "." not in first.headers["webhook-id"]
    assert all(told.is_signed for told in receiver.told)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "did not answer within 0.1 s"),
        (b"", "broke the rules of HTTP or stopped half-way"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", "the URL answered 500"),
        (b"HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "a redirect, which is not followed"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 200_000, "broke the rules of HTTP"),
    ],
    ids=["hangs", "hangs up", "fails", "redirects", "endless header"],
)
async def test_a_receiver_that_does_wrong_is_given_up_and_told_of_in_one_line_without_its_url(
    answer: bytes | None, said: str, before: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_receiver(answer) as receiver,
        told_inbox(receiver, deadline_s=0.1 if answer is None else 10) as inbox,
    ):
        put(inbox, "a-1")
        put(inbox, "b-1")
        await until(lambda: counted(before) == {"failed": 2})
    assert len(receiver.told) == 6
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said in line
    assert TOKEN not in caplog.text


async def test_an_answer_without_end_is_not_read(before: Any) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"
    async with open_receiver(head, endless=b"x" * 65_536) as receiver, told_inbox(receiver) as inbox:
        put(inbox, "a-1")
        await until(lambda: counted(before) == {"sent": 1})
        await until(lambda: receiver.hung_up)


async def test_a_receiver_that_wants_no_more_gets_no_more(before: Any, caplog: pytest.LogCaptureFixture) -> None:
    gone = b"HTTP/1.1 410 Gone\r\n\r\n"
    async with open_receiver(gone) as receiver, told_inbox(receiver) as inbox:
        put(inbox, "a-1")
        await until(lambda: counted(before) == {"failed": 1})
        put(inbox, "b-1")
    assert len(receiver.told) == 1
    assert counted(before) == {"failed": 1, "dropped": 1}
    assert "answered 410" in caplog.text


async def test_nothing_waits_for_a_receiver_that_hangs_neither_questions_nor_the_end(before: Any) -> None:
    async with open_receiver(None) as receiver:
        with anyio.fail_after(LIMIT_S):
            async with told_inbox(receiver, deadline_s=10 * LIMIT_S) as inbox:
                put(inbox, "first")
                await until(lambda: receiver.told)
                for number in range(2 * MAX_WAITING):
                    put(inbox, f"many-{number}")
        assert counted(before) == {"dropped": MAX_WAITING + 1}
        put(inbox, "after the end")


async def test_what_waits_no_more_is_not_sent(before: Any) -> None:
    async with open_receiver(OK) as receiver, told_inbox(receiver) as inbox:
        put(inbox, "answered").end("withdrawn")
        put(inbox, "waits")
        await until(lambda: counted(before) == {"sent": 1})
    assert [told.content["data"]["question_id"] for told in receiver.told] == ["waits"]


@pytest.mark.parametrize(
    ("url", "said", "private"),
    [
        ("https://10.255.255.1/", "a private address", False),
        ("https://169.254.169.254/", "an address that is not public", True),
        ("https://100.100.100.200/", "a metadata service", True),
        ("https://127.9.9.9:9/", "could not be reached", False),
    ],
)
async def test_the_address_of_an_allowed_host_is_looked_at_before_it_is_reached(
    url: str, said: str, private: bool, before: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = ["10.255.255.1:443", "169.254.169.254:443", "100.100.100.200:443", "127.9.9.9:9"]
    options: dict[str, Any] = {"inbox_webhook": url, "egress": hosts, "egress_allow_private": private}
    async with open_receiver(OK) as receiver, told_inbox(receiver, **options) as inbox:
        put(inbox, "a-1")
        await until(lambda: counted(before) == {"failed": 1})
    assert said in caplog.text


async def test_a_host_that_egress_does_not_allow_and_a_missing_secret_stop_the_start() -> None:
    async with open_receiver(OK) as receiver:
        for given, said in (
            ({"egress": ["chat.example.com:443"]}, "leads to 127.0.0.1:"),
            ({"inbox_webhook_secret": ""}, "no inbox_webhook_secret"),
        ):
            with pytest.raises(SettingsError, match=said) as refused:
                async with told_inbox(receiver, **given):
                    pass
            assert TOKEN not in f"{refused.value.message} {refused.value.hint}"
    assert receiver.told == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inbox_webhook", f"http://chat.example.com/{TOKEN}"),
        ("inbox_webhook", f"ftp://chat.example.com/{TOKEN}"),
        ("inbox_webhook", f"https://me:{TOKEN}@chat.example.com/"),
        ("inbox_webhook", f"https://[{TOKEN}/"),
        ("inbox_webhook", f"https:///{TOKEN}"),
        ("inbox_webhook_secret", TOKEN),
        ("inbox_webhook_secret", f"whsec_{base64.b64encode(TOKEN[:8].encode()).decode()}"),
        ("inbox_webhook_secret", f"whsec_{TOKEN}=ä"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_without_being_told(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({name: value})
    assert name in refused.value.message
    assert TOKEN not in f"{refused.value.message} {refused.value.hint}"


def test_a_server_without_a_webhook_does_not_import_it() -> None:
    code = "import sys, belljar.runtime; sys.exit('belljar.questions.webhook' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
