"""Jupyter's messages (jupyter-client.readthedocs.io, "Messaging"): signed on the way out, checked on the way in.

Whatever comes in was written by code that may be hostile: the signature and the form are checked before anyone sees
it. Kinds we have no use for, comms among them, are passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Literal, TypeVar

from jupyter_client.session import DELIM, Session
from pydantic import BaseModel, Field, JsonValue

from belljar.errors import KernelDied


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
    """A rich output in the place of an earlier one."""


class ResultContent(BaseModel):
    """The last expression's value."""

    data: dict[str, JsonValue]


class ClearContent(BaseModel):
    """Forget the output."""

    wait: bool = False


class ErrorContent(BaseModel):
    """The cell raised."""

    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []


class Status(BaseModel):
    """Busy or idle."""

    execution_state: str


class InputContent(BaseModel):
    """The cell waits for an answer."""

    prompt: str = ""
    password: bool = False


class Payload(BaseModel):
    """Something for the front end to do; `page` shows text."""

    source: str = ""
    data: dict[str, JsonValue] = {}


class ExecuteReply(ErrorContent):
    """The cell is over."""

    status: str
    execution_count: int | None = Field(default=None, ge=0, le=2**31)
    payload: list[Payload] = []
    user_expressions: dict[str, dict[str, JsonValue]] = {}


class CompleteReply(BaseModel):
    """Names that fit."""

    matches: list[str] = []
    cursor_start: int = 0
    cursor_end: int = 0


class InspectReply(BaseModel):
    """What a name is."""

    found: bool = False
    data: dict[str, JsonValue] = {}


class IsCompleteReply(BaseModel):
    """Whether code is a whole cell."""

    status: Literal["complete", "incomplete", "invalid", "unknown"] = "unknown"
    indent: str = Field(default="", max_length=1_000)


class KernelInfo(BaseModel):
    """The kernel is there."""


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
    """One message of a kind we know; `parent_id` is the request it belongs to."""

    id: str
    parent_id: str
    content: Content


class MessageSigner:
    """Signs and checks with the key of one connection file."""

    def __init__(self, key: str) -> None:
        # The name of the server's user is none of the session's business.
        self._session = Session(key=key.encode(), username="belljar")

    @property
    def identity(self) -> bytes:
        """Shell and stdin must share it: the kernel asks where it was asked."""
        return self._session.bsession

    def pack(self, kind: str, content: Mapping[str, Any], parent_id: str = "") -> tuple[str, list[bytes]]:
        """A new message as its id and its parts."""
        parent = {"msg_id": parent_id} if parent_id else {}
        message = self._session.msg(kind, dict(content), parent)  # pyright: ignore[reportUnknownMemberType]
        return message["msg_id"], self._session.serialize(message)

    def unpack(self, parts: list[bytes]) -> Message | None:
        """The message, or None for a kind we do not know; KernelDied when it is forged or malformed."""
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
    try:
        return model.model_validate_json(text)
    except ValueError:
        # Perhaps only lone surrogates, which JSON can spell and UTF-8 cannot: JavaScript kernels send them.
        pass
    try:
        plain = json.dumps(json.loads(text.decode("utf-8", "replace")), ensure_ascii=False)
        return model.model_validate_json(plain.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise KernelDied(f"the kernel sent a malformed message: no {model.__name__.strip('_').lower()}") from None
