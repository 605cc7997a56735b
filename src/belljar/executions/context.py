"""The contract between an execution and the session it runs in.

`Session` implements `ExecutionContext`, `SessionKernel` implements `KernelContext`. Knows neither of them, nor how a
session is made and ended.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from belljar.executions.admission import Admission
from belljar.executions.outcome import KernelLoss, StateLossNotice
from belljar.executions.shared_workspace import SharedWorkspace
from belljar.files.disk_usage import DiskQuota
from belljar.files.workspace import Workspace
from belljar.journal.journal import Journal
from belljar.kernels.base import Kernel
from belljar.outputs.events import Event, Finished
from belljar.outputs.recorder import Screens
from belljar.plugins import Plugins
from belljar.policy.guard import Guard
from belljar.privacy.redaction import SessionRedactor
from belljar.provisioning.gpus import SessionGpus
from belljar.provisioning.handover import Handover
from belljar.questions.inbox import Inbox
from belljar.settings import Settings
from belljar.skills.session_view import SessionSkills
from belljar.toolbox.base import CallRecord
from belljar.toolbox.broker import Broker


class KernelContext(Protocol):
    """The session's kernel, as the execution that has the session's turn uses it."""

    kernel: Kernel | None
    ended_by: str
    """Why the session ended the kernel while no cell ran; empty when it did not."""
    last_cause: str | None
    """Why the latest cell or kernel ended early."""

    async def ensure_started(self) -> Kernel:
        """Return the kernel, started if there is none."""
        ...

    def take_loss(self) -> StateLossNotice | None:
        """Return what was lost with the last kernel, to the first caller only; None to later ones."""
        ...

    async def take_checkpoint(self) -> None:
        """Take a checkpoint of the session before the cell, unless one was taken since the last cell."""
        ...

    def note_execution(self, execution_id: str, timeout_s: float) -> None:
        """Note for the next server which execution the kernel is about to be given."""
        ...

    def note_call(self, number: int, record: CallRecord) -> None:
        """Note for the next server what became of a tool call of that execution."""
        ...

    def remember(self, finished: Finished) -> None:
        """Note which variables the session holds after the cell."""
        ...

    async def on_death(self, cause: str) -> KernelLoss:
        """Close a kernel that died, and continue from the latest checkpoint where the settings say so."""
        ...


class ExecutionContext(Protocol):
    """One session, as its executions see it."""

    id: str
    principal: str
    environment: str
    settings: Settings
    journal: Journal
    displays: Path
    """The folder for the displays of its cells."""
    workspace: Workspace
    quota: DiskQuota
    sharing: SharedWorkspace | None
    """Its `workspace/` folder, which outlives it; None where there is none."""
    guard: Guard
    plugins: Plugins
    redactor: SessionRedactor
    skills: SessionSkills | None
    """Its folder `skills/`; None where there are no skills."""
    tools: Broker | None
    """The broker for its code's tool calls; None where there are no tools."""
    gpus: SessionGpus
    """The GPUs of all sessions, by their ids."""
    handover: Handover
    """Deposits its kernel for the next server."""
    inbox: Inbox
    """Where people outside the client are asked."""
    admission: Admission
    turn: asyncio.Lock
    """Whoever holds it may use the kernel."""

    @property
    def session_kernel(self) -> KernelContext:
        """Return the session's kernel."""
        ...

    def following_environment(self, on_progress: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call `on_progress` with what is said about its environment, if that is being made while the block runs."""
        ...

    def screens(self) -> Screens:
        """Return what the output of a new execution passes through."""
        ...

    def on_turn(self, execution_id: str, number: int) -> None:
        """Note that the turn of an execution has come."""
        ...

    def waits_for(self, execution_id: str) -> str:
        """Return what an execution whose turn has not come waits for, in words; empty if for nothing that is known."""
        ...

    def on_start(self, execution_id: str) -> None:
        """Tell monitors that the code of an execution runs, which is on record by now."""
        ...

    def note_author(self, author: str) -> str:
        """Note whose cell begins, the owner's if `author` is empty; return a notice about that, or nothing."""
        ...

    def record_use(self) -> None:
        """Put on record that the session is used and which variables it holds."""
        ...

    def pass_to_views(self, execution_id: str, sequence: int, event: Event) -> bool:
        """Pass a widget's message to the front ends that show it; return False when there are none."""
        ...

    def undo_since(self, since: str) -> list[str]:
        """Put an execution and those after it on record as undone; return their ids."""
        ...

    async def add_file(self, stem: str, extension: str, data: bytes) -> str:
        """Write a new file into the session folder, if there is room, and return its name: the first that is free."""
        ...

    async def write_file(self, name: str, data: bytes) -> None:
        """Write a file into the session folder, if there is room."""
        ...
