"""What the rooms of the toolbox tell each other: tools, catalogues, calls and their outcomes.

Whatever an upstream server says is untrusted text, and so is whatever a session asks: names and arguments are looked
up and checked by the host, never followed.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

JsonObject = dict[str, Any]

AWAY = "It is tried again when cells name it; where it stays away, only the operator can mend it"
"""Said of a server that was never reached."""
LATER = "Go on without it and try again in a while; other servers are not affected"
"""Said of a server that is still connecting."""


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a server claims of a tool; hints, with the protocol's own defaults."""

    read_only: bool = False
    destructive: bool = True
    idempotent: bool = False
    open_world: bool = True


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool of one server, under the names that are used on the wire."""

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
    """What the operator should know of the error, and sessions should not."""
    is_connecting: bool = False
    """Whether the error is only that it is not there yet."""
    by_name: Mapping[str, ToolDefinition] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {tool.name: tool for tool in reversed(self.tools)})


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every configured server, by its configured name, in the configured order."""

    servers: Mapping[str, ServerCatalogue] = field(default_factory=dict[str, ServerCatalogue])

    def find(self, server: str, tool: str) -> ToolDefinition | None:
        """A tool by its names on the wire."""
        known = self.servers.get(server)
        return known.by_name.get(tool) if known else None

    def tools(self) -> list[ToolDefinition]:
        """All of them."""
        return [tool for server in self.servers.values() for tool in server.tools]


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of what a tool answered."""

    kind: Literal["text", "image", "audio", "resource", "link"]
    text: str = ""
    data: bytes = b""
    mime: str = ""
    uri: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a server answered to a call."""

    blocks: tuple[Block, ...] = ()
    structured: Any = None
    is_error: bool = False
    release: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """For one that is so large that others wait until it is passed on."""

    def drop(self) -> None:
        """Nothing of it is needed any more; may be called twice."""
        if self.release is not None:
            self.release()


@dataclass(frozen=True, slots=True)
class Question:
    """Something only the person can answer: an upstream's elicitation, or the policy's `ask`."""

    message: str
    schema: JsonObject = field(default_factory=dict[str, Any])
    """A flat JSON Schema of the answer, as elicitation has it; empty for plain consent."""
    url: str = ""
    """An address the person should open instead of filling in a form."""
    is_ours: bool = False
    """Whether the words are ours and the session's, so that tokens in them are tokens; a server's may only look so."""
    is_password: bool = False
    """Whether what is typed must not be seen."""


@dataclass(frozen=True, slots=True)
class QuestionReply:
    """What the person said; values only with `accept`."""

    action: Literal["accept", "decline", "cancel"]
    values: JsonObject = field(default_factory=dict[str, Any])


Ask = Callable[[Question], Awaitable[QuestionReply]]
"""Asks the person who is responsible for the execution; the execution's clock stands still meanwhile."""

OnProgress = Callable[[float, float | None, str], None]
"""Progress, total where it is known, and the server's message."""


class Upstreams(Protocol):
    """The connections to every configured server: one each, opened when first needed, kept by the host."""

    @property
    def names(self) -> Sequence[str]:
        """The configured servers."""
        ...

    def known(self) -> Catalogue:
        """What they are known to offer now; those that were never tried, or are due again, are connected meanwhile."""
        ...

    async def catalogue(self, within_s: float | None = None) -> Catalogue:
        """What they offer, once each has answered or failed, or the time is over."""
        ...

    async def wait_for(self, server: str) -> None:
        """Wait for one server that is still connecting, within a bound."""
        ...

    def still_connecting(self, server: str) -> str:
        """How long a server has been connecting, and what it waits for; empty where it is not."""
        ...

    async def call(
        self, server: str, tool: str, arguments: JsonObject, *, on_progress: OnProgress, ask: Ask
    ) -> ToolAnswer:
        """Call a tool. Cancelling the task cancels the call upstream. Raises UpstreamFailed."""
        ...

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call this when a catalogue was read anew and is another one."""
        ...


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A line of the ledger: what a cell asked for and how it went. Arguments and results are not in it."""

    server: str
    tool: str
    state: Literal["started", "returned", "failed", "refused", "cancelled"]
    duration_s: float = 0.0
    reason: str = ""
