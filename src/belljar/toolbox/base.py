"""The types that the modules of the toolbox share: tools, catalogues, answers, call records and their log.

Everything that an upstream server says is untrusted, and so is everything that a session asks: the host looks up and
checks names and arguments before it uses them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

JsonObject = dict[str, Any]

MODERN = "2026-07-28"
"""The version of MCP from which on no session is begun by a handshake, and questions are answered by calling again."""
AWAY = "It is tried again when cells name it; where it stays away, only the operator can mend it"
"""Added to the error of a server that was never reached."""
LATER = "Go on without it and try again in a while; other servers are not affected"
"""Added to the error of a server that is still connecting."""
MAX_RECORDS = 1_000

End = Literal["returned", "failed", "refused", "cancelled"]
_Started = tuple[str, str, float]
"""The server, the tool and the start time of a call in flight."""
OnChange = Callable[[int, "CallRecord"], None]
"""Called with the number of a call and its current record."""

CUT_OFF = "its server ended meanwhile; whether the tool did it is not known"


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a server claims about a tool. These are hints, with the protocol's own defaults."""

    read_only: bool = False
    destructive: bool = True
    idempotent: bool = False


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool of one server, under the names that the protocol's messages use."""

    server: str
    name: str
    description: str = ""
    title: str = ""
    input_schema: JsonObject = field(default_factory=dict[str, Any])
    output_schema: JsonObject | None = None
    annotations: Annotations = field(default_factory=Annotations)


@dataclass(frozen=True, slots=True)
class ServerCatalogue:
    """The tools of one server, in the order it lists them; a server that could not be reached has an error instead."""

    server: str
    tools: tuple[ToolDefinition, ...] = ()
    instructions: str = ""
    error: str = ""
    detail: str = field(default="", compare=False)
    """More about the error, for the operator only, never for sessions."""
    is_connecting: bool = False
    """Whether the error is only that the server is still connecting."""
    by_name: Mapping[str, ToolDefinition] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {tool.name: tool for tool in reversed(self.tools)})


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every configured server, by its configured name, in the configured order."""

    servers: Mapping[str, ServerCatalogue] = field(default_factory=dict[str, ServerCatalogue])

    def find(self, server: str, tool: str) -> ToolDefinition | None:
        """Return a tool by the names that the protocol's messages use."""
        known = self.servers.get(server)
        return known.by_name.get(tool) if known else None

    def tools(self) -> list[ToolDefinition]:
        """Return the tools of all servers."""
        return [tool for server in self.servers.values() for tool in server.tools]


@dataclass(frozen=True, slots=True)
class Block:
    """One content block of a tool's answer."""

    kind: Literal["text", "image", "audio", "resource", "link"]
    text: str = ""
    data: bytes = b""
    mime: str = ""
    uri: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """A server's answer to a call."""

    blocks: tuple[Block, ...] = ()
    structured: Any = None
    is_error: bool = False
    release: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Gives back the memory that a large answer takes, for which others wait."""

    def drop(self) -> None:
        """Give back the memory of the answer, which is not needed any more; may be called twice."""
        if self.release is not None:
            self.release()


OnProgress = Callable[[float, float | None, str], None]
"""Called with the progress, the total if it is known, and the server's message."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A line of the call log: which tool a cell called and how the call ended, without arguments and results."""

    server: str
    tool: str
    state: Literal["started", "returned", "failed", "refused", "cancelled"]
    duration_s: float = 0.0
    reason: str = ""


class CallLog:
    """Keeps every call in flight, and the latest of those that have ended."""

    def __init__(self, *, earlier: Sequence[CallRecord] = (), on_change: OnChange | None = None) -> None:
        self._records: dict[int, CallRecord | _Started] = {}
        self._count = 0
        self._on_change = on_change
        for record in earlier:
            self._count += 1
            is_cut_off = record.state == "started"
            self._set(self._count, replace(record, state="failed", reason=CUT_OFF) if is_cut_off else record)

    def start(self, server: str, tool: str) -> int:
        """Record the start of a call; return its number, for `finish`."""
        self._count += 1
        self._records[self._count] = (server, tool, time.monotonic())
        if self._on_change is not None:
            self._on_change(self._count, CallRecord(server, tool, "started"))
        return self._count

    def finish(self, number: int, state: End, reason: str = "") -> None:
        """Record how a call ended."""
        started = self._records[number]
        if isinstance(started, CallRecord):
            return
        server, tool, began = started
        self._set(number, CallRecord(server, tool, state, round(time.monotonic() - began, 6), reason))
        if len(self._records) > MAX_RECORDS:
            del self._records[next(each for each, record in self._records.items() if isinstance(record, CallRecord))]

    def _set(self, number: int, record: CallRecord) -> None:
        self._records[number] = record
        if self._on_change is not None:
            self._on_change(number, record)

    def records(self) -> list[CallRecord]:
        """Return the records; a call in flight has the state `started`."""
        return [
            record if isinstance(record, CallRecord) else CallRecord(record[0], record[1], "started")
            for record in self._records.values()
        ]


def most_telling(records: Sequence[CallRecord], most: int) -> list[CallRecord]:
    """Return the `most` important records in their order: calls that did not return first, then the latest."""
    ranked = sorted(range(len(records)), key=lambda place: (records[place].state == "returned", -place))
    return [records[place] for place in sorted(ranked[:most])]
