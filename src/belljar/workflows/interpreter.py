"""Walks the steps of a run: lists, conditions, loops, parallel branches, sub-workflows.

What was decided is on record, so a resumed run takes the same way. Steps that do something are run by `step_runner.py`.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from belljar.errors import Busy
from belljar.sessions.registry import Registry
from belljar.workflows.checks import Tools
from belljar.workflows.definition import (
    MAX_ITERATIONS,
    Condition,
    Definition,
    Goto,
    Loop,
    Parallel,
    Step,
    StepKind,
    SubWorkflow,
)
from belljar.workflows.library import reference_of
from belljar.workflows.live_run import LiveRun, NobodyAnswered, StopRun
from belljar.workflows.outcomes import (
    NOTHING,
    Scope,
    StepOutcome,
    composite_value,
    nothing,
    plain,
    recorded,
    truth,
)
from belljar.workflows.run_session import RunSession
from belljar.workflows.step_runner import StepRunner
from belljar.workflows.templates import TemplateFailed, rendered

BUSY_S = 1.0


class RunInterpreter:
    """Drives one run."""

    def __init__(
        self,
        run: LiveRun,
        sessions: Registry,
        tools: Tools | None,
        types: Mapping[str, StepKind],
        *,
        reruns_failed: bool = False,
    ) -> None:
        self._run = run
        self._sessions = sessions
        self._principal = run.record.principal
        self._steps = StepRunner(run, sessions, tools, types, reruns_failed=reruns_failed)

    async def run(self, session: RunSession, variables: dict[str, Any]) -> Any:
        """Run all steps and return the value of the last; raise `StopRun` or `NobodyAnswered` if it does not end so."""
        definition = self._run.definition
        for name, value in variables.items():
            session.set_variable(name, value)
        if not session.is_restored:
            for path, rows in self._run.log.items():
                if rows[-1].state == "done":
                    session.set_step(path.rpartition(".")[2], recorded(rows[-1]).value)
        return await self._block(definition.steps, Scope(definition, dict(variables), ""), session)

    async def _block(self, steps: tuple[Step, ...], scope: Scope, session: RunSession) -> Any:
        """Run a list of steps; return the result of the last one that gave one."""
        last: Any = None
        index = 0
        while index < len(steps):
            step = steps[index]
            path = f"{scope.prefix}{step.name}"
            outcome = await self._step(step, path, scope, session)
            scope.values[step.name] = outcome.value
            session.set_step(step.name, outcome.value)
            index += 1
            if outcome.state == "done":
                last = outcome.value.get("result")
            elif outcome.state in ("failed", "declined"):
                on_error = step.form.on_error
                if isinstance(on_error, Goto):
                    index = next(number for number, each in enumerate(steps) if each.name == on_error.goto)
                elif on_error == "stop":
                    raise self._end_of(path, outcome)
        return last

    @staticmethod
    def _end_of(path: str, outcome: StepOutcome) -> StopRun:
        if outcome.state == "declined":
            return StopRun("stopped", f"step {path} was declined")
        return StopRun("failed", f"step {path}: {outcome.error}")

    async def _step(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        await asyncio.sleep(0)  # a loop may have ten thousand rounds in which nothing is waited for
        last = self._run.last(path)
        if last is None:
            self._run.check_size(path)
        if step.blocks or isinstance(step.config, SubWorkflow):
            if last is not None and (last.state == "done" or (last.state == "failed" and step.form.on_error != "stop")):
                if _has_code((step,), scope.definition):
                    session.note_replayed()
                return recorded(last)
            self._run.check_wanted()
            return await self._composite(step, path, scope, session)
        return await self._steps.run(step, path, scope, session)

    # Steps with other steps in them

    async def _composite(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        try:
            match step.config:
                case Condition():
                    result = await self._condition(step, step.config, path, scope, session)
                case Loop():
                    result = await self._loop(step, step.config, path, scope, session)
                case Parallel():
                    result = await self._parallel(step, path, scope, session)
                case SubWorkflow():
                    result = await self._sub_workflow(step.config, path, scope, session)
                case _:
                    raise TypeError(f"{step.type} has no steps")
        except TemplateFailed as error:
            return self._failed_decision(path, str(error))
        except StopRun as stop:
            if stop.state == "failed" and step.form.on_error != "stop":
                return self._failed_decision(path, stop.reason)
            raise
        value = composite_value(result)
        self._run.decide(path, "done", value)
        self._run.tell("end", path, "done")
        return StepOutcome(value)

    def _failed_decision(self, path: str, reason: str) -> StepOutcome:
        value = nothing("failed", reason)
        self._run.decide(path, "failed", value, error=reason)
        self._run.tell("end", path, f"failed: {reason}")
        return StepOutcome(value, "failed", "template")

    def _decided(self, path: str) -> Any:
        """Return what a step decided before its server died; None if it had not."""
        last = self._run.last(path)
        is_known = last is not None and last.value is not None and last.state != "failed"
        return json.loads(last.value) if is_known else None  # pyright: ignore

    async def _condition(self, step: Step, config: Condition, path: str, scope: Scope, session: RunSession) -> Any:
        decided = self._decided(path)
        if decided is None:
            is_true = await truth(config.if_, scope.values)
            decided = {"branch": 0 if is_true else 1}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, "then" if is_true else "else")
        steps = step.blocks[decided["branch"]]
        return await self._block(steps, scope.inner(f"{path}."), session)

    async def _loop(self, step: Step, config: Loop, path: str, scope: Scope, session: RunSession) -> list[Any]:
        results: list[Any] = []
        if config.for_ is None:
            return await self._while(step, config, path, scope, session)
        decided = self._decided(path)
        if decided is None:
            found = await rendered(config.for_, scope.values)
            if not isinstance(found, list):
                raise TemplateFailed(f"for is {type(found).__name__}, not a list")
            items = cast("list[Any]", found)
            if len(items) > MAX_ITERATIONS:
                raise TemplateFailed(f"for has {len(items):,} items, the limit is {MAX_ITERATIONS:,}")
            decided = {"items": plain(items)}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, f"{len(items)} rounds")
        for index, item in enumerate(decided["items"]):
            session.set_variable(config.as_, item)
            inner = scope.inner(f"{path}[{index}].", **{config.as_: item})
            results.append(await self._block(step.blocks[0], inner, session))
        return results

    async def _while(self, step: Step, config: Loop, path: str, scope: Scope, session: RunSession) -> list[Any]:
        results: list[Any] = []
        inner = scope.inner(path, **{each.name: NOTHING for each in step.blocks[0]})
        while await truth(config.while_ or False, inner.values):
            if len(results) >= (config.most or 1):
                raise TemplateFailed(f"while still holds after {config.most} rounds, the most that it may have")
            inner.prefix = f"{path}[{len(results)}]."
            inner.values[config.as_] = len(results)
            session.set_variable(config.as_, len(results))
            results.append(await self._block(step.blocks[0], inner, session))
        return results

    async def _sub_workflow(self, config: SubWorkflow, path: str, scope: Scope, session: RunSession) -> Any:
        child = scope.definition.children[reference_of(config)]
        decided = self._decided(path)
        if decided is None:
            decided = {"variables": {**child.variables, **plain(await rendered(config.variables, scope.values))}}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, child.name)
        for name, value in decided["variables"].items():
            session.set_variable(name, value)
        return await self._block(child.steps, Scope(child, dict(decided["variables"]), f"{path}."), session)

    # Parallel branches

    async def _parallel(self, step: Step, path: str, scope: Scope, session: RunSession) -> list[Any]:
        if self._decided(path) is None:
            self._run.decide(path, "running", {"branches": len(step.blocks)})
            self._run.tell("begin", path, f"{len(step.blocks)} branches")
        # What the workflow has set so far must be in the session before it is forked.
        pending = [index for index in range(len(step.blocks)) if not self._is_done(f"{path}[{index}]")]
        if pending and _has_code((step,), scope.definition):
            await self._steps.assign(session, path)
        sessions = {index: await self._branch_session(f"{path}[{index}]", session) for index in pending}
        found = await asyncio.gather(
            *(
                self._branch(step.blocks[index], f"{path}[{index}]", scope, sessions.get(index))
                for index in range(len(step.blocks))
            ),
            return_exceptions=True,
        )
        # Every branch has come to its end, or to a question, before the run does.
        for kind in (asyncio.CancelledError, StopRun, NobodyAnswered, BaseException):
            if (error := next((each for each in found if isinstance(each, kind)), None)) is not None:
                raise error
        return list(found)

    def _is_done(self, path: str) -> bool:
        last = self._run.last(path)
        return last is not None and last.state == "done"

    async def _branch_session(self, path: str, session: RunSession) -> RunSession:
        """Return the session of a branch: the one it had, if it has left something there, or a new fork."""
        last = self._run.last(path)
        if last is not None and last.session_id:
            known = session.branch(last.session_id)
            if (saved := self._latest_saved(path, known)) or not session.keeps_variables:
                known.use_saved(saved, is_dirty=True)
                return known
            if await known.has_live_kernel():
                return known
        while True:
            await session.reach()
            try:
                fork, _ = await self._sessions.fork(session.id, self._principal)
                break
            except Busy:
                await self._run.pause(BUSY_S)
                self._run.check_wanted()
        self._run.decide(path, "running", {}, session_id=fork.id)
        return session.branch(fork.id)

    async def _branch(self, steps: tuple[Step, ...], path: str, scope: Scope, session: RunSession | None) -> Any:
        if session is None:
            return self._decided(path)["result"]
        result = await self._block(steps, scope.inner(f"{path}."), session)
        self._run.decide(path, "done", {"result": result}, session_id=session.id)
        session.forget_saved()
        live = [each for each in self._sessions.of(self._principal) if each.id == session.id and each.is_idle]
        for each in live:
            # It is not needed any more, and what it ran stays on record.
            await self._sessions.endings.hibernate(each, "was a branch of a workflow that has come to its end")
        return result

    def _latest_saved(self, prefix: str, session: RunSession) -> str:
        """Return the execution after which a session's variables were saved last."""
        found = [
            row.execution_id
            for path, rows in self._run.log.items()
            for row in rows
            if path.startswith(f"{prefix}.") and row.session_id == session.id and row.execution_id
        ]
        known = session.saved()
        return next((each for each in reversed(found) if each in known), "")


def _has_code(steps: tuple[Step, ...], definition: Definition) -> bool:
    """Return whether there is code among the steps and those inside them."""
    for step in steps:
        if step.is_code or any(_has_code(block, definition) for block in step.blocks):
            return True
        if isinstance(step.config, SubWorkflow):
            child = definition.children[reference_of(step.config)]
            if _has_code(child.steps, child):
                return True
    return False
