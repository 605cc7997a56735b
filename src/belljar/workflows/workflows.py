"""The workflows of a runtime: checked, started, resumed, answered, stopped, listed, whoever asks for it.

Another principal's run is answered exactly as an unknown one. A run is driven by one server; `answer` is the only way
in which a person's answer reaches it, from whatever surface.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from belljar.errors import BelljarError, Busy, InvalidArgument, RunNotFound, SessionNotFound, WorkflowInvalid
from belljar.inside.expressions import plain_value
from belljar.journal.run_records import ENDED, RunRecord, RunRecords, RunState, StepRecord
from belljar.logs import pseudonym
from belljar.models import iso
from belljar.questions.inbox import check_may_answer
from belljar.questions.models import Action
from belljar.questions.schema import checked_values
from belljar.runtime import Runtime
from belljar.servers import is_living
from belljar.sessions.endings import DAY_S
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.toolbox.toolbox import Toolbox
from belljar.workflows.checks import Checker
from belljar.workflows.definition import NAME, CodeExecution, Definition, StepKind, step_types
from belljar.workflows.interpreter import RunInterpreter
from belljar.workflows.library import Library, digest_of, first_difference, texts_of
from belljar.workflows.live_run import LiveRun, NobodyAnswered, StopRun
from belljar.workflows.questions import RunQuestion, inbox_question, read_question
from belljar.workflows.run_session import RunSession, uses_steps
from belljar.workflows.run_views import RunInfo, WorkflowInfo, run_info
from belljar.workflows.step_guards import hidden_in

MAX_TRIES = 3
"""How many servers in a row may end soon after they took a run over, before it is set aside."""
MAX_LISTED = 100
ID_CHARS = 16
# States of a latest attempt whose code may have run in part.
_UNDER_WAY = ("running", "repeated", "waiting", "answered")

log = logging.getLogger(__name__)


class Workflows:
    """Runs of workflows, over the sessions of one runtime."""

    def __init__(
        self,
        sessions: Registry,
        records: RunRecords,
        toolbox: Toolbox | None,
        is_living: Callable[[str], bool],
        *,
        types: Mapping[str, StepKind],
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self._sessions = sessions
        self._settings = sessions.settings
        self._records = records
        self._toolbox = toolbox
        self._is_living = is_living
        self._recover = recover
        """Records the sessions of servers that are gone as asleep, so that a run of theirs can go on here."""
        folder = self._settings.workflows_directory
        self.library = Library(Path(folder) if folder else None, types)
        self._live: dict[str, LiveRun] = {}

    @classmethod
    def over(cls, runtime: Runtime) -> Self:
        """Return the workflows of a runtime that is being opened."""
        runs, sessions, own = runtime.settings.data_directory / "runs", runtime.sessions, runtime.name
        return cls(
            sessions,
            RunRecords(sessions.journal, own),
            runtime.toolbox,
            lambda server: server == own or is_living(runs, server),
            types=step_types(runtime.plugins),
            recover=sessions.recover_others,
        )

    # Checks

    async def check(self, definition: Definition, given: Iterable[str] = ()) -> None:
        """Raise `WorkflowInvalid` with every problem of a workflow."""
        checker = Checker(
            self._sessions.guardrails.trial(),
            self._settings.environment,
            self._toolbox,
            max_code_bytes=self._settings.max_code_bytes,
        )
        await checker.check(definition, given)

    def known(self) -> list[WorkflowInfo]:
        """Return the workflows that have names."""
        found: list[WorkflowInfo] = []
        for name in self.library.names()[:MAX_LISTED]:
            try:
                definition = self.library.by_name(name)
            except BelljarError as error:
                found.append(WorkflowInfo(name=name, error=error.message))
                continue
            found.append(
                WorkflowInfo(
                    name=name,
                    description=definition.form.description,
                    variables=definition.variables,
                    steps=len(definition.steps),
                )
            )
        return found

    # Starting and resuming

    async def start(
        self, definition: Definition, principal: str, *, variables: Mapping[str, Any] | None = None, source: str = ""
    ) -> LiveRun:
        """Check a workflow and start a run of it."""
        given = _checked_variables(definition, variables or {})
        await self.check(definition)
        await self._sessions.make_room(principal)
        run_id = secrets.token_hex(ID_CHARS // 2)
        session = self._sessions.create(
            principal, environment=definition.form.environment, reason=f"workflow {definition.name}, run {run_id}"
        )
        record = RunRecord(
            id=run_id,
            principal=principal,
            name=definition.name,
            text=definition.source.text,
            texts=json.dumps(texts_of(definition)),
            source=source,
            digest=digest_of(definition),
            variables=json.dumps({**definition.variables, **given}),
            session_id=session.id,
            server=self._records.server,
            state="running",
            started_at=time.time(),
        )
        try:
            self._records.enter(record)
        except BaseException:
            await self._sessions.clear(session.id, principal)
            raise
        log.info("run %s of workflow %s begins", run_id, definition.name, extra=_about(record))
        return self._drive(record, definition)

    async def resume(
        self, run_id: str, principal: str, *, text: Definition | None = None, accepts_change: bool = False
    ) -> LiveRun:
        """Go on with a run that nobody drives. `text` is the workflow as its source has it now, if that is known."""
        record = self.record(run_id, principal)
        if (live := self._live.get(record.id)) is not None:
            return live
        state = self.state_of(record)
        if state == "done":
            raise InvalidArgument(f"run {record.id} is done", hint="Start the workflow again")
        if record.server and self._is_living(record.server):
            raise InvalidArgument(f"run {record.id} is driven by another server", hint="Wait for it, or stop it")
        if text is not None and digest_of(text) != record.digest:
            what = first_difference(self.definition_of(record), text) or "its text differs"
            if not accepts_change:
                raise InvalidArgument(
                    f"the workflow has changed since run {record.id} began: {what}",
                    hint="Resume it with --changed to go on with the new text, or start it again",
                )
            await self.check(text, json.loads(record.variables))
            self._records.replace_text(record.id, text.source.text, json.dumps(texts_of(text)), digest_of(text))
            record = self.record(run_id, principal)
        live = self._take(record, reruns_failed=record.state in ENDED)
        if live is None:
            raise InvalidArgument(f"run {record.id} was taken by another server", hint="Wait for it, or stop it")
        return live

    def _take(self, record: RunRecord, *, reruns_failed: bool = False) -> LiveRun | None:
        """Claim a run and drive it; None if another server was faster."""
        definition = self.definition_of(record)
        if record.server:
            self._recover()
        if not self._records.claim(record):
            return None
        log.info("run %s of workflow %s goes on", record.id, record.name, extra=_about(record))
        return self._drive(self.record(record.id, record.principal), definition, reruns_failed=reruns_failed)

    def definition_of(self, record: RunRecord) -> Definition:
        """Return the workflow of a run. Call it in a thread: a large text takes seconds."""
        return self.library.from_record(record.text, record.source, json.loads(record.texts), record.name)

    def _drive(self, record: RunRecord, definition: Definition, *, reruns_failed: bool = False) -> LiveRun:
        run = LiveRun(record, definition, self._records, hold_s=self._settings.workflow_hold_s)
        run.on_question = partial(self._tell_question, record)
        self._live[record.id] = run
        work = self._driven(run, reruns_failed=reruns_failed)
        run.task = asyncio.get_running_loop().create_task(work, name=f"run {record.id}")
        return run

    def _tell_question(self, record: RunRecord, step: StepRecord, is_waiting: bool) -> None:
        asked = inbox_question(record, step)
        self._sessions.inbox.tell(asked if is_waiting else asked.model_copy(update={"state": "withdrawn"}))

    async def _driven(self, run: LiveRun, *, reruns_failed: bool) -> None:
        """Drive a run to its end, or to a question that nobody answers soon."""
        record = run.record
        session = RunSession(
            self._sessions,
            record.principal,
            record.session_id,
            run.patiently,
            saves=run.definition.form.save,
            gives_steps=_gives_steps(run.definition),
            hidden=hidden_in(run.definition),
        )
        interpreter = RunInterpreter(
            run, self._sessions, self._toolbox, self.library.types, reruns_failed=reruns_failed
        )
        try:
            await self._restore(run, session)
            result = await interpreter.run(session, json.loads(record.variables))
            self._end(run, "done", value=json.dumps(_bounded(result)))
            session.forget_saved()
        except StopRun as stop:
            self._end(run, stop.state, stop.reason)
        except NobodyAnswered:
            await self._let_go(run)
        except SessionNotFound as error:
            self._end(run, "failed", f"its session is gone: {error.message}")
        except BelljarError as error:
            self._end(run, "failed", f"{error.code}: {error}")
        except asyncio.CancelledError:
            self._records.release(run.id)  # whoever comes next goes on with it
            raise
        except Exception as error:
            # The last boundary: a fault of belljar must not leave a run that stays `running` for ever.
            log.exception("run %s failed inside belljar", run.id)
            self._end(run, "failed", f"internal-error: {type(error).__name__}")
        finally:
            self._live.pop(run.id, None)
            run.notify()
        if run.is_released:
            self._take_answered(run.record)

    def _take_answered(self, record: RunRecord) -> None:
        """Go on with a run that was answered while it was let go."""
        found = self._records.find(record.id)
        if found is not None and any(step.state == "answered" for step in self._records.latest_steps(record.id, 1)[0]):
            self._take_safely(found)

    async def _restore(self, run: LiveRun, session: RunSession) -> None:
        """Have the session of a resumed run start with the variables of its finished steps."""
        rows = [row for rows in run.log.values() for row in rows if row.session_id == session.id]
        if not rows:
            return
        # Older states are deleted when a later one is on disk, so the latest is that of the last step that came so far.
        saved = next(reversed(session.saved()), "")
        is_dirty = any(row[-1].execution_id and row[-1].state in _UNDER_WAY for row in run.log.values())
        session.use_saved(saved, is_dirty=is_dirty)
        session.is_restored = bool(saved) or await session.has_live_kernel()

    def _end(self, run: LiveRun, state: RunState, reason: str = "", value: str | None = None) -> None:
        run.state = state
        self._records.set_state(run.id, state, reason, value=value)
        run.tell("end", "", f"{state}{f': {reason}' if reason else ''}")
        log.info("run %s %s", run.id, state, extra=_about(run.record))

    async def _let_go(self, run: LiveRun) -> None:
        """Free what a run holds while it waits for a person: its sessions sleep, and no server drives it."""
        endings = self._sessions.endings
        for session in self._sessions_of(run):
            if session.is_idle and self._settings.hibernate and endings.has_room_for(session):
                # A run that asks before its first cell has a session that has run nothing.
                await endings.hibernate(session, f"its run {run.id} waits for a person", is_expected=True)
        self._records.release(run.id)

    def _sessions_of(self, run: LiveRun) -> list[Session]:
        ids = {run.record.session_id, *(row.session_id for rows in run.log.values() for row in rows)}
        return [session for session in self._sessions.of(run.record.principal) if session.id in ids]

    # Answers

    async def answer(
        self,
        run_id: str,
        principal: str,
        values: Mapping[str, Any] | None = None,
        *,
        action: Action = "accept",
        step: str = "",
        by: str = "",
        is_operator: bool = False,
    ) -> LiveRun | None:
        """Record a person's answer to a question of a run, and have the run go on; the run if this server drives it."""
        record = self.record(run_id, principal)
        asked = self._find_question(record, step)
        question = read_question(asked.question or "")
        check_may_answer(f"{record.id}:{asked.path}", in_console=question.in_console, is_operator=is_operator)
        given = checked_values(question.schema, values or {}) if action == "accept" else {}
        now = time.time()
        if asked.expires_at is not None and now >= asked.expires_at:
            raise InvalidArgument(f"the question of step {asked.path} expired at {iso(asked.expires_at)}")
        answer = json.dumps({"action": action, "values": given, "at": now, "by": by})
        if not self._records.answer(record.id, asked.path, asked.attempt, answer):
            raise InvalidArgument(f"the question of step {asked.path} was answered already")
        return self._go_on(record)

    def _go_on(self, record: RunRecord) -> LiveRun | None:
        if (live := self._live.get(record.id)) is not None:
            live.wake()
            return live
        if record.server and self._is_living(record.server):
            return None  # it looks at its record every second
        try:
            return self._take(self.record(record.id, record.principal))
        except Busy:
            return None  # the answer is on record, and a server takes the run up when it looks again

    def _find_question(self, record: RunRecord, step: str) -> StepRecord:
        """Return the step whose question is to be answered; raise with what became of it if nobody waits for it."""
        if record.state in ENDED:
            raise InvalidArgument(f"run {record.id} waits for no answer: it is {record.state}", hint=record.end)
        waiting = self._records.questions(record.id)
        if not step and waiting:
            return waiting[0]
        if (found := next((row for row in waiting if row.path == step), None)) is not None:
            return found
        rows = [row for row in self._records.asked(record.id) if not step or row.path == step]
        if not rows:
            what = f"step {step} of run {record.id}" if step else f"run {record.id}"
            raise InvalidArgument(f"{what} waits for no answer: it is {self.state_of(record)}")
        last = rows[-1]
        ended = iso(last.ended_at) if last.ended_at else "just now"
        if last.state == "expired":
            raise InvalidArgument(f"the question of step {last.path} expired at {iso(last.expires_at or 0)}")
        if last.state == "declined":
            raise InvalidArgument(f"the question of step {last.path} was declined at {ended}")
        raise InvalidArgument(f"the question of step {last.path} was answered already")

    def questions(self, run_id: str, principal: str) -> list[tuple[str, RunQuestion]]:
        """Return the steps of a run that wait for a person, with what the client may ask them."""
        record = self.record(run_id, principal)
        asked = [(row.path, read_question(row.question or "")) for row in self._records.questions(record.id)]
        return [(path, question) for path, question in asked if not question.in_console]

    def has_asked(self, run_id: str, principal: str, since: float) -> bool:
        """Return whether a run waits for a person, or asked one after a time."""
        rows = self._records.asked(self.record(run_id, principal).id)
        return any(row.state == "waiting" or read_question(row.question or "").asked_at >= since for row in rows)

    # Stopping

    async def stop(self, run_id: str, principal: str, by: str = "somebody") -> None:
        """Stop a run: what runs of it is interrupted, and nothing more begins."""
        record = self.record(run_id, principal)
        if record.state in ENDED:
            raise InvalidArgument(f"run {record.id} is {record.state} already")
        asked = self._records.questions(record.id)
        if not self._is_driven(record) and self._records.end_undriven(record, "stopped", f"{by} stopped it"):
            for step in asked:
                self._tell_question(record, step, is_waiting=False)
            return
        self._records.want(record.id, "stop")
        if (live := self._live.get(record.id)) is not None and live.task is not None:
            live.wake()
            await asyncio.wait([live.task], timeout=60)

    # Looking

    def live(self, run_id: str, principal: str) -> LiveRun | None:
        """Return a run of the caller that this server drives."""
        return self._live.get(self.record(run_id, principal).id)

    def show(self, run_id: str, principal: str, *, most: int | None = None) -> RunInfo:
        """Return what is known of a run."""
        record = self.record(run_id, principal)
        options = {} if most is None else {"most": most}
        return run_info(self._records, record, self.state_of(record), **options)

    def list(self, principal: str, most: int = MAX_LISTED) -> list[RunInfo]:
        """Return the caller's latest runs, newest first, without their steps."""
        return [
            run_info(self._records, record, self.state_of(record), most=0)
            for record in self._records.latest(principal, most)
        ]

    def state_of(self, record: RunRecord) -> RunState:
        """Return the state of a run as of now: one whose server has died is interrupted."""
        return "interrupted" if record.state == "running" and not self._is_driven(record) else record.state

    def _is_driven(self, record: RunRecord) -> bool:
        return record.id in self._live or bool(record.server and self._is_living(record.server))

    def is_orphan(self, run_id: str, principal: str) -> bool:
        """Return whether the server of a run has died, so that another one goes on with it soon."""
        record = self.record(run_id, principal)
        return record.state == "running" and self.state_of(record) == "interrupted"

    def record(self, run_id: str, principal: str) -> RunRecord:
        """Return the record of a run, by its id or enough of its beginning."""
        record = self._records.find(run_id)
        if record is None and run_id.isalnum() and 4 <= len(run_id) < ID_CHARS:
            found = self._records.begins_with(run_id, principal, 2)
            record = found[0] if len(found) == 1 else None
        if record is None or record.principal != principal:
            raise RunNotFound(
                f"run {run_id[:64]!r} does not exist: it was never started, or has been forgotten",
                hint="list_workflows names the latest runs",
            )
        return record

    def record_of_anyone(self, run_id: str) -> RunRecord | None:
        """Return the record of a run by its whole id, whoever owns it: the caller checks who asks."""
        return self._records.find(run_id)

    # In the background

    async def go_on_with_others(self) -> None:
        """Go on with runs that nobody drives: of servers that died, answered, or expired."""
        self._records.settle()
        for record in [*self._records.unfinished(), *self._records.with_work(time.time())]:
            if not self._is_driven(record) and await self._is_ours(record):
                self._take_safely(record)
        self._records.forget_ended(time.time() - self._settings.keep_days * DAY_S)

    async def _is_ours(self, record: RunRecord) -> bool:
        """Return whether a run may go on here: with a store, another server may have gone on with its session."""
        if not record.session_id:
            return True
        try:
            return await self._sessions.own(record.session_id, record.principal)
        except BelljarError:
            return False

    def _take_safely(self, record: RunRecord) -> None:
        if record.server and record.tries >= MAX_TRIES:
            self._set_aside(record)
            return
        try:
            self._take(record)
        except WorkflowInvalid as error:
            self._records.end_undriven(record, "failed", f"its text cannot be read any more: {error.message}")
        except BelljarError as error:
            log.warning("run %s cannot go on: %s", record.id, error, extra=_about(record))

    def _set_aside(self, record: RunRecord) -> None:
        """Go on with a run no more, because no server lives long that does, until somebody resumes it."""
        why = f"set aside: {record.tries} servers in a row ended soon after they went on with it"
        if self._records.end_undriven(record, "interrupted", why):
            hint = f"`belljar workflow resume {record.id}` goes on with it"
            log.warning("run %s of workflow %s is %s; %s", record.id, record.name, why, hint, extra=_about(record))

    async def aclose(self) -> None:
        """Stop driving; whoever comes next goes on with the runs."""
        await asyncio.gather(*(self._abandon(run) for run in [*self._live.values()]))

    async def interrupt(self, run: LiveRun) -> None:
        """Stop driving a run because the person who ran it here interrupted it: it does not go on by itself."""
        run.is_released = True
        self._records.set_state(run.id, "interrupted", "somebody interrupted it")
        await self._abandon(run)

    async def _abandon(self, run: LiveRun) -> None:
        """Stop driving a run and leave its state as it is on record."""
        run.is_released = True
        if run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        # A server that stops forgets sessions that have run nothing, and without its session no run can go on.
        for session in self._sessions_of(run):
            if session.is_blank():
                await self._sessions.endings.hibernate(session, f"its run {run.id} goes on later", is_expected=True)


def workflows_of(runtime: Runtime) -> Workflows:
    """Return the workflows of a runtime."""
    return runtime.parts["workflows"].get()


def _checked_variables(definition: Definition, given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in given if name not in definition.variables]:
        there = ", ".join(definition.variables) or "none"
        raise InvalidArgument(f"workflow {definition.name} has no variable {unknown[0][:64]!r}", hint=f"It has {there}")
    for name, value in given.items():
        try:
            plain_value(value)
        except ValueError as error:
            raise InvalidArgument(f"variable {name}: {error}", hint="Pass plain JSON") from None
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"{name[:64]!r} is no name of a variable")
    return dict(given)


def _gives_steps(definition: Definition) -> bool:
    """Return whether any code of a workflow may read what earlier steps gave."""
    own = any(isinstance(step.config, CodeExecution) and uses_steps(step.config.code) for step in definition.walk())
    return own or any(map(_gives_steps, definition.children.values()))


def _bounded(result: Any) -> Any:
    try:
        return plain_value(result)
    except ValueError as error:
        return f"<{error}>"


def _about(record: RunRecord) -> dict[str, str]:
    return {"session_id": record.session_id, "principal": pseudonym(record.principal)}
