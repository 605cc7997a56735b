"""What the guards tell the rest of the house."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a call may go out; `ask` means: if the person agrees."""

    decision: Literal["allow", "deny", "ask"]
    reason: str = ""
    """Said to the code and to the person: the rule, the value, what to do."""
    rule: str = ""
    """Where in the policy it stands, like `tools.3` or `servers.github.write_*`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in code that the policy does not allow."""

    line: int
    column: int
    what: str
    rule: str
