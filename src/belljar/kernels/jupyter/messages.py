"""Jupyter's messages (jupyter-client.readthedocs.io, "Messaging"): signed on the way out, checked on the way in.

Whatever comes in was written by code that may be hostile, so the signature and the form are checked before anyone sees
it. Kinds that we have no use for, comms among them, are skipped. Does not know how messages travel.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Literal, TypeVar

from jupyter_client.session import DELIM, Session
from pydantic import BaseModel, Field, JsonValue

from belljar.errors import KernelDied
from belljar.json_values import MAX_VALUES, has_too_many_values


class StreamText(BaseModel):
    """Text on a stream."""

    name: str
    text: str


class _Transient(BaseModel):
    display_id: str | None = None


class DisplayContent(BaseModel):
    """A rich output."""

    data: dict[str, JsonValue]
    transient: _Transient = _Transient()


class DisplayUpdate(DisplayContent):
    """A rich output that replaces an earlier one."""


class ResultContent(BaseModel):
    """The last expression's value."""

    data: dict[str, JsonValue]


class ClearContent(BaseModel):
    """The front end is to clear the output."""

    wait: bool = False


class ErrorContent(BaseModel):
    """The cell raised."""

    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []


class Status(BaseModel):
    """Whether the kernel is busy or idle."""

    execution_state: str


class InputContent(BaseModel):
    """The cell waits for input from a person."""

    prompt: str = ""
    password: bool = False


class Payload(BaseModel):
    """Something for the front end to do; the source `page` shows text."""

    source: str = ""
    data: dict[str, JsonValue] = {}


class ExecuteReply(ErrorContent):
    """The cell has ended."""

    status: str
    execution_count: int | None = Field(default=None, ge=0, le=2**31)
    payload: list[Payload] = []
    user_expressions: dict[str, dict[str, JsonValue]] = {}


class CompleteReply(BaseModel):
    """The names that fit at the cursor."""

    matches: list[str] = []
    cursor_start: int = 0
    cursor_end: int = 0


class InspectReply(BaseModel):
    """The description of a name."""

    found: bool = False
    data: dict[str, JsonValue] = {}


class IsCompleteReply(BaseModel):
    """Whether code is a whole cell."""

    status: Literal["complete", "incomplete", "invalid", "unknown"] = "unknown"
    indent: str = Field(default="", max_length=1_000)


class KernelInfo(BaseModel):
    """The kernel answers; nothing of what it says about itself is used."""


Content = (
    StreamText
    | DisplayContent
    | ResultContent
    | ClearContent
    | ErrorContent
    | Status
    | InputContent
    | ExecuteReply
    | CompleteReply
    | InspectReply
    | IsCompleteReply
    | KernelInfo
)
_KINDS: dict[str, type[Content]] = {
    "stream": StreamText,
    "display_data": DisplayContent,
    "update_display_data": DisplayUpdate,
    "execute_result": ResultContent,
    "clear_output": ClearContent,
    "error": ErrorContent,
    "status": Status,
    "input_request": InputContent,
    "execute_reply": ExecuteReply,
    "complete_reply": CompleteReply,
    "inspect_reply": InspectReply,
    "is_complete_reply": IsCompleteReply,
    "kernel_info_reply": KernelInfo,
}


class _Header(BaseModel):
    msg_id: str
    msg_type: str


class _Parent(BaseModel):
    msg_id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a kind we know; `parent_id` is the id of the request it belongs to."""

    id: str
    parent_id: str
    content: Content


class MessageSigner:
    """Signs and checks messages with the key of one connection file."""

    def __init__(self, key: str) -> None:
        # Not the default, which would tell the session the name of the server's user.
        self._session = Session(key=key.encode(), username="belljar")

    @property
    def identity(self) -> bytes:
        """Return the ZeroMQ identity. Shell and stdin share it, because the kernel asks whoever sent the request."""
        return self._session.bsession

    def pack(self, kind: str, content: Mapping[str, Any], parent_id: str = "") -> tuple[str, list[bytes]]:
        """Make a new message and return its id and its parts."""
        parent = {"msg_id": parent_id} if parent_id else {}
        message = self._session.msg(kind, dict(content), parent)  # pyright: ignore[reportUnknownMemberType]
        return message["msg_id"], self._session.serialize(message)

    def unpack(self, parts: list[bytes]) -> Message | None:
        """Return the message, or None for a kind we do not know; KernelDied when it is forged or malformed."""
        try:
            start = parts.index(DELIM) + 1
            signature, header, parent, metadata, content = parts[start : start + 5]
        except ValueError:
            raise KernelDied("the kernel sent something that is no Jupyter message") from None
        own = self._session.sign([header, parent, metadata, content])  # pyright: ignore[reportUnknownMemberType]
        if not compare_digest(signature, own):
            raise KernelDied("the kernel sent a message with a wrong signature")
        head = _validated(_Header, header)
        kind = _KINDS.get(head.msg_type)
        if kind is None:
            return None
        return Message(head.msg_id, _validated(_Parent, parent).msg_id, _validated(kind, content))


_Model = TypeVar("_Model", bound=BaseModel)


def _validated(model: type[_Model], text: bytes) -> _Model:
    if has_too_many_values(text):
        if not issubclass(model, DisplayContent | ResultContent):
            raise KernelDied(f"the kernel sent a message of more than {MAX_VALUES:,} values")
        # A figure's own data, which a picture or a page comes with only in the same message.
        return model.model_validate({"data": {"text/plain": f"<data of more than {MAX_VALUES:,} values was left out>"}})
    try:
        return model.model_validate_json(text)
    except ValueError:
        # Perhaps it only has lone surrogates, which JSON can spell and UTF-8 cannot. JavaScript kernels send them.
        pass
    try:
        plain = json.dumps(json.loads(text.decode("utf-8", "replace")), ensure_ascii=False)
        return model.model_validate_json(plain.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise KernelDied(f"the kernel sent a malformed message: no {model.__name__.strip('_').lower()}") from None
