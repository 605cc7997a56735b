"""What the code of a session may ask, as it comes over its socket: checked for form and size, and nothing else."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

LINE_BYTES = 4 * 1024 * 1024
"""The longest request, arguments and all."""
MOST_VALUES = 100_000
"""In one request: four megabytes of empty lists take a second to read, and every session waits for that."""
_CANCEL_BYTES = 100
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NUMBER = re.compile(rb'\{"id": ?(\d{1,15}),')

Number = Annotated[int, Field(ge=0, le=2**53)]


class _Message(BaseModel):
    # Made ready when the first tool is called.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    id: Number


class CallMessage(_Message):
    """A tool is called."""

    op: Literal["call"]
    server: str = Field(max_length=1_000)
    tool: str = Field(max_length=1_000)
    arguments: dict[str, Any]


class CancelMessage(_Message):
    """A question is taken back."""

    op: Literal["cancel"]


class SearchMessage(_Message):
    """Tools for something."""

    op: Literal["search"]
    query: str = Field(max_length=1_000)
    detail: Literal["names", "signatures", "source"] = "signatures"
    limit: int = Field(5, ge=1, le=50)
    server: str = Field("", max_length=1_000)


class JoinMessage(_Message):
    """A server is imported that was still connecting when the tree was written."""

    op: Literal["join"]
    server: str = Field(max_length=1_000)


_REQUEST: TypeAdapter[CallMessage | CancelMessage | SearchMessage | JoinMessage] = TypeAdapter(
    Annotated[CallMessage | CancelMessage | SearchMessage | JoinMessage, Field(discriminator="op")],
    config=ConfigDict(defer_build=True),
)


class TooDeep(ValueError):
    """JSON, but nested more deeply than it is read."""


def parsed(line: bytes) -> CallMessage | CancelMessage | SearchMessage | JoinMessage:
    """What a line asks. Raises ValueError where that cannot be told."""
    try:
        return _REQUEST.validate_json(line)
    except ValidationError as error:
        if "recursion limit" in error.errors(include_url=False, include_input=False)[0]["msg"]:
            raise TooDeep from None
        raise


def cancelled_by(line: bytes) -> int | None:
    """The number of the question that a line takes back; None for any other line."""
    if len(line) > _CANCEL_BYTES or b'"cancel"' not in line:
        return None
    try:
        request = parsed(line)
    except ValueError:
        return None
    return request.id if isinstance(request, CancelMessage) else None


def number_in(line: bytes) -> int | None:
    """The number of a request that is not read, where it can be told."""
    found = _NUMBER.match(line)
    return int(found[1]) if found else None


def has_too_many_values(line: bytes) -> bool:
    """Told by the signs between values. Most lines have too few even with those that stand in texts."""
    if len(line) <= MOST_VALUES or _signs(line) <= MOST_VALUES:
        return False
    return _signs(_TEXT.sub(b"", line, count=MOST_VALUES)) > MOST_VALUES


def _signs(line: bytes) -> int:
    return line.count(b",") + line.count(b"[") + line.count(b"{")
