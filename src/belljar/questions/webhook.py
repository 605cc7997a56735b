"""Tells a URL of each new question that waits for a person, signed as Standard Webhooks are.

Nothing waits for it: questions are noted in a bounded table, one task sends them one after the other with a time limit
and a few retries, and what was not sent when the server ends is dropped. What waits no more is not sent. The format:
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import asyncio
import hashlib
import hmac
import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from belljar import metrics
from belljar.egress.rules import authority, parse_rules, rule_of_url
from belljar.errors import BelljarError, SettingsError
from belljar.files.https import Reach, post_https, try_connection
from belljar.outputs.terminal_text import printable
from belljar.questions.inbox import Inbox
from belljar.questions.models import InboxQuestion
from belljar.settings import Settings, variable

MAX_WAITING: Final = 100
"""How many questions wait to be sent; further ones are dropped and counted."""
DEADLINE_S: Final = 15.0
PAUSES_S: Final = (1.0, 5.0, 25.0)
_LONGEST_PAUSE_S: Final = 60
_MAX_TITLE_CHARS: Final = 120
_GONE: Final = 410

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_webhook(
    settings: Settings,
    inbox: Inbox,
    name_of: Callable[[str], str],
    *,
    deadline_s: float = DEADLINE_S,
    pauses_s: Sequence[float] = PAUSES_S,
) -> AsyncGenerator[None]:
    """Send new questions of an inbox to the URL of the settings; `name_of` returns the name of a session by its id.

    Raises `SettingsError` where `egress` does not allow its host, or there is no secret.
    """
    url, secret, reach = _target(settings)
    sender = _Sender(url, b64decode(secret.removeprefix("whsec_")), reach, deadline_s, pauses_s)

    def hear(question: InboxQuestion) -> None:
        sender.hear(question, name_of(question.session_id), inbox.console_url())

    inbox.on_change.append(hear)
    sending = asyncio.get_running_loop().create_task(sender.send_all(), name="inbox webhook")
    try:
        yield
    finally:
        inbox.on_change.remove(hear)
        sending.cancel()
        await asyncio.wait([sending])


async def try_webhook(settings: Settings) -> str:
    """Connect to the host of the webhook, and send nothing; return what is known of it then."""
    url, _, reach = _target(settings)
    await try_connection(url, reach=reach, deadline_s=DEADLINE_S)
    presence = "" if settings.ask_in_console == "always" else "; cells ask only while somebody looks at the console"
    return f"{urlsplit(url).hostname} can be reached, and messages are signed{presence}"


def _target(settings: Settings) -> tuple[str, str, Reach]:
    """Return where to send to, the secret to sign with and what may be reached, or refuse settings that do not fit."""
    url, secret = settings.inbox_webhook.get_secret_value(), settings.inbox_webhook_secret.get_secret_value()
    reach = Reach(parse_rules(settings.egress), settings.egress_allow_private, allow_own=True)
    rule = rule_of_url(url)
    if rule is None or reach.refusal(rule.host, rule.port):
        where = authority(rule.host, rule.port) if rule is not None else "no host"
        raise SettingsError(f"inbox_webhook leads to {where}, which egress does not allow", hint=f"Add {where} to it")
    if not secret:
        raise SettingsError(
            "inbox_webhook is set, and there is no inbox_webhook_secret to sign with",
            hint=f"Set {variable('inbox_webhook_secret')} to whsec_ and what `openssl rand -base64 32` prints",
        )
    return url, secret, reach


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """What is told of one question. Its id is the same in every attempt, and after a restart."""

    id: str
    body: bytes


def _message(question: InboxQuestion, session_name: str, console: str) -> _Message:
    """Return what is told of a question: never its message, code, arguments or fields."""
    about = question.about
    asked_by = about.asked_by if about is not None else "workflow" if question.kind == "workflow" else "code"
    is_judged = asked_by in ("policy", "plugin") and not (about is not None and about.tool)
    # Without code to show, the title would be the first line of a message that quotes it.
    title = "May this code run?" if is_judged else question.title
    url = f"{console}/console/inbox/{quote(question.id, safe='')}" if console else ""
    data = {
        "question_id": question.id,
        "kind": asked_by,
        "title": printable(title)[:_MAX_TITLE_CHARS],
        "session_id": question.session_id,
        "session_name": printable(session_name)[:_MAX_TITLE_CHARS],
        "url": url,
    }
    # Chat programs show `text` and read marks in it, so it has no words of whoever asks.
    text = f"A question waits for a person: {url or '`belljar inbox` on the machine of the server shows it'}"
    content = {"type": "question.waiting", "timestamp": question.put_at, "text": text, "data": data}
    digest = hashlib.sha256(f"{question.id} {question.put_at}".encode(errors="surrogatepass")).hexdigest()
    return _Message(f"msg_{digest[:32]}", json.dumps(content, separators=(",", ":")).encode())


class _Sender:
    """Sends what it hears of, one question after the other."""

    def __init__(self, url: str, key: bytes, reach: Reach, deadline_s: float, pauses_s: Sequence[float]) -> None:
        self._url, self._key, self._reach = url, key, reach
        self._deadline_s, self._pauses_s = deadline_s, pauses_s
        self._waiting: dict[str, _Message] = {}
        self._news = asyncio.Event()
        self._is_gone = False
        self._logged = ""

    def hear(self, question: InboxQuestion, session_name: str, console: str) -> None:
        """Note a question that is to be sent, or that one waits no more."""
        if question.state != "waiting":
            self._waiting.pop(question.id, None)
        elif self._is_gone:
            metrics.webhooks.add("dropped")
        elif len(self._waiting) >= MAX_WAITING:
            metrics.webhooks.add("dropped")
            self._log(f"{MAX_WAITING} questions wait to be sent, so further ones are dropped")
        else:
            self._waiting[question.id] = _message(question, session_name, console)
            self._news.set()

    async def send_all(self) -> None:
        """Send questions until the URL wants no more; runs until it is cancelled."""
        while not self._is_gone:
            self._news.clear()
            while self._waiting and not self._is_gone:
                question_id, message = next(iter(self._waiting.items()))
                await self._send(question_id, message)
                if self._waiting.get(question_id) is message:
                    del self._waiting[question_id]
            await self._news.wait()

    async def _send(self, question_id: str, message: _Message) -> None:
        for pause_s in (*self._pauses_s, None):
            problem, wanted_s = await self._attempt(message)
            if not problem:
                metrics.webhooks.add("sent")
                self._logged = ""
                return
            self._log(problem)
            if pause_s is None or self._is_gone:
                break
            await asyncio.sleep(max(pause_s, wanted_s))
            if self._waiting.get(question_id) is not message:
                return
        metrics.webhooks.add("failed")

    async def _attempt(self, message: _Message) -> tuple[str, float]:
        """Send once; return why it was not taken, empty if it was, and how long the receiver wants to be left alone."""
        at = str(int(time.time()))
        signed = hmac.digest(self._key, f"{message.id}.{at}.".encode() + message.body, "sha256")
        headers = [
            ("Content-Type", "application/json"),
            ("webhook-id", message.id),
            ("webhook-timestamp", at),
            ("webhook-signature", f"v1,{b64encode(signed).decode()}"),
        ]
        try:
            status, after = await post_https(
                self._url, message.body, headers, reach=self._reach, deadline_s=self._deadline_s
            )
        except BelljarError as error:
            return error.message, 0
        if 200 <= status < 300:
            return "", 0
        if status == _GONE:
            self._is_gone = True
            return "the URL answered 410: nothing is sent there until this server starts again", 0
        what = ", a redirect, which is not followed" if 300 <= status < 400 else ""
        is_short = after.isascii() and after.isdigit() and len(after) < 6
        return f"the URL answered {status}{what}", min(int(after), _LONGEST_PAUSE_S) if is_short else 0

    def _log(self, problem: str) -> None:
        """Log why questions are not sent, once for each reason until one is sent again."""
        if problem != self._logged:
            log.warning("inbox_webhook: %s", problem)
        self._logged = problem
