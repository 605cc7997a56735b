"""What a guard answers about code: a finding."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in code that the policy does not allow."""

    line: int
    column: int
    what: str
    rule: str
