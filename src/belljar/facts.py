"""What plugins and the guardrails of belljar see and return, and the mark of a hook's implementation.

Knows none of the hooks themselves; those are in `hooks.py`, which offers all of this to plugins again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import pluggy

PROJECT: Final = "belljar"

hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A guardrail's decision. `ask` means that the call or the code may go on if the person agrees."""

    decision: Literal["allow", "warn", "ask", "deny"]
    """`warn` lets code run with a notice in its output; for a tool call it means `allow`."""
    reason: str = ""
    """The rule, the value and what to do next, in words for the code that called and for the person."""
    rule: str = ""
    """The place of the rule in the policy, like `tools.3`, or the name of the plugin, like `plugin:NAME`."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Whose session something happens in."""

    session_id: str
    principal: str
    environment: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallFacts:
    """A call of a tool from the code of a session, before it leaves the host."""

    session_id: str
    principal: str
    server: str
    tool: str
    arguments: Mapping[str, Any]
    """As the code passed them: privacy tokens stand for the values behind them."""
    read_only: bool = False
    """What the server claims about the tool, like `destructive`."""
    destructive: bool = True
    has_values: bool = False
    """Whether this is the second question about a call, with values in place of its tokens; do not count it twice."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended."""

    state: Literal["returned", "failed", "refused", "cancelled"]
    duration_s: float
    reason: str = ""
    """Why it was refused or failed."""
    value: Any = None
    """What the code gets of a call that returned, personal data replaced by tokens as the policy has it."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """A cell that is to run, runs, or ran; programs of the executor surface count as cells too."""

    session_id: str
    principal: str
    execution_id: str
    code: str
    environment: str = ""
    author: str = ""
    """Who submitted it; empty for the session's owner."""


class StepType(Protocol):
    """A type of workflow steps. Those of plugins are `CodeStep`s; belljar's own also steer the run."""

    @property
    def name(self) -> str:
        """Return the name that `type` has in workflows."""
        ...

    @property
    def config_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the step's `config`."""
        ...


@dataclass(frozen=True, slots=True)
class CodeStep:
    """A step that is Python in the session of its run, so that policy, privacy and limits hold for it."""

    name: str
    code: str
    """The Python to run. It finds the step's `config`, its expressions evaluated, in the variable `config`; the value
    of its last expression is the step's result."""
    config_schema: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeat: bool = False
    """Whether it may run again after a crash in the middle of it, because it changes nothing outside the session."""


@dataclass(frozen=True, slots=True)
class FormTarget:
    """A kind of form that `forms.open` in sessions can fill in."""

    name: str
    module: Path
    """A Python file that sessions see and import: `open_form(source, options)` returns a subclass of `forms.Form`, or
    None for a source that is none of its own."""
