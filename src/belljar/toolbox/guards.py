"""What a broker asks before and after a call: may it go out, and what may go over which side of the glass.

The guards themselves are in `policy` and `privacy`; a session without any has these, which let everything through.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from belljar.policy.base import Verdict


class CallGuard(Protocol):
    """One session's."""

    def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Whether a call may go out. Asked once for each, before anything of it leaves the host."""
        ...

    def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Whether it may also go out with the values that its tokens stand for. Asked where there are some."""
        ...

    def decided(self, server: str, tool: str, verdict: Verdict, outcome: str) -> None:
        """What became of it: `allowed`, `denied`, `approved`, `declined`. Told once for each."""
        ...


class Redactor(Protocol):
    """One session's; what stands for what is known to the host alone."""

    def redact_text(self, text: str) -> str:
        """Text as the session may see it."""
        ...

    def redact(self, value: Any) -> Any:
        """A JSON value as the session may see it."""
        ...

    def fill_in(self, value: Any, *, server: str, tool: str) -> Any:
        """Arguments as that tool may have them. Raises a BelljarError for what it may not."""
        ...


class AllowAll:
    """No policy."""

    def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Yes."""
        return Verdict("allow")

    def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Yes."""
        return True

    def decided(self, server: str, tool: str, verdict: Verdict, outcome: str) -> None:
        """Nobody keeps it."""


class NoRedaction:
    """No privacy."""

    def redact_text(self, text: str) -> str:
        """As it is."""
        return text

    def redact(self, value: Any) -> Any:
        """As it is."""
        return value

    def fill_in(self, value: Any, *, server: str, tool: str) -> Any:
        """As it is."""
        return value
