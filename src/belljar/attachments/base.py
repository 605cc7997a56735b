"""The contract of an attached session, whether it is in this process or in another one."""

from collections.abc import AsyncGenerator
from typing import Protocol

from belljar.attachments.messages import CompletenessReply, CompletionReply, InspectionReply, SessionEvent
from belljar.outputs.events import CommMessage


class AttachedSession(Protocol):
    """A session as a front end sees it. What the session refuses is raised as the error that it names."""

    @property
    def session_id(self) -> str:
        """Return the id of the session."""
        ...

    @property
    def environment(self) -> str:
        """Return the name of the session's environment."""
        ...

    @property
    def python_version(self) -> str:
        """Return the version of the session's Python; empty while no kernel runs, and for Jupyter's kernels."""
        ...

    @property
    def count(self) -> int:
        """Return the number that the kernel gave to the last cell whose end was reported."""
        ...

    def events(self) -> AsyncGenerator[SessionEvent]:
        """Yield all that happens in the session, cell by cell and in order, until `SessionEnded`. Read by one task."""
        ...

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """Queue a cell and return its execution id; what becomes of it comes through `events`."""
        ...

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """Answer a question of a cell that was run from here; `question` is the number of the question."""
        ...

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """Deliver a message to a widget, under the session's turn; `events` has what comes of it, up to `CommHeard`."""
        ...

    async def comms(self) -> dict[str, str]:
        """Return the targets of the open comms by comm id; none while a cell runs."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the running cell and the queued ones, whoever sent them."""
        ...

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """Return the names that fit at the cursor; none while a cell runs."""
        ...

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """Describe the name at the cursor; return nothing while a cell runs."""
        ...

    async def check(self, code: str) -> CompletenessReply:
        """Return whether code is a whole cell; unknown while a cell runs."""
        ...

    async def aclose(self) -> None:
        """Detach from the session, which goes on; may be called twice."""
        ...
