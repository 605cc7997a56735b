"""The session of a run, or of one of its parallel branches: cells, variables from the workflow, saved state.

After each step that may leave something in variables, they are saved to a file that carries the id of the step's
execution. So a run that is resumed knows which step the file belongs to, whatever was killed when.
"""

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from belljar.errors import SessionNotFound
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.inside.expressions import MAX_VALUE_BYTES
from belljar.models import ExecutionResult
from belljar.privacy.rules import PrivacyRules
from belljar.questions.models import Question
from belljar.sessions import resumption
from belljar.sessions.endings import save_variables
from belljar.sessions.hibernation import loss_text
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

STATE_PREFIX = "run-state-"
MAX_STDOUT_CHARS = 16_000
MAX_FILES = 100
_TAIL = 64
"""The event of the result is among the last ones of an execution: notices about files and limits come after it."""
_USES_STEPS = re.compile(r"\bsteps\b")


def uses_steps(code: str) -> bool:
    """Return whether code may read what earlier steps gave."""
    return _USES_STEPS.search(code) is not None


class RunSession:
    """One session as a run uses it."""

    def __init__(
        self,
        sessions: Registry,
        principal: str,
        session_id: str,
        patiently: Callable[[Callable[[], Awaitable[Session]]], Awaitable[Session]],
        *,
        saves: bool,
        gives_steps: bool,
        hidden: PrivacyRules | None = None,
    ) -> None:
        self.id = session_id
        self._patiently = patiently
        self._sessions = sessions
        self._principal = principal
        self._saves = saves
        self._gives_steps = gives_steps
        self._hidden = hidden
        """What the guardrails of the workflow hide, beside what the policy does."""
        self._variables: dict[str, Any] = {}
        """Variables of the workflow that the session's Python does not have yet."""
        self._steps: dict[str, Any] = {}
        """What steps gave, as far as the session's Python does not have it yet."""
        self._has_steps = False
        self._saved = ""
        """The execution after which the variables were saved last."""
        self._is_dirty = False
        """Whether what the session itself saved may hold half of a step."""
        self.is_restored = False
        """Whether the session's Python has what the finished steps of a resumed run left in it."""

    def branch(self, session_id: str) -> "RunSession":
        """Return the session of a branch, which was forked from this one."""
        branch = RunSession(
            self._sessions,
            self._principal,
            session_id,
            self._patiently,
            saves=self._saves,
            gives_steps=self._gives_steps,
            hidden=self._hidden,
        )
        branch._variables, branch._steps, branch._has_steps = dict(self._variables), dict(self._steps), self._has_steps
        branch.is_restored = True
        return branch

    # Variables and results for the session's Python

    def set_variable(self, name: str, value: Any) -> None:
        """Have a variable of the workflow be one of Python's before the next code runs."""
        self._variables[name] = value

    def set_step(self, name: str, value: Mapping[str, Any]) -> None:
        """Have the result of a step be in `steps` before the next code runs."""
        if self._gives_steps:
            self._steps[name] = {key: each for key, each in value.items() if key != "result_bytes"}

    def take_as_given(self) -> None:
        """Note that the session's Python has everything so far, because a finished step was run with it."""
        self._has_steps = self._has_steps or self._gives_steps
        self._variables.clear()
        self._steps.clear()

    def note_replayed(self) -> None:
        """Note that code of a finished step was run with everything so far, if the session's Python still has it."""
        if self.is_restored:
            self.take_as_given()

    async def assign(self) -> ExecutionResult | None:
        """Assign what is new in a cell of its own; return its result if it failed."""
        lines = [f"{name} = {value!r}" for name, value in self._variables.items()]
        if self._gives_steps and not self._has_steps:
            lines.append(f"steps = {self._steps!r}  # what earlier steps gave")
        else:
            lines += [f"steps[{name!r}] = {value!r}" for name, value in self._steps.items()]
        for code in _in_cells(lines, self._sessions.settings.max_code_bytes):
            execution = await self.submit(code, "", None)
            while not execution.is_finished:
                await execution.wait(60)
            if not (result := execution.result()).success:
                return result
        self.take_as_given()
        return None

    # Cells

    async def reach(self) -> Session:
        """Return the session, awake, with the variables of the finished steps."""
        session = await self._awake()
        if self._hidden is not None:
            session.redactor.hide_also(self._hidden)
        self._restore(session)
        return session

    async def _awake(self) -> Session:
        """Return the session; wait while it is just being put to sleep, or there is no room for one more."""
        return await self._patiently(lambda: self._sessions.reach(self.id, self._principal))

    async def recordable(self, question: Question) -> Question:
        """Return a question as it may be recorded: without personal data, where the policy says so."""
        redactor = (await self.reach()).redactor
        return question.recordable(redactor.redact_own_text if question.is_ours else redactor.redact_text)

    async def submit(self, code: str, key: str, timeout_s: float | None, *, wants_value: bool = False) -> Execution:
        """Submit a cell under an idempotency key."""
        session = await self.reach()
        cell = make_cell(session.settings, code, timeout_s=timeout_s, allow_input=bool(key), wants_value=wants_value)
        return session.submit(cell, key)

    # Saved variables

    @property
    def keeps_variables(self) -> bool:
        """Return whether variables are saved after steps."""
        return self._saves

    async def has_live_kernel(self) -> bool:
        """Return whether the session's process is there, so that its variables are too."""
        with contextlib.suppress(SessionNotFound):
            kernel = (await self._awake()).session_kernel.kernel
            return kernel is not None and kernel.is_alive()
        return False

    async def save(self, execution_id: str) -> str:
        """Save the variables after a step; return what could not be kept, in words."""
        if not self._saves:
            return ""
        session = await self.reach()
        if session.handover.is_on and session.handover.has(self.id):
            return ""  # the kernel itself outlives the server
        report = await save_variables(session, self._file(execution_id))
        if report is None:
            return "its variables could not be saved, a resumed run will lack them"
        self._forget_older(execution_id)
        return "; ".join(f"a resumed run lacks the variable {loss_text(loss)}" for loss in report.lost[:20])

    def saved(self) -> list[str]:
        """Return the executions after which variables are on disk, in the order that they were saved."""
        found = sorted(self._root.glob(f"{STATE_PREFIX}*"), key=lambda path: path.stat().st_mtime_ns)
        return [path.name.removeprefix(STATE_PREFIX) for path in found]

    def use_saved(self, execution_id: str, *, is_dirty: bool = False) -> None:
        """Start the next kernel from the variables after this execution, if the session has lost its own.

        With `is_dirty`, also if the session saved its own, because they may hold half of a step.
        """
        self._saved, self._is_dirty = execution_id, is_dirty

    def forget_saved(self) -> None:
        """Delete the saved variables, because the run is over."""
        self._forget_older("")

    def _restore(self, session: Session) -> None:
        """Bring the saved variables back, if the session has no kernel any more and did not save its own."""
        kernel = session.session_kernel
        if kernel.kernel is not None or not self._saved:
            return
        is_own = kernel.waking is not None and session.folders.state.exists()
        saved, entry = self._file(self._saved), self._sessions.records.find(self.id)
        if entry is not None and saved.exists() and (self._is_dirty or not is_own):
            resumption.reload(session, entry, saved)
        self._is_dirty = False

    def _forget_older(self, execution_id: str) -> None:
        self._saved = execution_id
        kept = self._file(execution_id)
        for path in self._root.glob(f"{STATE_PREFIX}*"):
            if path != kept:
                path.unlink(missing_ok=True)

    @property
    def _root(self) -> Path:
        return self._sessions.settings.data_directory / "sessions" / self.id

    def _file(self, execution_id: str) -> Path:
        return self._root / f"{STATE_PREFIX}{execution_id}"

    # Results

    def value_of(self, result: ExecutionResult) -> dict[str, Any]:
        """Return what later steps can read of an execution."""
        value: dict[str, Any] = {
            "result": result.result,
            "stdout": result.stdout[:MAX_STDOUT_CHARS],
            "files": [file.name for file in result.files[:MAX_FILES]],
            "status": "done" if result.status == "ok" else "failed",
            "error": result.error or result.cause or "",
        }
        found = self._typed(result)
        if found is not None and "value" in found:
            value["result"] = found["value"]
        size = len(json.dumps(value["result"]))
        if found is not None and "size" in found:
            size = max(size, int(found["size"]))
        if size > MAX_VALUE_BYTES:
            del value["result"]
            value["result_bytes"] = size
        return value

    def _typed(self, result: ExecutionResult) -> dict[str, Any] | None:
        """Return the result as JSON, as the session's kernel wrote it beside its text."""
        since = max(0, result.sequence - _TAIL)
        for event in self._sessions.journal.events(result.execution_id, since):
            found = event.data.get("value")
            if event.kind == "result" and isinstance(found, dict):
                return dict(found)
        return None


def _in_cells(lines: list[str], most_bytes: int) -> list[str]:
    """Return lines as cells that are no longer than code may be."""
    cells: list[str] = []
    for line in lines:
        if cells and len(cells[-1].encode()) + len(line.encode()) + 1 <= most_bytes:
            cells[-1] += f"\n{line}"
        else:
            cells.append(line)
    return cells
