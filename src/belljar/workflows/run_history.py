"""Runs as people look at them: lists, one run with its graph and a part of its steps, and what can be done with it.

Everything is read by a connection of its own in a thread, because a run may have 50,000 steps and the event loop's
connection writes what cells print. Knows nothing of pages: `run_pages.py` draws.
"""

import asyncio
import json
import re
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from belljar.engine.contract import time_cursor
from belljar.engine.models import AskedPerson
from belljar.engine.runs import GraphNode, RunActs, RunDetail, RunEntry, RunStep, StepAttempt
from belljar.errors import BelljarError, InvalidArgument, RunNotFound
from belljar.journal.run_records import RUN_STATES, RunRecord, RunState, StepRecord
from belljar.models import iso_ms
from belljar.outputs.terminal_text import printable
from belljar.toolbox.server_text import shortened
from belljar.workflows.definition import CodeExecution, Definition, Step, SubWorkflow, ToolCallStep
from belljar.workflows.graph import what
from belljar.workflows.library import reference_of
from belljar.workflows.questions import inbox_question
from belljar.workflows.workflows import Workflows

_MAX_CHARS: Final = 2_000
_PAGE: Final = 200
_KEPT_DEFINITIONS: Final = 8
_MAX_EARLIER: Final = 20
_MAX_ASKED: Final = 20
_BUSY_S: Final = 5.0
# A list of steps that is longer is drawn with its ends, and what is around steps that something happens to.
_LONG_LIST: Final = 40
_ENDS: Final = 3
_AROUND: Final = 4
_MAX_BLOCKS: Final = 6
_QUIET: Final = ({"done"}, set[str]())
_LIST: Final = "SELECT id, principal, name, session_id, server, state, started_at, ended_at, end FROM runs"
_STEP: Final = (
    "SELECT path, attempt, state, execution_id, session_id, value, error, notes, question, answer, expires_at, "
    "began_at, ended_at FROM steps"
)
_ROUND: Final = re.compile(r"\[\d+\]")
_ACTS: Final[dict[RunState, list[RunActs]]] = {
    "running": ["stop"],
    "waiting": ["stop"],
    "interrupted": ["resume", "stop"],
    "failed": ["resume"],
    "stopped": ["resume"],
}
_T = TypeVar("_T")


class RunHistory:
    """See `RunSource`."""

    def __init__(self, workflows: Workflows, journal: Path, commit: Callable[[], None]) -> None:
        self._workflows = workflows
        self._journal = journal
        self._commit = commit
        self._definitions: OrderedDict[str, Definition | None] = OrderedDict()

    async def _read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        self._commit()

        def read() -> _T:
            place = f"file:{quote(str(self._journal))}?mode=ro"
            with closing(sqlite3.connect(place, uri=True, isolation_level=None, timeout=_BUSY_S)) as connection:
                return query(connection)

        return await asyncio.to_thread(read)

    # Lists

    async def runs(
        self, principal: str | None, state: str, text: str, before: tuple[float, str] | None, limit: int
    ) -> list[RunEntry]:
        """See `RunSource`."""
        if state and state not in RUN_STATES:
            raise InvalidArgument(f"state {state[:64]!r} is none of {', '.join(RUN_STATES)}")
        found: list[RunEntry] = []
        while len(found) < limit:
            records = await self._read(lambda connection: _page(connection, principal, state, text, before))  # noqa: B023
            fitting = [one for one in records if not state or self._workflows.state_of(one) == state]
            chosen = fitting[: limit - len(found)]
            told = await self._read(lambda connection: [_latest(connection, one) for one in chosen])  # noqa: B023
            found += [self._entry(record, *latest) for record, latest in zip(chosen, told, strict=True)]
            if len(records) < _PAGE:
                break
            before = records[-1].started_at, records[-1].id
        return found

    def _entry(self, record: RunRecord, step: str, waiting: list[StepRecord]) -> RunEntry:
        state = self._workflows.state_of(record)
        asks = [inbox_question(record, each) for each in waiting] if state in ("running", "waiting") else []
        # When one was interrupted is on no record.
        end = record.ended_at or (time.time() if state in ("running", "waiting") else record.started_at)
        return RunEntry(
            run_id=record.id,
            name=record.name,
            owner=record.principal,
            state=state,
            reason=printable(record.end)[:_MAX_CHARS],
            step="" if state == "done" else step,
            started_at=iso_ms(record.started_at),
            ended_at=iso_ms(record.ended_at) if record.ended_at else None,
            duration_s=round(max(0.0, end - record.started_at), 3),
            session_id=record.session_id,
            cursor=time_cursor(record.started_at, record.id),
            asks=[AskedPerson(question_id=one.id, title=one.title) for one in asks],
        )

    # One run

    async def run(self, principal: str | None, run_id: str, node: str, offset: int, limit: int) -> RunDetail:
        """See `RunSource`."""
        record = self._workflows.record_of_anyone(run_id)
        if record is None or principal not in (None, record.principal):
            raise RunNotFound(
                f"run {run_id[:64]!r} does not exist: it was never started, or has been forgotten",
                hint="The list of runs has the latest",
            )
        definition = await self._definition(record)
        state = self._workflows.state_of(record)

        def read(connection: sqlite3.Connection) -> RunDetail:
            known = dict(_nodes(definition)) if definition is not None else {}
            paths, states = _overview(connection, record.id)
            shown = [path for path in paths if not node or _node(path) == node]
            steps = _steps(connection, record, shown[offset : offset + limit], known, state)
            return RunDetail(
                **self._entry(record, *_latest(connection, record)).model_dump(),
                variables=json.loads(record.variables),
                result=_cut(record.value) if record.value is not None else None,
                graph=_folded(_graph(definition, "", states)) if definition is not None else [],
                steps=steps,
                offset=offset,
                total_steps=len(shown),
                acts=_ACTS.get(state, []),
            )

        return await self._read(read)

    async def _definition(self, record: RunRecord) -> Definition | None:
        """Return the workflow of a run; None if its text cannot be read any more."""
        if record.digest not in self._definitions:
            try:
                found = await asyncio.to_thread(self._workflows.definition_of, record)
            except BelljarError:
                found = None
            self._definitions[record.digest] = found
            while len(self._definitions) > _KEPT_DEFINITIONS:
                self._definitions.popitem(last=False)
        return self._definitions[record.digest]

    async def steer(self, principal: str | None, run_id: str, act: RunActs, by: str) -> None:
        """See `RunSource`."""
        record = self._workflows.record_of_anyone(run_id)
        if record is None or principal not in (None, record.principal):
            raise RunNotFound(f"run {run_id[:64]!r} does not exist", hint="The list of runs has the latest")
        if act == "stop":
            await self._workflows.stop(record.id, record.principal, by=by)
        else:
            await self._workflows.resume(record.id, record.principal)


# Queries


def _page(
    connection: sqlite3.Connection, principal: str | None, state: str, text: str, before: tuple[float, str] | None
) -> list[RunRecord]:
    # One whose server has died is on record as running.
    states = {"": RUN_STATES, "interrupted": ("interrupted", "running")}.get(state, (state,))
    conditions, values = [f"state IN ({', '.join('?' * len(states))})"], list[object](states)
    if principal is not None:
        conditions.append("principal = ?")
        values.append(principal)
    if text:
        conditions.append("instr(lower(id || ' ' || name || ' ' || principal), ?) > 0")
        values.append(text.lower())
    if before is not None:
        conditions.append("(started_at, id) < (?, ?)")
        values.extend(before)
    query = f"{_LIST} WHERE {' AND '.join(conditions)} ORDER BY started_at DESC, id DESC LIMIT ?"
    names = ("id", "principal", "name", "session_id", "server", "state", "started_at", "ended_at", "end")
    unread: dict[str, Any] = dict.fromkeys(("text", "texts", "source", "digest", "variables"), "")
    rows = connection.execute(query, (*values, _PAGE))
    return [RunRecord(**unread, **dict(zip(names, row, strict=True))) for row in rows]


def _latest(connection: sqlite3.Connection, record: RunRecord) -> tuple[str, list[StepRecord]]:
    """Return the step that a run is at, and those that wait for a person."""
    waiting = f"{_STEP} WHERE run_id = ? AND state = 'waiting' ORDER BY number LIMIT ?"
    asked = [StepRecord._make(row) for row in connection.execute(waiting, (record.id, _MAX_ASKED))]
    latest = connection.execute("SELECT path FROM steps WHERE run_id = ? ORDER BY number DESC LIMIT 1", (record.id,))
    row = latest.fetchone()
    return (asked[0].path if asked else row[0] if row else ""), asked


def _overview(connection: sqlite3.Connection, run_id: str) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Return the paths of all steps in the order they began, and how many rounds of each node are in each state."""
    query = "SELECT path, state FROM steps WHERE run_id = ? ORDER BY number"
    # What is on record of a branch itself says no more than its steps do.
    latest: dict[str, str] = {path: state for path, state in connection.execute(query, (run_id,)) if path[-1] != "]"}
    states: dict[str, dict[str, int]] = {}
    for path, state in latest.items():
        counts = states.setdefault(_node(path), {})
        counts[state] = counts.get(state, 0) + 1
    return [*latest], states


def _steps(
    connection: sqlite3.Connection,
    record: RunRecord,
    paths: list[str],
    known: dict[str, tuple[str, str]],
    state: RunState,
) -> list[RunStep]:
    steps: list[RunStep] = []
    for path in paths:
        query = f"{_STEP} WHERE run_id = ? AND path = ? ORDER BY attempt"
        attempts = [StepRecord._make(row) for row in connection.execute(query, (record.id, path))]
        last = attempts[-1]
        kind, given = known.get(_node(path), ("", ""))
        is_asking = last.state == "waiting" and state in ("running", "waiting")
        steps.append(
            RunStep(
                **_attempt(last, state).model_dump(),
                path=path,
                node=_node(path),
                type=kind,
                input=given,
                result=_result(last),
                question_id=f"{record.id}:{path}" if is_asking else "",
                earlier=[_attempt(one, state) for one in attempts[:-1][-_MAX_EARLIER:]],
            )
        )
    return steps


def _attempt(row: StepRecord, state: RunState) -> StepAttempt:
    is_open = row.ended_at is None and state in ("running", "waiting")
    end = row.ended_at or (time.time() if is_open else row.began_at)
    return StepAttempt(
        attempt=row.attempt,
        state="interrupted" if row.state == "running" and not is_open else row.state,
        error=_cut(row.error),
        notes=_cut(row.notes),
        began_at=iso_ms(row.began_at),
        duration_s=round(max(0.0, end - row.began_at), 3),
        execution_id=row.execution_id,
        session_id=row.session_id,
    )


def _result(row: StepRecord) -> str:
    value: dict[str, Any] = json.loads(row.value) if row.value else {}
    if "result_bytes" in value:
        return f"{value['result_bytes']:,} bytes, not kept"
    result = value.get("result")
    return "" if result is None else _cut(json.dumps(result, ensure_ascii=False))


def _node(path: str) -> str:
    return _ROUND.sub("", path)


def _cut(text: str) -> str:
    return shortened(printable(text[: _MAX_CHARS + 1]), _MAX_CHARS)


# The graph


def _nodes(definition: Definition, prefix: str = "") -> Iterable[tuple[str, tuple[str, str]]]:
    """Yield each step of a workflow and of its sub-workflows by its node: its type, and what it is given."""
    yield from _inner_nodes(definition, definition.steps, prefix)


def _inner_nodes(definition: Definition, steps: tuple[Step, ...], prefix: str) -> Iterable[tuple[str, tuple[str, str]]]:
    for step in steps:
        node = f"{prefix}{step.name}"
        yield node, (step.type, _cut(_input(step)))
        for block in step.blocks:
            yield from _inner_nodes(definition, block, f"{node}.")
        if isinstance(step.config, SubWorkflow):
            yield from _nodes(definition.children[reference_of(step.config)], f"{node}.")


def _input(step: Step) -> str:
    config = step.config
    if isinstance(config, CodeExecution):
        return config.code.strip()
    if isinstance(config, ToolCallStep):
        return f"{config.server}.{config.tool} {json.dumps(config.arguments, ensure_ascii=False)}"
    return what(step)


def _graph(definition: Definition, prefix: str, states: dict[str, dict[str, int]]) -> list[GraphNode]:
    return _drawn(definition, definition.steps, prefix, states)


def _drawn(
    definition: Definition, steps: tuple[Step, ...], prefix: str, states: dict[str, dict[str, int]]
) -> list[GraphNode]:
    nodes: list[GraphNode] = []
    for step in steps:
        node = f"{prefix}{step.name}"
        blocks = [_drawn(definition, block, f"{node}.", states) for block in step.blocks[:_MAX_BLOCKS]]
        labels = {"condition": ["yes", "no"], "loop": ["each round"]}.get(step.type, [""] * len(blocks))
        if len(step.blocks) > _MAX_BLOCKS:
            rest = step.blocks[_MAX_BLOCKS:]
            blocks.append([GraphNode(node="", name="", type="", folded=sum(map(len, rest)))])
            labels.append(f"{len(rest)} more branches")
        if isinstance(step.config, SubWorkflow):
            blocks, labels = [_graph(definition.children[reference_of(step.config)], f"{node}.", states)], [""]
        nodes.append(
            GraphNode(
                node=node,
                name=step.name,
                type=step.type,
                what=_cut(what(step))[:100],
                states=states.get(node, {}),
                blocks=blocks,
                labels=labels,
            )
        )
    return nodes


def _folded(nodes: list[GraphNode]) -> list[GraphNode]:
    """Return a list of nodes, and those inside them, with the quiet stretches of long ones as one node each."""
    for node in nodes:
        node.blocks = [_folded(block) for block in node.blocks]
    if len(nodes) <= _LONG_LIST:
        return nodes
    # Where something happens: neither done nor still to come. Of a thousand that failed, the first few are enough.
    busy = [place for place, node in enumerate(nodes) if {*node.states} not in _QUIET][:_ENDS]
    turn = next((place for place, node in enumerate(nodes) if not node.states), len(nodes) - 1)
    wanted = {*range(_ENDS), *range(len(nodes) - _ENDS, len(nodes))}
    for place in (*busy, turn):
        wanted.update(range(place - _AROUND, place + _AROUND + 1))
    shown: list[GraphNode] = []
    for place, node in enumerate(nodes):
        if place in wanted:
            shown.append(node)
            continue
        if not shown[-1].folded:
            shown.append(GraphNode(node="", name="", type=""))
        last = shown[-1]
        last.folded += 1
        for name, count in node.states.items():
            last.states[name] = last.states.get(name, 0) + count
    return shown
