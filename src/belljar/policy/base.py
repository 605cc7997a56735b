"""What a guard answers to the other packages: a verdict on a tool call, a finding in code."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one tool call. `ask` means that the call may go out if the person agrees."""

    decision: Literal["allow", "deny", "ask"]
    reason: str = ""
    """The rule, the value and what to do next, in words for the code that called and for the person."""
    rule: str = ""
    """The place of the rule in the policy, like `tools.3` or `servers.github.write_*`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in code that the policy does not allow."""

    line: int
    column: int
    what: str
    rule: str
