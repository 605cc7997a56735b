"""The contract of a hold on a session, wherever the session is."""

from collections.abc import AsyncGenerator
from typing import Protocol

from belljar.attachments.messages import CompletenessReply, CompletionReply, InspectionReply, SessionEvent
from belljar.outputs.events import CommMessage


class AttachedSession(Protocol):
    """A front end holds one. Refusals are raised as the errors they name."""

    @property
    def session_id(self) -> str:
        """Which session."""
        ...

    @property
    def environment(self) -> str:
        """What it runs in."""
        ...

    @property
    def python_version(self) -> str:
        """Of its interpreter; empty while none runs, and for other kernels than ours."""
        ...

    @property
    def count(self) -> int:
        """The number its kernel gave to the last cell that was told of."""
        ...

    def news(self) -> AsyncGenerator[SessionEvent]:
        """What happens in the session, cell by cell, in order and whole; ends with `Gone`. Read by one task only."""
        ...

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """Queue a cell and tell its id; what becomes of it is in the news."""
        ...

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """Answer a cell of one's own that asks; `question` says which of its questions that is for."""
        ...

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """Hand a word to a widget, in the session's turn; the news ends with `Heard`."""
        ...

    async def comms(self) -> dict[str, str]:
        """Targets of the comms that are open, by their ids; none while a cell runs."""
        ...

    async def interrupt(self) -> None:
        """Stop what runs and what waits, whoever wanted it."""
        ...

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """Names that fit at the cursor; none while a cell runs."""
        ...

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """What the name at the cursor is; nothing while a cell runs."""
        ...

    async def check(self, code: str) -> CompletenessReply:
        """Whether code is a whole cell; unknown while a cell runs."""
        ...

    async def aclose(self) -> None:
        """Let go of the session, which goes on; may be called twice."""
        ...
