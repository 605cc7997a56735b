"""Runs of workflows as they are shown: the JSON of the HTTP API, what the console's pages get, and who has them.

The engine knows of runs what the journal has of them; what a workflow is, only the product does that is a `RunSource`.
"""

from typing import Literal, Protocol

from pydantic import JsonValue

from belljar.engine.models import AskedPerson
from belljar.models import Model

RunActs = Literal["resume", "stop"]
MAX_STEPS_SHOWN = 200
"""The most steps of one page of a run."""


class RunEntry(Model):
    """A run in a list."""

    run_id: str
    name: str
    owner: str
    state: str
    """`running`, `waiting` (for a person), `interrupted`, `done`, `failed` or `stopped`."""
    reason: str = ""
    """Why it has ended, or why nobody drives it."""
    step: str = ""
    """The step that it is at, or where it ended if not well."""
    started_at: str
    ended_at: str | None = None
    duration_s: float
    """From its start to its end, or until now."""
    session_id: str = ""
    asks: list[AskedPerson] = []
    """What it waits for."""
    cursor: str = ""
    """Its place in the list of runs."""


class StepAttempt(Model):
    """One attempt of a step."""

    attempt: int
    state: str
    error: str = ""
    notes: str = ""
    began_at: str
    duration_s: float
    execution_id: str = ""
    session_id: str = ""


class RunStep(StepAttempt):
    """One step of a run, at its latest attempt. In a loop, each round is one."""

    path: str
    node: str
    """The step of the workflow that it is a round of, as the graph names it."""
    type: str = ""
    input: str = ""
    """What the workflow gives it: code, arguments as JSON, or a message."""
    result: str = ""
    """As JSON; the beginning of a long one."""
    question_id: str = ""
    earlier: list[StepAttempt] = []


class GraphNode(Model):
    """A step of the workflow in the graph of a run; `blocks` are lists of steps inside it, with a label each."""

    node: str
    name: str
    type: str
    what: str = ""
    states: dict[str, int] = {}
    """How many of its rounds are in each state; empty if it has not begun."""
    folded: int = 0
    """How many steps it stands for that are not drawn; it is no step of its own then."""
    blocks: list[list["GraphNode"]] = []
    labels: list[str] = []


class RunDetail(RunEntry):
    """A run with its graph, and a part of its steps in the order in which they began."""

    variables: dict[str, JsonValue] = {}
    result: str | None = None
    """What it gave, as JSON; the beginning of a long one."""
    graph: list[GraphNode] = []
    steps: list[RunStep] = []
    offset: int = 0
    total_steps: int = 0
    """How many steps have begun; with `node`, of that one only."""
    acts: list[RunActs] = []
    """What can be done with it now."""


class RunSource(Protocol):
    """Who has the runs. A `principal` of None is the operator, who sees those of all owners."""

    async def runs(
        self, principal: str | None, state: str, text: str, before: tuple[float, str] | None, limit: int
    ) -> list[RunEntry]:
        """Return the runs that started before a place, newest first."""
        ...

    async def run(self, principal: str | None, run_id: str, node: str, offset: int, limit: int) -> RunDetail:
        """Return one run; with `node`, only steps that are rounds of it. Raises `RunNotFound`."""
        ...

    async def steer(self, principal: str | None, run_id: str, act: RunActs, by: str) -> None:
        """Go on with a run, or stop it."""
        ...
