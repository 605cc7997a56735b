"""Comms between a front end and the widgets of a session: Jupyter's messages to ours, and back. Sends nothing."""

import base64
from typing import Any, cast

from belljar.attachments.messages import Said
from belljar.outputs.events import CommKind, CommMessage

KINDS: tuple[CommKind, ...] = ("comm_open", "comm_msg", "comm_close")
# What the runner says for the id of a front end's request: it cannot know, and each front end has its own.
_THIS_REQUEST = "belljar:this-request"


def received(kind: CommKind, request: dict[str, Any]) -> CommMessage:
    """A front end's word to a widget."""
    content = cast("dict[str, Any]", request["content"])
    buffers = tuple(base64.b64encode(bytes(buffer)).decode() for buffer in request.get("buffers") or ())
    return CommMessage(
        kind,
        str(content.get("comm_id", "")),
        content.get("data") or {},
        str(content.get("target_name", "")),
        request.get("metadata") or {},
        buffers,
    )


def content_for(said: Said, request: dict[str, Any]) -> dict[str, Any]:
    """A widget's word as it goes to a front end. `Output` widgets claim what a request gives, by the request's id."""
    data = said.content.get("data")
    state = cast("dict[str, Any]", data).get("state") if isinstance(data, dict) else None
    if not isinstance(state, dict) or cast("dict[str, Any]", state).get("msg_id") != _THIS_REQUEST:
        return said.content
    claimed = {**cast("dict[str, Any]", state), "msg_id": request.get("header", {}).get("msg_id", "")}
    return {**said.content, "data": {**cast("dict[str, Any]", data), "state": claimed}}


def buffers_of(said: Said) -> list[bytes]:
    """The binary parts."""
    return [base64.b64decode(buffer) for buffer in said.buffers]
