"""The redactor of a session: its code and model see tokens for personal data and secrets, the host keeps the values.

`redact` is for what comes in from tools, `redact_own_text` for what goes out to callers, `fill_in` for arguments on
their way to a tool. Each reads a text once, from left to right: what it puts in is not read again.
A secret of the host (`${secret:NAME}`) comes from the variable `BELLJAR_SECRET_NAME`, or else from the file of the
setting `secrets_file`, and is read when it is needed, so that a change takes effect at once. Knows nothing of events or
calls.
"""

import json
import logging
import math
import os
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel

from belljar.errors import InvalidArgument, SecretRefused, SettingsError
from belljar.json_values import TooManyValues, check_values
from belljar.outputs.events import (
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    MimeBundle,
    Notice,
    Raised,
    Stream,
    with_clean_text,
)
from belljar.outputs.recorder import TailBuffer
from belljar.privacy.detectors import BREAKERS, LONGEST_CHARS, Detector, Span, disjoint, masked
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.vault import TEXT, TOKEN, TokenCounter, TokenLog, Value, Vault
from belljar.settings.sources import SECRETS

REFERENCE = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_]{0,63})\}")
FIELD = "field"
_HOSTS_OWN = "host:"
"""Prefix of a secret's name, in the kind of a span that has the secret's value."""
# Nobody writes JSON that is deeper than this.
MAX_DEPTH = 200
TOO_DEEP = "[TOO DEEP]"
TOO_MANY = "[TOO MANY VALUES]"
NO_VALUE = "[FIELD]"
# A shorter secret would be found in ordinary text.
SHORTEST_SECRET = 6
# An answer may have thousands of texts, and the file of secrets need not be read for each.
SECRETS_S = 1.0
# No personal number is longer, and turning an integer into text takes time that grows with the square of its length.
_WIDEST_BITS = 128
log = logging.getLogger(__name__)

_PUT_IN = re.compile(f"{TOKEN.pattern}|{REFERENCE.pattern}")
SECTION = "privacy"
"""The policy's table with the privacy rules."""
MAX_CHARS = 4_000_000
"""Characters of one execution's streams that are searched: a million take a second, longer if all are numbers."""
MAX_S = 30.0
"""Processor time for one execution, limited because code may choose output that takes long to search."""
_ENOUGH = f"output past {MAX_CHARS:,} characters is not shown, because it is not searched for personal data"
_TOO_SLOW = "the rest is not shown, because searching it for personal data takes too long"


class Secrets:
    """The host's secrets: where they come from, and their current values."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._read_at = -1
        self._kept: dict[str, str] = {}

    def check(self) -> None:
        """Raise SettingsError for a file that cannot be read, before anyone needs it."""
        self._from_file()

    def get(self, name: str) -> str | None:
        """Return the value; None where the host has none of that name."""
        return os.environ.get(SECRETS + name) or self._from_file().get(name)

    def _from_file(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            changed_at = self._file.stat().st_mtime_ns
            if changed_at != self._read_at:
                values = tomllib.loads(self._file.read_text("utf-8"))
                self._kept = {name: value for name, value in values.items() if isinstance(value, str)}
                self._read_at = changed_at
        except (OSError, ValueError) as error:
            # Without the error's own text, which may quote a line of the file.
            raise SettingsError(
                f"secrets_file {self._file} cannot be read: {type(error).__name__}",
                hint='Write one NAME = "value" a line, as TOML has it',
            ) from None
        return self._kept


@cache
def _no_rules() -> tuple[PrivacyRules, Detector]:
    """Return what sessions without rules share."""
    return (rules := PrivacyRules()), Detector(rules)


class SessionRedactor:
    """The redactor of one session. Without rules it lets everything through and knows no secret."""

    def __init__(
        self, rules: PrivacyRules | None = None, secrets: Secrets | None = None, vault: Vault | None = None
    ) -> None:
        self.vault = Vault() if vault is None else vault
        self._secrets = secrets or Secrets()
        self._is_in_use = rules is not None
        self._obey(rules or _no_rules()[0])
        self._token_log: TokenLog | None = None
        self._named: dict[str, str] = {}
        self._looked_at = -math.inf

    def _obey(self, rules: PrivacyRules) -> None:
        self.rules = rules
        self.detector = Detector(rules) if self._is_in_use else _no_rules()[1]
        self.redacts_outputs = self._is_in_use and bool(self.detector) and self._hides("outputs")
        """Whether there is anything to look for in the session's own output."""

    def hide_also(self, rules: PrivacyRules) -> None:
        """Hide from now on what these rules name, too; call it between two cells, as often as you like."""
        joined = self.rules.joined(rules)
        if not self._is_in_use or joined != self.rules:
            self._is_in_use = True
            self._obey(joined)

    def fork(self, numbers: TokenCounter | None = None) -> "SessionRedactor":
        """Return the redactor of a session that goes on from this one's state: the same tokens so far, then its own."""
        return SessionRedactor(self.rules if self._is_in_use else None, self._secrets, self.vault.copy(numbers))

    def save(self, path: Path) -> None:
        """Save what tokens stand for while the session hibernates; nothing is written for a session that has none."""
        if len(self.vault) or self.vault.secrets:
            self.vault.save(path)

    def restore(self, path: Path) -> None:
        """Load what was saved, and delete the file."""
        if path.exists():
            self.vault.restore(path)
            path.unlink(missing_ok=True)
            for name in [name for name, value in self.vault.secrets.items() if not value]:
                self.vault.fill(name, self._secret_value(name) or "")

    def log_to(self, token_log: TokenLog) -> None:
        """Record all tokens and secrets in a log that outlives the server as long as somebody holds its descriptor.

        The redactor owns the log from now on.
        """
        self._token_log = token_log
        self.vault.log_to(token_log)

    @property
    def log_descriptor(self) -> int:
        """The token log's descriptor, for another process to hold; negative without a log."""
        return self._token_log.descriptor if self._token_log else -1

    def close(self) -> None:
        """Close the token log; may be called twice."""
        if self._token_log is not None:
            self._token_log.close()

    # In: what tools answer

    def redact_text(self, text: str) -> str:
        """Return a tool's text as the session may see it. Text that looks like a token of ours becomes a token itself.

        Text from outside must not pass for a token or for the name of a secret, and must come back as it was.
        """
        if not self._is_in_use:
            return text
        ours = [found for found in _PUT_IN.finditer(text) if self._is_given_out(found.group())]
        imitations = [found for found in _PUT_IN.finditer(text) if not self._is_given_out(found.group())]
        return self._replaced(text, _spans(imitations), _spans(ours), is_searched=self._hides("tools"))

    def redact(self, value: Any) -> Any:
        """Return a tool's answer as the session may see it: tokens for named fields and for what is found in text."""
        return self._hide_deep(value, is_named=False, depth=0) if self._is_in_use else value

    def _hide_deep(self, value: Any, *, is_named: bool, depth: int) -> Any:
        if depth > MAX_DEPTH:
            return TOO_DEEP
        if isinstance(value, dict):
            items = [(str(key), below) for key, below in cast("dict[str, Any]", value).items()]
            return {
                self.redact_text(key): self._hide_deep(below, is_named=is_named or self._names(key), depth=depth + 1)
                for key, below in items
            }
        if isinstance(value, list | tuple):
            return [self._hide_deep(below, is_named=is_named, depth=depth + 1) for below in cast("list[Any]", value)]
        return self._hide_named(value) if is_named else self._hide_leaf(value, depth)

    def _hide_named(self, value: Any) -> Any:
        if not isinstance(value, str | int | float) or value == "" or self._is_given_out(value):
            return value
        if isinstance(value, int) and value.bit_length() > _WIDEST_BITS:
            return NO_VALUE  # too wide to be stored, so nothing brings it back
        return self.vault.token(FIELD, self._without_secrets(value) if isinstance(value, str) else value)

    def _hide_leaf(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            try:
                parsed = self._json_with_fields(value)
            except TooManyValues:
                return TOO_MANY
            if parsed is None:
                return self.redact_text(value)
            hidden = self._hide_deep(parsed, is_named=False, depth=depth + 1)
            return value if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
        if not isinstance(value, int) or value.bit_length() > _WIDEST_BITS or not self._hides("tools"):
            return value
        found = self.detector.find(str(value))
        is_all = len(found) == 1 and found[0].end - found[0].start == len(str(value))
        return self.vault.token(found[0].kind, value) if is_all else value

    def _names(self, key: str) -> bool:
        return self._hides("tools") and self.rules.hides_field(key)

    def _is_given_out(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.vault.given_out

    def _json_with_fields(self, text: str) -> Any:
        """Return the JSON value of a text if field names in it matter; None for other text. Raises TooManyValues."""
        if not self.rules.fields or not self._hides("tools") or text.lstrip()[:1] not in ("{", "["):
            return None
        check_values(text)
        try:
            parsed: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return cast("Any", parsed) if isinstance(parsed, dict | list) else None

    # Out: what callers see

    def redact_own_text(self, text: str) -> str:
        """Return the session's own text as callers may see it; tokens in it stay what they are."""
        if not self._hides("outputs"):
            return text
        return self._replaced(text, [], _spans(TOKEN.finditer(text)), is_searched=True)

    def redact_own_value(self, value: Any, depth: int = 0) -> Any:
        """Return a JSON value that the session shows, as callers may see it."""
        if depth > MAX_DEPTH:
            return TOO_DEEP
        if isinstance(value, str):
            return self.redact_own_text(value)
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.redact_own_text(str(key)): self.redact_own_value(below, depth + 1) for key, below in items}
        if isinstance(value, list):
            return [self.redact_own_value(below, depth + 1) for below in cast("list[Any]", value)]
        return value

    # On the way to a tool

    def fill_in(self, value: Any, *, server: str, tool: str) -> Any:
        """Return arguments with values in place of the tokens that this tool may have, and its secrets filled in."""
        return self._reveal_deep(value, server, tool, 0) if self._is_in_use else value

    def _reveal_deep(self, value: Any, server: str, tool: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise InvalidArgument(f"the arguments are nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, str):
            return self._reveal_text(value, server, tool)
        if isinstance(value, dict):
            return {
                str(self._reveal_text(str(key), server, tool)): self._reveal_deep(below, server, tool, depth + 1)
                for key, below in cast("dict[str, Any]", value).items()
            }
        if isinstance(value, list | tuple):
            return [self._reveal_deep(below, server, tool, depth + 1) for below in cast("list[Any]", value)]
        return value

    def _reveal_text(self, text: str, server: str, tool: str) -> Value:
        whole = TOKEN.fullmatch(text)
        if whole is not None:
            return self._revealed(text, server, tool)  # a number comes back as a number
        return _PUT_IN.sub(lambda found: self._put_in(found, server, tool), text)

    def _put_in(self, found: re.Match[str], server: str, tool: str) -> str:
        secret = REFERENCE.fullmatch(found.group())
        if secret is not None:
            return self._secret(secret.group(1), server, tool)
        value = self._revealed(found.group(), server, tool)
        return value if isinstance(value, str) else json.dumps(value)

    def _revealed(self, token: str, server: str, tool: str) -> Value:
        known = self.vault.value(token)
        if known is None:
            return token
        kind, value = known
        if kind == TEXT or self.rules.may_have(kind, server, tool):
            return value
        self.vault.allow_back(token)
        return token

    def _secret(self, name: str, server: str, tool: str) -> str:
        if not self.rules.may_use(name, server, tool):
            raise SecretRefused(
                f"it may not have the secret {name}",
                hint="Use a tool that the policy names for it under [privacy.secrets], or write the text without ${…}",
            )
        value = self._secret_value(name)
        if value is None:
            raise SecretRefused(
                f"the secret {name} is not set on the host",
                hint=f"Ask the operator to set {SECRETS}{name}, or to put it into secrets_file",
            )
        if len(value) >= SHORTEST_SECRET:
            self.vault.fill(name, value)
        return value

    def _secret_value(self, name: str) -> str | None:
        try:
            return self._secrets.get(name)
        except SettingsError as error:
            log.warning("%s", error)  # it has a path of the host, which the session must not see
            return None

    def _hosts_secrets(self) -> set[tuple[str, str]]:
        """Return the secrets that the policy names, as they are now, and those given out, as they were then."""
        if self.rules.secrets and time.monotonic() - self._looked_at >= SECRETS_S:
            named = {name: self._secret_value(name) for name in self.rules.secrets}
            self._named = {name: value for name, value in named.items() if value and len(value) >= SHORTEST_SECRET}
            self._looked_at = time.monotonic()
        # A secret that has changed since is in it with both values.
        return {*self._named.items(), *((name, value) for name, value in [*self.vault.secrets.items()] if value)}

    # One pass

    def _hides(self, place: Literal["tools", "outputs"]) -> bool:
        return self._is_in_use and place in self.rules.where

    def _without_secrets(self, text: str) -> str:
        return self._replaced(text, [], [], is_searched=False)

    def _replaced(self, text: str, marks: list[Span], left: list[Span], *, is_searched: bool) -> str:
        """Return the text with a token for each of `marks` and for what is found; what is `left` is not searched."""
        fixed = disjoint((*self._secret_spans(text), *marks))
        found = self.detector.find(masked(text, (*fixed, *left))) if is_searched and self.detector else []
        parts: list[str] = []
        place = 0
        for span in sorted((*fixed, *found), key=lambda each: each.start):
            parts += (text[place : span.start], self._standing_for(span.kind, text[span.start : span.end]))
            place = span.end
        return "".join((*parts, text[place:])) if parts else text

    def _standing_for(self, kind: str, value: str) -> str:
        if kind.startswith(_HOSTS_OWN):
            return f"[SECRET {kind.removeprefix(_HOSTS_OWN)}]"
        return self.vault.token(kind, value)

    def _secret_spans(self, text: str) -> Iterator[Span]:
        """Yield where a secret's value stands: a tool that was given one may repeat it, to another session too."""
        for name, value in self._hosts_secrets():
            place = text.find(value)
            while place >= 0:
                yield Span(place, place + len(value), _HOSTS_OWN + name)
                place = text.find(value, place + 1)


def _spans(found: Iterable[re.Match[str]]) -> list[Span]:
    return [Span(match.start(), match.end(), TEXT) for match in found]


class Redactors:
    """The maker of redactors, by the policy's section; without one each redactor lets everything through."""

    def __init__(self, sections: Mapping[str, BaseModel], secrets_file: str = "") -> None:
        rules = sections.get(SECTION)
        self._rules = rules if isinstance(rules, PrivacyRules) else None
        self._secrets = Secrets(Path(secrets_file) if secrets_file else None)
        self._secrets.check()

    @property
    def are_in_use(self) -> bool:
        """Whether redactors have anything that must outlive the server."""
        return self._rules is not None

    def new_redactor(self, numbers: Path | None = None) -> SessionRedactor:
        """Return a session's redactor; its token numbers are reserved in the file `numbers`, or only in memory."""
        return SessionRedactor(self._rules, self._secrets, Vault(TokenCounter(numbers)))


# Forms that come as base64, most of them without text to search.


class RedactionScreen:
    """The screen of one execution; see `belljar.outputs.recorder.OutputScreen`."""

    def __init__(self, redactor: SessionRedactor) -> None:
        self._redactor = redactor
        self._tails: dict[Literal["stdout", "stderr"], TailBuffer] = {}
        self._seen_chars = 0
        self._spent_s = 0.0

    def screen(self, event: Event) -> list[Event]:
        """Return the event with tokens for personal data; the end of a stream that may go on is held back."""
        if self._spent_s > MAX_S:
            return (
                [] if isinstance(event, Stream | DisplayData | ExecuteResult | CommMessage) else self._screened(event)
            )
        started_s = time.thread_time()
        passed = self._screened(event)
        self._spent_s += time.thread_time() - started_s
        return [*passed, Notice(_TOO_SLOW)] if self._spent_s > MAX_S else passed

    def _screened(self, event: Event) -> list[Event]:
        if isinstance(event, Stream):
            if self._seen_chars > MAX_CHARS:
                return []
            self._seen_chars += len(event.text)
            if self._seen_chars > MAX_CHARS:
                return [*self.flush(), Notice(_ENOUGH)]
            text = self._tail(event.name).feed(event.text)
            return [replace(event, text=self._redactor.redact_own_text(text))] if text else []
        return [*self.flush(), self._redacted(event)]

    def flush(self) -> Iterator[Event]:
        """Yield the ends of both streams, which were held back."""
        for name, tail in self._tails.items():
            if text := tail.flush():
                yield Stream(name, self._redactor.redact_own_text(text))

    def _tail(self, name: Literal["stdout", "stderr"]) -> TailBuffer:
        if name not in self._tails:
            self._tails[name] = TailBuffer(BREAKERS, longest=LONGEST_CHARS, spans=self._spans)
        return self._tails[name]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        return ((span.start, span.end) for span in self._redactor.detector.find(text))

    def _redacted(self, event: Event) -> Event:
        redact = self._redactor.redact_own_text
        match event:
            case DisplayData() | ExecuteResult():
                return replace(event, data=self._bundle(event.data))
            case Raised():
                lines = [redact(line) for line in event.traceback]
                return Raised(redact(event.name), redact(event.message), lines)
            case InputRequest():
                form = cast("MimeBundle", self._redactor.redact_own_value(event.form)) if event.form else None
                return replace(event, prompt=redact(event.prompt), form=form)
            case CommMessage():
                redact_deep = self._redactor.redact_own_value
                return replace(event, data=redact_deep(event.data), metadata=redact_deep(event.metadata))
            case _:
                return event

    def _bundle(self, bundle: MimeBundle) -> MimeBundle:
        return with_clean_text(bundle, self._redactor.redact_own_value)
