"""The requests that a session's code sends over its socket. This module checks their form and size, nothing else."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

LINE_BYTES = 4 * 1024 * 1024
"""The longest request, with its arguments."""
_CANCEL_BYTES = 100
_NUMBER = re.compile(rb'\{"id": ?(\d{1,15}),')

Number = Annotated[int, Field(ge=0, le=2**53)]


class _Message(BaseModel):
    # The validators are built when the first tool is called.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    id: Number


class CallMessage(_Message):
    """Calls a tool."""

    op: Literal["call"]
    server: str = Field(max_length=1_000)
    tool: str = Field(max_length=1_000)
    arguments: dict[str, Any]


class CancelMessage(_Message):
    """Cancels an earlier request."""

    op: Literal["cancel"]


class SearchMessage(_Message):
    """Searches for tools."""

    op: Literal["search"]
    query: str = Field(max_length=1_000)
    detail: Literal["names", "signatures", "source"] = "signatures"
    limit: int = Field(5, ge=1, le=50)
    server: str = Field("", max_length=1_000)


class JoinMessage(_Message):
    """Waits for a server that is imported and was still connecting when the tree was written."""

    op: Literal["join"]
    server: str = Field(max_length=1_000)


_REQUEST: TypeAdapter[CallMessage | CancelMessage | SearchMessage | JoinMessage] = TypeAdapter(
    Annotated[CallMessage | CancelMessage | SearchMessage | JoinMessage, Field(discriminator="op")],
    config=ConfigDict(defer_build=True),
)


class TooDeep(ValueError):
    """A request is JSON, but nested too deeply to be parsed."""


def parse(line: bytes) -> CallMessage | CancelMessage | SearchMessage | JoinMessage:
    """Return the request in a line. Raises ValueError if there is none."""
    try:
        return _REQUEST.validate_json(line)
    except ValidationError as error:
        if "recursion limit" in error.errors(include_url=False, include_input=False)[0]["msg"]:
            raise TooDeep from None
        raise


def cancelled_by(line: bytes) -> int | None:
    """Return the number of the request that a line cancels; None for any other line."""
    if len(line) > _CANCEL_BYTES or b'"cancel"' not in line:
        return None
    try:
        request = parse(line)
    except ValueError:
        return None
    return request.id if isinstance(request, CancelMessage) else None


def number_in(line: bytes) -> int | None:
    """Return the number of a request without parsing it; None if it is not found at the start."""
    found = _NUMBER.match(line)
    return int(found[1]) if found else None
