"""Tools over workflows: start one, follow it, pass on a person's answer; and the resources of runs.

A question of a run goes to the person as elicitation where the client can ask; else the answer of the tool says what
is asked, and a later call brings the answer. Both end in the same method of `Workflows`.
"""

import asyncio
import json
import time
from functools import partial
from typing import Annotated, Any, Literal, cast

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ElicitResult, InputRequiredResult
from pydantic import Field, JsonValue

from belljar.errors import BelljarError, InvalidArgument
from belljar.http.auth import current_principal
from belljar.journal.run_records import ENDED
from belljar.mcp.content import model_blocks
from belljar.mcp.execution_wait import (
    PROGRESS_CHARS,
    can_ask,
    elicitation,
    leave_as_task,
    offered_wait_s,
    reply_of,
)
from belljar.mcp.resources import NOTEBOOK, as_resource_error
from belljar.mcp.tools import ENDS, READS, Answer, Ctx, add_tools, refusals_as_results
from belljar.models import Model
from belljar.questions.schema import CONSENT
from belljar.runtime import Runtime
from belljar.toolbox.base import MODERN
from belljar.workflows.live_run import LiveRun
from belljar.workflows.run_views import RunInfo, WorkflowInfo, run_text
from belljar.workflows.step_guards import guardrail_notes
from belljar.workflows.workflows import Workflows, workflows_of

MAX_WAIT_S = 300.0
LISTED_RUNS = 20
MAX_SHOWN_STEPS = 1_000
ANSWER_KEY = "answer"
STATE_PREFIX = "run:"
POLL_S = 0.5
DECLINED = {"action": "decline"}
"""The answer that refuses; a form cannot have a field named like that and this value, see `questions.py`."""


class ListedWorkflows(Model):
    """Answer of `list_workflows`."""

    workflows: list[WorkflowInfo]
    runs: list[RunInfo]


class WorkflowTools:
    """The tools of workflows, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._workflows = workflows_of(runtime)
        self._sessions = runtime.sessions

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools and the templates of resources to a server."""
        add_tools(server, (self.run_workflow, ENDS), (self.list_workflows, READS))
        server.resource(
            "run://{run_id}", name="run", description="A run of a workflow, step by step", mime_type="application/json"
        )(self.run)
        server.resource(
            "run://{run_id}/notebook",
            name="run-notebook",
            description="Everything the session of a run executed, as an .ipynb",
            mime_type=NOTEBOOK,
        )(self.run_notebook)

    @refusals_as_results
    async def run_workflow(
        self,
        ctx: Ctx,
        name: Annotated[str, Field(max_length=100, description="A workflow of list_workflows")] = "",
        definition: Annotated[
            dict[str, JsonValue] | str,
            Field(
                description='Or one as YAML or JSON: {"name": "x", "variables": {}, "steps": '
                '[{"name": "a", "type": "code_execution", "config": {"code": "1"}}]}'
            ),
        ] = "",
        variables: Annotated[dict[str, JsonValue] | None, Field(description="Values for its variables")] = None,
        run_id: Annotated[str, Field(max_length=64, description="Or a run to go on with")] = "",
        answer: Annotated[
            dict[str, JsonValue] | None, Field(description="What the person said to the run's question")
        ] = None,
        step: Annotated[str, Field(max_length=1_000, description="Whose question, if it has several")] = "",
        resume: Annotated[bool, Field(description="Go on with a run that failed or was stopped")] = False,
        wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 45,
    ) -> Answer:
        """Run a list of steps (code_execution, tool_call, form, condition, loop, parallel, workflow) in one session.

        A run outlives this call and the server; no finished step runs twice. Later steps read {{ step.result }}
        (CEL); code reads steps["step"]["result"]. Only a person may answer its questions: ask them.
        """
        principal, notes = current_principal(), list[str]()
        if ctx.request_state is not None:
            run_id = await self._take_answer(ctx)
        elif run_id:
            await self._go_on(run_id, answer, step, resume=resume)
        elif bool(name) == bool(definition):
            raise InvalidArgument("run_workflow takes name, definition or run_id", hint="Pass one of them")
        else:
            text = definition if isinstance(definition, str) else json.dumps(definition)
            library = self._workflows.library
            read = partial(library.by_name, name) if name else partial(library.from_text, text)
            parsed = await asyncio.to_thread(read)  # a large text takes seconds
            run = await self._workflows.start(parsed, principal, variables=variables, source=name)
            run_id, notes = run.id, guardrail_notes(parsed)
        return await self._follow(ctx, run_id, wait_s, notes)

    @refusals_as_results
    async def list_workflows(self) -> Answer:
        """Workflows that run_workflow can run by name, and your latest runs with their state."""
        known = await asyncio.to_thread(self._workflows.known)
        runs = self._workflows.list(current_principal(), LISTED_RUNS)
        lines = [_workflow_line(info) for info in known] or ["No workflow has a name here."]
        lines += ["Runs:", *(_run_line(info) for info in runs)] if runs else []
        return model_blocks(ListedWorkflows(workflows=known, runs=runs), "\n".join(lines))

    async def _go_on(self, run_id: str, answer: dict[str, Any] | None, step: str, *, resume: bool) -> None:
        principal = current_principal()
        if answer is not None and resume:
            raise InvalidArgument("run_workflow takes either answer or resume", hint="Pass one of them")
        if answer is not None:
            action: Literal["accept", "decline"] = "decline" if answer == DECLINED else "accept"
            values = {} if answer in (DECLINED, {"action": "accept"}) else answer
            await self._workflows.answer(run_id, principal, values, action=action, step=step, by="client")
        elif resume:
            await self._workflows.resume(run_id, principal)

    # Resources

    async def run(self, run_id: str) -> str:
        """Return what is known of a run, with its steps."""
        try:
            return self._workflows.show(run_id, current_principal(), most=MAX_SHOWN_STEPS).model_dump_json(indent=2)
        except BelljarError as error:
            raise as_resource_error(error) from error

    async def run_notebook(self, run_id: str) -> str:
        """Return the session of a run as a notebook."""
        try:
            principal = current_principal()
            session_id = self._workflows.record(run_id, principal).session_id
            self._sessions.workspace(session_id, principal)
            return await self._sessions.executions.notebook(session_id)
        except BelljarError as error:
            raise as_resource_error(error) from error

    # Following a run

    async def _follow(self, ctx: Ctx, run_id: str, wait_s: float, notes: list[str]) -> Answer:
        """Wait until the run has ended, asks something that the client cannot put to a person, or time is over."""
        principal, deadline = current_principal(), time.monotonic() + offered_wait_s(wait_s)
        sent, reported = 0, 0
        asked: set[str] = set()
        while True:
            info = self._workflows.show(run_id, principal)
            is_left = info.state == "interrupted" and not self._workflows.is_orphan(run_id, principal)
            if info.state in ENDED or is_left:
                break
            questions = [each for each in self._workflows.questions(run_id, principal) if each[0] not in asked]
            if questions and can_ask(ctx):
                path, question = questions[0]
                if (ctx.protocol_version or "") >= MODERN:
                    request = elicitation(question, ctx)
                    state = f"{STATE_PREFIX}{info.run}#{path}"
                    return InputRequiredResult(input_requests={ANSWER_KEY: request}, request_state=state)
                asked.add(path)
                schema = cast("Any", question.schema or CONSENT)
                response = await ctx.request_context.session.elicit_form(question.message, schema, ctx.request_id)
                await pass_on(self._workflows, run_id, principal, path, response)
                continue
            left_s = deadline - time.monotonic()
            if info.state == "waiting" and info.questions:
                break
            if left_s <= 0:
                leave_as_task(run_task_id(info.run, time.time()))
                break
            live = self._workflows.live(run_id, principal)
            if live is None:
                await asyncio.sleep(min(POLL_S, left_s))  # another server drives it
                continue
            if await live.wait_for_change(min(left_s, 15)) and (line := _latest(live, reported)):
                sent, reported = sent + 1, live.number
                await ctx.report_progress(sent, None, line[:PROGRESS_CHARS])
            # To look at a run takes longer the more steps it has, and one with many takes them quickly.
            await asyncio.sleep(min(1, info.left_out / 10_000))
        return run_answer(self._workflows.show(run_id, principal).model_copy(update={"notes": notes}))

    async def _take_answer(self, ctx: Ctx) -> str:
        """Pass on the answer with which a modern client has come back; return the id of its run."""
        run_id, _, path = (ctx.request_state or "").removeprefix(STATE_PREFIX).partition("#")
        response = (ctx.input_responses or {}).get(ANSWER_KEY)
        if isinstance(response, ElicitResult):
            await pass_on(self._workflows, run_id, current_principal(), path, response)
        return run_id


async def pass_on(workflows: Workflows, run_id: str, principal: str, path: str, response: ElicitResult) -> None:
    """Pass on what a person answered in a client; the question stays open if they have not decided."""
    if response.action != "cancel":
        values = reply_of(response).values
        await workflows.answer(run_id, principal, values, action=response.action, step=path, by="elicitation")


def run_task_id(run_id: str, at: float) -> str:
    """Return the id of a task that follows a run from this time on.

    A run that was resumed or answered is followed by another task, because tasks that have ended stay as they are.
    """
    return f"{run_id}-{int(at * 1000)}"


def run_answer(info: RunInfo) -> CallToolResult:
    """Return what is known of a run as the answer of `run_workflow`."""
    answer = model_blocks(info, run_text(info))
    answer.is_error = info.state == "failed"
    return answer


def _latest(run: LiveRun, reported: int) -> str:
    event = next((each for each in reversed(run.events) if each.kind != "output"), None)
    if event is None or event.number <= reported:
        return ""
    return " ".join(filter(None, [f"{event.path}:" if event.path else "", event.text or event.kind]))


def _workflow_line(info: WorkflowInfo) -> str:
    if info.error:
        return f"{info.name}: cannot be run: {info.error}"
    takes = f" ({', '.join(info.variables)})" if info.variables else ""
    return f"{info.name}{takes}: {info.description or f'{info.steps} steps'}"


def _run_line(info: RunInfo) -> str:
    asks = f", asks: {info.question.message}" if info.question else ""
    at = f" at {info.step}" if info.step else ""
    return f"  {info.run} {info.name}: {info.state}{at}, started {info.started_at}{asks}"
