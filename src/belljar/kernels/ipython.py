"""The default kernel: IPython's shell in our own runner, inside the sandbox.

Owns the host's side of it: starting it cold, running cells, forking and checkpoints, and going on with a runner that an
earlier server started. The messages are `protocol.py`'s, the connection is `wire.py`'s, and the runner is
`inside/runner`. Does not know where sandboxes and environments come from.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from belljar.environments.base import Environment
from belljar.errors import CopyRefused, KernelDied
from belljar.kernels import protocol
from belljar.kernels.base import (
    Completeness,
    Completion,
    ImportProof,
    Kernel,
    KernelCheckpoint,
    ProcessUsage,
    StateLoss,
    StateReport,
)
from belljar.kernels.forked_process import (
    FORK_TIMEOUT_S,
    UNKNOWN_STATUS,
    CheckpointProcess,
    ForkedProcess,
    ForkIdentity,
    as_checkpoint_process,
    check_forked,
    fork_timeout,
    hold_open,
    move_into_sandbox,
    parent_of,
    request_fork,
    set_expendable,
)
from belljar.kernels.handover_note import NoNoteFile, NoteFile
from belljar.kernels.launch import (
    await_ready,
    cause_of,
    held_command,
    runner_command,
    send_interrupt,
    session_environment,
)
from belljar.kernels.protocol import check_question, event_of, plain_text
from belljar.kernels.variables import TablePage, TablePart, VariableListing
from belljar.kernels.wire import GONE, Answer, RunnerRequests, Wire, resumed_messages
from belljar.outputs.events import CommMessage, Event, Finished, InputRequest, MimeBundle, Stream
from belljar.sandboxes.base import ForkedSandbox, Incident, NamespaceEntry, Sandbox, SandboxProcess
from belljar.sandboxes.child import open_pidfd

# A process that ends closes its socket a moment before its exit status can be read.
EXIT_GRACE_S = 2.0
# A kernel with jedi reads whole libraries for the first completion.
QUESTION_TIMEOUT_S = 10.0
OVERHEARING_TIMEOUT_S = 1.0
# The runner gives itself a second; a busy machine may take longer.
LOOK_TIMEOUT_S = 3.0


async def start_ipython(
    sandbox: Sandbox, environment: Environment, *, layer: Path, start_timeout_s: float, in_packets: bool = False
) -> "IPythonKernel":
    """Start the runner as a new process and wait until it has attached."""
    wire = Wire(in_packets=in_packets)
    # Checkpoints outlive the kernel only in a sandbox that another process holds open.
    forked = ForkedProcess() if sandbox.can_spare and sandbox.ends_with_command else None
    command = runner_command(environment, "runner", str(wire.child_socket))
    try:
        spawned = await sandbox.spawn(
            held_command(environment, command, wire, forked) if forked else command,
            environment=session_environment(sandbox, environment, layer),
            stdout=wire.child_stdout,
            stderr=wire.child_stderr,
            pass_fds=[wire.child_socket, *([forked.child_end] if forked else [])],
        )
        wire.close_child_ends()
        if forked is not None:
            forked.close_child_end()
        process = forked or spawned
        await await_ready(wire, sandbox, process, start_timeout_s, holder=spawned if forked else None)
    except BaseException:
        wire.close()
        if forked is not None:
            forked.close()
        await sandbox.aclose()
        raise
    return IPythonKernel(wire, sandbox, process, environment)


class IPythonKernel:
    """One runner, as a `Kernel`. Between cells nothing is read, so background output waits in the pipes."""

    name = "ipython"

    def __init__(self, wire: Wire, sandbox: Sandbox, process: SandboxProcess, environment: Environment) -> None:
        self.environment = environment
        self._wire = wire
        self.sandbox = sandbox
        self._process = process
        # Where the sandbox relays the runner's messages, the sender that Linux reports is this very process.
        self._pid = process.pid if wire.peer_pid in (0, os.getpid()) else wire.peer_pid
        self._usage = ProcessUsage(self._pid)
        # Opened now, so that an interrupt can never reach a later process with the same pid.
        self._pidfd = open_pidfd(self._pid)
        self._is_watched = self._pidfd is not None and wire.peer_pid != os.getpid()
        if self._pidfd is not None and self._is_watched:
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        self._requests = RunnerRequests(wire)
        self._is_asking = False
        self._checkpoints: list[CheckpointProcess] = []
        self._forking = asyncio.Lock()
        """Held while one process is asked to fork a kernel."""
        self._note_file: NoteFile | NoNoteFile = NoNoteFile()
        self._incidents: list[Incident] = []
        """Incidents that were found between two cells."""

    def _on_exit(self) -> None:
        """Shut the wire when the runner ends.

        A child that a cell forked in C has the socket too, could go on writing to it, and may in time have the runner's
        pid.
        """
        self._stop_watching()
        self._wire.hang_up()

    def _stop_watching(self) -> None:
        if self._pidfd is not None and self._is_watched:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self._is_watched = False

    async def execute(
        self, code: str, *, allow_input: bool, on_begin: Callable[[], None] | None = None, wants_value: bool = False
    ) -> AsyncIterator[Event]:
        """See `Kernel`."""
        request_id = self._requests.number()
        self._requests.protocol.begin_cell(request_id, allow_input=allow_input)
        self._usage.reset_peak()
        for stream in self._requests.take_early():
            yield stream
        request = {"op": "execute", "id": request_id, "code": code, "allow_input": allow_input}
        if wants_value:
            request["wants_value"] = True
        async for event in self._run(lambda: self._send_cell(request, on_begin)):
            yield event

    async def _send_cell(self, request: dict[str, Any], on_begin: Callable[[], None] | None) -> None:
        if on_begin is not None and not self._wire.in_packets:
            # `on_begin` commits to the journal while IPython parses the code, which waits for `go`: see the contract.
            await self._wire.send({**request, "awaits_go": True})
            on_begin()
            with contextlib.suppress(KernelDied):  # what it sent before it died is still to be read
                await self._wire.send({"op": "go", "id": request["id"]})
            return
        # Another server may take over, and must never find a cell that waits for a `go` from this one.
        if on_begin is not None:
            on_begin()
        self._note_file.send(request["id"], allow_input=request["allow_input"])
        await self._wire.send(request)

    async def deliver_comm(self, message: CommMessage) -> AsyncIterator[Event]:
        """See `CommKernel`."""
        content = {"comm_id": message.comm_id, "data": message.data}
        if message.kind == "comm_open":
            content["target_name"] = message.target
        rest = {"kind": message.kind, "metadata": message.metadata, "buffers": message.buffers}
        request = {"op": "comm", "id": self._requests.number(), "content": content, **rest}
        self._requests.protocol.begin_cell(self._requests.last_id, allow_input=False)
        # What threads have printed since the last cell belongs to the next cell, not to this comm message.
        for stream in self._wire.drain():
            self._requests.keep_early(stream)
        async for event in self._run(lambda: self._wire.send(request)):
            yield event

    async def comms(self) -> dict[str, str]:
        """See `CommKernel`."""
        answer = await self._question({"op": "comms"}, protocol.CommsMessage)
        return answer.opened if answer else {}

    async def receive_comm(self) -> CommMessage | None:
        """See `CommKernel`. Output that has arrived is kept for the next cell."""
        try:
            # A hostile runner may send half a message and no more.
            async with asyncio.timeout(OVERHEARING_TIMEOUT_S):
                while self._wire.has_arrived():
                    for item in await self._wire.receive():
                        if isinstance(item, Stream):
                            self._requests.keep_early(item)
                            continue
                        self._requests.protocol.check(item)
                        if isinstance(event := event_of(item), CommMessage):
                            return event
        except TimeoutError:
            pass
        except KernelDied as gone:
            raise await self._death(gone) from None
        return None

    async def _run(self, send: Callable[[], Awaitable[None]]) -> AsyncIterator[Event]:
        try:
            await send()
            self._wire.expect_answer()
            while True:
                for item in await self._wire.receive():
                    if not isinstance(item, Stream):
                        self._requests.protocol.check(item)
                    event = self._event(item)
                    if event is not None:
                        yield event
                    if isinstance(event, Finished):
                        return
        except KernelDied as gone:
            raise await self._death(gone) from None

    def _event(self, item: Stream | protocol.Message) -> Event | None:
        """Return the event for an item of the latest cell; messages of earlier cells are dropped."""
        if isinstance(item, Stream):
            return item
        # A thread of an earlier cell may update a widget.
        is_heard = item.id == self._requests.last_id or isinstance(item, protocol.CommMessageIn)
        event = event_of(item) if is_heard else None
        if isinstance(event, InputRequest):
            self._is_asking = True
        elif isinstance(event, Finished):
            peak_mb = max(self._usage.peak_memory_mb(), self.sandbox.memory_peak_mb())
            return replace(event, peak_memory_mb=peak_mb)
        return event

    async def _death(self, gone: KernelDied) -> KernelDied:
        """End the kernel and say why: its exit status if it ended, our complaint if it broke the protocol."""
        is_protocol_breach = gone.message != GONE
        status: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if is_protocol_breach else EXIT_GRACE_S):
                status = await self._process.wait()
        await self.kill()
        if status == UNKNOWN_STATUS:
            return KernelDied("the kernel's process ended")
        if status is not None:
            return KernelDied(f"the kernel's process ended with {cause_of(status)}")
        fault = gone.message if is_protocol_breach else "the cell closed the kernel's connection"
        return KernelDied(f"{fault}, so its process was ended")

    # Handover from one server to the next

    async def resume(self) -> AsyncIterator[Event]:
        """See `ResumableKernel`.

        Does not check which message is expected, because an earlier server may have sent any request. Only questions
        are checked, because they stop the execution's clock.
        """
        is_over = False
        may_ask = self._note_file.note.allow_input
        try:
            async for item in resumed_messages(self._wire, self._requests.last_id):
                check_question(item, may_ask=may_ask)
                event = self._event(item)
                if event is None or (is_over and isinstance(event, Finished)):
                    continue
                is_over = is_over or isinstance(event, Finished)
                yield event
        except KernelDied as gone:
            raise await self._death(gone) from None

    async def catch_up(self) -> None:
        """See `ResumableKernel`."""
        async for event in self.resume():
            if isinstance(event, Stream):
                self._requests.keep_early(event)

    def use_note_file(self, note_file: NoteFile) -> None:
        """Record executions in this file from now on; a request that is noted there is one of an earlier server."""
        self._note_file = note_file
        self._requests.last_id = note_file.note.request or self._requests.last_id

    @property
    def wire(self) -> Wire:
        """Return the connection to the runner, to be deposited for the next server."""
        return self._wire

    @property
    def process(self) -> SandboxProcess:
        """Return the runner's process, to be deposited for the next server."""
        return self._process

    @property
    def pid(self) -> int:
        """Return the runner's pid on the host."""
        return self._pid

    @property
    def pidfd(self) -> int:
        """Return the runner's pidfd; negative where there is none."""
        return -1 if self._pidfd is None else self._pidfd

    def detach(self) -> None:
        """Release the process without ending it; checkpoints end, except those whose wire is deposited."""
        for checkpoint in [*self._checkpoints]:
            self.forget(checkpoint)
        self._release()

    def is_alive(self) -> bool:
        """See `Kernel`."""
        return not self._wire.is_hung_up()

    async def reply_input(self, text: str | None) -> None:
        """See `Kernel`."""
        self._is_asking = False
        await self._wire.send({"op": "input", "value": text})

    async def interrupt(self) -> None:
        """Send SIGINT to a busy cell; a cell that waits for input reads its interrupt from the socket."""
        if self._is_asking:
            self._is_asking = False
            await self._wire.send({"op": "input", "is_interrupt": True})
            return
        # Send the message before the signal: a cell that has not begun when the signal comes reads it and does not
        # begin.
        with contextlib.suppress(KernelDied):
            await self._wire.send({"op": "interrupt", "id": self._requests.last_id})
            send_interrupt(self._process, self._pidfd, self._pid)

    async def complete(self, code: str, cursor: int) -> Completion:
        """See `Kernel`."""
        answer = await self._question({"op": "complete", "code": code, "cursor": cursor}, protocol.CompletedMessage)
        return Completion(answer.matches, answer.start, answer.end) if answer else Completion(end=cursor, start=cursor)

    async def inspect(self, code: str, cursor: int, *, detail: int = 0) -> MimeBundle:
        """See `Kernel`."""
        request = {"op": "inspect", "code": code, "cursor": cursor, "detail": detail}
        answer = await self._question(request, protocol.InspectedMessage)
        return answer.data if answer else {}

    async def check_complete(self, code: str) -> Completeness:
        """See `Kernel`."""
        answer = await self._question({"op": "check", "code": code}, protocol.CheckedMessage)
        return Completeness(answer.status, answer.indent) if answer else Completeness()

    async def variables(self, offset: int, limit: int, chars: int) -> VariableListing | None:
        """See `VariableKernel`."""
        request = {"op": "variables", "offset": offset, "limit": limit, "chars": chars}
        return await self._look(request, protocol.VariablesMessage)

    async def rows(self, name: str, part: TablePart) -> TablePage | None:
        """See `VariableKernel`."""
        return await self._look({"op": "rows", "name": name, **asdict(part)}, protocol.RowsMessage)

    async def _look(self, request: dict[str, Any], kind: type[Answer]) -> Answer | None:
        """Ask for variables. Where a session has replaced parts of a library, that may take for ever."""
        try:
            return await self._question(request, kind, LOOK_TIMEOUT_S)
        except KernelDied as gone:
            raise await self._death(gone) from None

    async def _question(
        self, request: dict[str, Any], kind: type[Answer], timeout_s: float | None = None
    ) -> Answer | None:
        """Ask for something that a person who types wants to know; return None when it takes too long.

        Inspecting an object of the session may take for ever. Then the runner is interrupted.
        """
        limit_s = QUESTION_TIMEOUT_S if timeout_s is None else timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._requests.send(request, kind)
                return await self._requests.answer(kind)
        await self.interrupt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._requests.answer(kind)
        return None

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """See `ImportProvingKernel`. What the modules print is dropped."""
        request = {"op": "import", "modules": [*modules], "watched": [*watched]}
        await self._requests.send(request, protocol.ImportedMessage)
        proof = await self._requests.answer(protocol.ImportedMessage, keeps_output=False)
        return ImportProof(frozenset(proof.loaded), proof.errors)

    @property
    def scratch(self) -> str:
        """See `StatefulKernel`."""
        return self.sandbox.scratch

    async def save_state(
        self, path_inside: str, *, limit_bytes: int | None = None, limit_s: float | None = None
    ) -> StateReport:
        """See `StatefulKernel`."""
        return await self._request_state(
            {"op": "save", "path": path_inside, "limit_bytes": limit_bytes, "limit_s": limit_s}
        )

    async def load_state(self, path_inside: str) -> StateReport:
        """See `StatefulKernel`."""
        return await self._request_state({"op": "load", "path": path_inside})

    async def _request_state(self, request: dict[str, str | float | None]) -> StateReport:
        """Have the runner save or load variables. What they print meanwhile is dropped."""
        try:
            await self._requests.send(request, protocol.StateMessage)
            state = await self._requests.answer(protocol.StateMessage, keeps_output=False)
        except KernelDied as gone:
            raise await self._death(gone) from None
        lost = tuple(StateLoss(*map(plain_text, one)) for one in state.lost)
        return StateReport(tuple(state.kept), lost, state.size_bytes)

    # Forks and checkpoints

    async def fork(
        self,
        nested: ForkedSandbox,
        sandbox: Sandbox,
        change: ForkIdentity,
        checkpoint: KernelCheckpoint | None = None,
        *,
        runs_nothing: bool = False,
    ) -> "tuple[IPythonKernel, list[str]]":
        """Return a kernel with the same memory in a sandbox nested in this one's, and a list of what it lacks.

        `sandbox` is the nested one as the kernel sees it. With `checkpoint`, the memory is its. Called between
        cells; `runs_nothing` says that there never are any, and then the fork takes half the processor time.
        """
        wire, forked = Wire(in_packets=self._wire.in_packets), ForkedProcess()
        try:
            entry: NamespaceEntry | None = None
            if runs_nothing:
                await hold_open(sandbox)
                entry = replace(nested.entry(), groups=())  # see `move_into_sandbox`
            # Several may be forked side by side: only the answers of the process that forks have to be told apart.
            async with self._forking, fork_timeout():
                if checkpoint is None:
                    request_id = self._requests.number()
                    self._requests.protocol.begin_question(request_id, protocol.ForkedMessage)
                    await request_fork(self._wire, wire, forked, in_other_sandbox=True, entry=entry, id=request_id)
                    answer = self._check_forked(await self._requests.answer(protocol.ForkedMessage))
                else:
                    await request_fork(
                        as_checkpoint_process(checkpoint).wire, wire, forked, in_other_sandbox=True, id=0
                    )
                    answer = self._check_forked(
                        await as_checkpoint_process(checkpoint).wire.expect(protocol.ForkedMessage)
                    )
            if entry is None:
                await move_into_sandbox(wire, nested, sandbox)
            kernel = await await_fork(wire, forked, sandbox, self.environment, change, entered=nested)
        except BaseException:
            if runs_nothing:
                # What enters the sandbox uses the memory of the process that forks, which would end with it.
                await forked.wait_left_parent()
            wire.close()
            forked.close()
            raise
        set_expendable(forked.pid, is_expendable=False)
        return kernel, answer.lost

    async def fork_checkpoint(self) -> "CheckpointProcess":
        """See `ForkableKernel`. Called between cells."""
        if not self.sandbox.can_spare:
            raise CopyRefused(
                "this sandbox ends all of its processes at once, so no checkpoint could outlive the kernel"
            )
        request_id = self._requests.number()
        self._requests.protocol.begin_question(request_id, protocol.ForkedMessage)
        wire = Wire(has_streams=False)
        try:
            async with fork_timeout():
                await self._wire.send({"op": "fork", "id": request_id}, wire.child_ends)
                wire.close_child_ends()
                answer = self._check_forked(await self._requests.answer(protocol.ForkedMessage))
                await wire.expect(protocol.ReadyMessage)
        except BaseException:
            wire.close()
            raise
        checkpoint = CheckpointProcess(wire, answer.lost)
        self._checkpoints.append(checkpoint)
        return checkpoint

    def _check_forked(self, answer: protocol.ForkedMessage) -> protocol.ForkedMessage:
        """Return the answer; CopyRefused if the runner refused.

        A fork that failed for want of processes is no incident of the session, because its code did not cause it.
        """
        if answer.error:
            self._incidents += [one for one in self.sandbox.incidents() if one.kind != "too_many_processes"]
        return check_forked(answer)

    def adopt_checkpoints(self, checkpoints: Sequence[CheckpointProcess]) -> None:
        """Take over the checkpoints in this sandbox that an earlier server made."""
        self._checkpoints = [*checkpoints]

    async def restore(self, checkpoint: KernelCheckpoint) -> "IPythonKernel":
        """See `ForkableKernel`. The checkpoint stays and can be restored again."""
        checkpoint = as_checkpoint_process(checkpoint)
        change = ForkIdentity(folder=self.sandbox.workspace)
        wire, forked = Wire(in_packets=self._wire.in_packets), ForkedProcess()
        try:
            async with fork_timeout():
                await request_fork(checkpoint.wire, wire, forked, in_other_sandbox=False, id=0)
                self._check_forked(await checkpoint.wire.expect(protocol.ForkedMessage))
            kernel = await await_fork(wire, forked, self.sandbox, self.environment, change)
            await kernel._check_answers()
        except BaseException:
            wire.close()
            forked.close()
            raise
        kernel._checkpoints = self._checkpoints
        set_expendable(forked.pid, is_expendable=False)
        return kernel

    async def _check_answers(self) -> None:
        """Have the kernel answer a request, before it takes the place of another one."""
        async with fork_timeout():
            await self._requests.send({"op": "check", "code": ""}, protocol.CheckedMessage)
            await self._requests.answer(protocol.CheckedMessage)

    def forget(self, checkpoint: KernelCheckpoint) -> None:
        """End a checkpoint, whose process ends when its wire closes."""
        checkpoint = as_checkpoint_process(checkpoint)
        if checkpoint in self._checkpoints:
            self._checkpoints.remove(checkpoint)
        checkpoint.wire.close()

    def shares_sandbox(self, other: Kernel) -> bool:
        """See `ForkableKernel`."""
        return isinstance(other, IPythonKernel) and other.sandbox is self.sandbox

    async def rehearse(self, *, makes_context: bool = False) -> str:
        """See `RehearsableKernel`."""
        await self._requests.send({"op": "rehearse", "makes_context": makes_context}, protocol.RehearsedMessage)
        return plain_text((await self._requests.answer(protocol.RehearsedMessage)).failure)

    async def kill(self) -> None:
        """See `Kernel`. Checkpoints are spared."""
        await self._kill_except(())

    async def _kill_except(self, spared: Sequence[int]) -> None:
        # The pid of a checkpoint that has ended may be that of any other process of the session by now.
        await self.sandbox.kill(
            [*(checkpoint.pid for checkpoint in self._checkpoints if checkpoint.is_alive()), *spared]
        )

    async def discard(self, successor: Kernel | None = None) -> None:
        """See `ForkableKernel`. Where forked processes have keepers, the successor's keeper is spared too."""
        spared: list[int] = []
        if isinstance(successor, IPythonKernel) and self.shares_sandbox(successor):
            keeper = [parent_of(successor._pid)] if isinstance(successor._process, ForkedProcess) else []
            spared = [successor._pid, *keeper]
        await self._kill_except(spared)
        self._release()

    async def aclose(self) -> None:
        """See `Kernel`."""
        for checkpoint in [*self._checkpoints]:
            self.forget(checkpoint)
        await self.sandbox.aclose()
        self._release()

    def _release(self) -> None:
        self._wire.close()
        self._usage.close()
        if isinstance(self._process, ForkedProcess):
            self._process.close()
        if self._pidfd is not None:
            self._stop_watching()
            os.close(self._pidfd)
            self._pidfd = None

    def incidents(self) -> list[Incident]:
        """See `Kernel`."""
        earlier, self._incidents = self._incidents, []
        return [*earlier, *self.sandbox.incidents()]

    def memory_mb(self) -> float:
        """See `Kernel`."""
        return self._usage.memory_mb()

    def cpu_s(self) -> float:
        """See `Kernel`."""
        return self._usage.cpu_s()


async def await_fork(
    wire: Wire,
    forked: ForkedProcess,
    sandbox: Sandbox,
    environment: Environment,
    change: ForkIdentity,
    *,
    entered: ForkedSandbox | None = None,
) -> IPythonKernel:
    """Wait until a forked runner has attached from its sandbox, tell it who it is, and return its kernel.

    A sandbox that it has `entered` sets its limits before.
    """
    await await_ready(wire, sandbox, forked, FORK_TIMEOUT_S)
    if entered is not None:
        await entered.admit(forked.pid)
    await wire.send(change.message())
    return IPythonKernel(wire, sandbox, forked, environment)
