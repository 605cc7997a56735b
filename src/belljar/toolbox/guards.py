"""What a broker asks before and after a call: whether it may go out, and what the session and the server may see.

The implementations are in `policy` and `privacy`. A session without them uses the ones here, which allow everything.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from belljar.facts import Verdict


class CallGuard(Protocol):
    """Decides on the calls of one session."""

    async def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Return whether a call may go out. The broker asks once per call, before anything of it leaves the host."""
        ...

    async def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Return whether a call may also go out with the values behind its tokens. Asked if it has tokens."""
        ...

    def record_decision(self, server: str, tool: str, verdict: Verdict, outcome: str, by: str = "") -> None:
        """Record what became of a call: `allowed`, `denied`, `approved`, `declined`. Called once per call.

        `by` is the person who answered outside the client, if one did.
        """
        ...

    def asks_once(self, verdict: Verdict) -> bool:
        """Return whether a yes to the rule of a verdict holds for the rest of the session."""
        ...

    def wants_console(self, verdict: Verdict) -> bool:
        """Return whether the rule of a verdict wants its question answered outside the client."""
        ...


class Redactor(Protocol):
    """Replaces sensitive values by tokens for one session, and back; only the host knows which is which."""

    def redact_text(self, text: str) -> str:
        """Return a text as the session may see it."""
        ...

    def redact(self, value: Any) -> Any:
        """Return a JSON value as the session may see it."""
        ...

    def fill_in(self, value: Any, *, server: str, tool: str) -> Any:
        """Return arguments with values in place of tokens. Raises a BelljarError if the tool may not have a value."""
        ...


class AllowAll:
    """The guard of a session without a policy."""

    async def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Allow the call."""
        return Verdict("allow")

    async def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Allow the call."""
        return True

    def record_decision(self, server: str, tool: str, verdict: Verdict, outcome: str, by: str = "") -> None:
        """Record nothing."""

    def asks_once(self, verdict: Verdict) -> bool:
        """Return False: there is no rule."""
        return False

    def wants_console(self, verdict: Verdict) -> bool:
        """Return False: there is no rule."""
        return False


class BothGuards:
    """Two guards, of which the stricter decides: the session's own, and that of the workflow whose step runs."""

    def __init__(self, own: CallGuard, other: CallGuard) -> None:
        self._own = own
        self._other = other

    async def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Return the stricter verdict. The other guard decides first, so that what it denies does not count here."""
        verdict = await self._other.judge(server, tool, arguments, read_only=read_only, destructive=destructive)
        if verdict.decision == "deny":
            return verdict
        own = await self._own.judge(server, tool, arguments, read_only=read_only, destructive=destructive)
        return verdict if own.decision == "allow" else own

    async def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Return whether both allow it."""
        for guard in (self._own, self._other):
            if not await guard.allows(
                server, tool, arguments, read_only=read_only, destructive=destructive, is_approved=is_approved
            ):
                return False
        return True

    def record_decision(self, server: str, tool: str, verdict: Verdict, outcome: str, by: str = "") -> None:
        """Record what became of a call, with the session's own guard, which has the log."""
        self._own.record_decision(server, tool, verdict, outcome, by)

    def asks_once(self, verdict: Verdict) -> bool:
        """Return whether the session's own guard remembers a yes; the other's does not outlast its step."""
        return self._own.asks_once(verdict)

    def wants_console(self, verdict: Verdict) -> bool:
        """Return whether the rule of either guard wants it."""
        return self._own.wants_console(verdict) or self._other.wants_console(verdict)


class NoRedaction:
    """The redactor of a session without privacy rules."""

    def redact_text(self, text: str) -> str:
        """Return the text unchanged."""
        return text

    def redact(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def fill_in(self, value: Any, *, server: str, tool: str) -> Any:
        """Return the value unchanged."""
        return value
