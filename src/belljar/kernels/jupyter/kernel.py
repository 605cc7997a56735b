"""A running Jupyter kernel behind our contract: turns cells into messages, and messages into events. Starts nothing."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack

from belljar.errors import KernelDied
from belljar.kernels.base import Completeness, Completion, ImportProof, ProcessUsage, proof_expression, read_proof
from belljar.kernels.ipython import EXIT_GRACE_S, QUESTION_TIMEOUT_S
from belljar.kernels.jupyter import messages
from belljar.kernels.jupyter.channels import Channels
from belljar.kernels.jupyter.specs import KernelSpec
from belljar.kernels.launch import cause_of, send_interrupt
from belljar.kernels.protocol import plain_text
from belljar.outputs.events import (
    ClearOutput,
    DisplayData,
    Event,
    ExecuteResult,
    Finished,
    InputRequest,
    MimeBundle,
    Raised,
    Stream,
)
from belljar.sandboxes.base import Incident, Sandbox, SandboxProcess
from belljar.sandboxes.child import open_pidfd
from belljar.settings.environments import KERNEL_PREFIX

# A kernel publishes with ZeroMQ's PUB, which drops what a full queue cannot take, "idle" included. If nothing arrives
# for this long after the reply, nothing more will.
IDLE_GRACE_S = 5.0
# How long to wait for output after "idle". It was seen 1 ms late, on a busy machine.
LATE_OUTPUT_S = 0.05
LOST = "\n[some output of this cell was lost: the kernel sent it faster than it could be read]\n"
# What terminals send for Ctrl-D, and what kernels take for the end of input.
_END_OF_INPUT = "\x04"


class JupyterKernel:
    """One Jupyter kernel. It owns `resources`; output that comes between cells is shown by the next cell."""

    def __init__(
        self,
        spec: KernelSpec,
        sandbox: Sandbox,
        process: SandboxProcess,
        channels: Channels,
        resources: AsyncExitStack,
    ) -> None:
        self.name = f"{KERNEL_PREFIX}{spec.name}"
        self._spec = spec
        self._sandbox = sandbox
        self._process = process
        self._channels = channels
        self._resources = resources
        self.pid = self._pid = channels.peer_pid or process.pid
        self._usage = ProcessUsage(self._pid)
        resources.callback(self._usage.close)
        self._execution_count = 0
        self._question_id = ""
        # Opened now, so that an interrupt can never reach a later process with the same pid.
        self._pidfd = open_pidfd(self._pid)
        if self._pidfd is not None:
            resources.callback(os.close, self._pidfd)
        self._watch = asyncio.get_running_loop().create_task(self._watch_for_end())
        resources.push_async_callback(self._stop_watching)

    async def wait_ready(self) -> None:
        """Wait until the kernel answers and its output arrives. Called once, by `launch.py`."""
        while True:
            await self._channels.ask("kernel_info_request", {})
            # The subscription to its output is on another connection than the request and may come too late for it.
            # A second request repeats what was missed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._wait_idle()
                    return

    async def _wait_idle(self) -> None:
        while True:
            match (await self._channels.receive()).content:
                case messages.Status(execution_state="idle"):
                    return
                case _:
                    continue

    async def execute(
        self, code: str, *, allow_input: bool, on_begin: Callable[[], None] | None = None, wants_value: bool = False
    ) -> AsyncIterator[Event]:
        """See `Kernel`."""
        if on_begin is not None:
            on_begin()
        self._usage.reset_peak()
        cpu_before_s = self._usage.cpu_s()
        request = {"code": code, "silent": False, "store_history": True, "allow_stdin": allow_input}
        cell = _CellRequest(await self._channels.send("shell", "execute_request", request))
        while not cell.is_over:
            try:
                async with asyncio.timeout(IDLE_GRACE_S if cell.reply else None):
                    message = await self._channels.receive()
            except TimeoutError:
                yield Stream("stderr", LOST)
                break
            for event in cell.events(message):
                if isinstance(event, InputRequest):
                    self._question_id = message.id
                    if not allow_input:  # some kernels ask all the same
                        await self.reply_input(None)
                        continue
                yield event
        if not self._spec.is_python:
            async for event in self._late_events(cell):
                yield event
        for event in cell.closing_events():
            yield event
        yield self._finished(cell, self._usage.cpu_s() - cpu_before_s)

    async def _late_events(self, cell: "_CellRequest") -> AsyncIterator[Event]:
        """Yield what is sent after "idle", which should come last: Deno's kernel does not wait for its own sends."""
        with contextlib.suppress(TimeoutError, KernelDied):
            while True:
                async with asyncio.timeout(LATE_OUTPUT_S):
                    message = await self._channels.receive()
                for event in cell.events(message):
                    if not isinstance(event, InputRequest):  # the cell has ended and can no longer ask
                        yield event

    def _finished(self, cell: "_CellRequest", cpu_s: float) -> Finished:
        if cell.execution_count is not None:
            self._execution_count = cell.execution_count
        peak_mb = max(self._usage.peak_memory_mb(), self._sandbox.memory_peak_mb())
        return Finished(cell.is_ok, self._execution_count, max(0.0, cpu_s), peak_mb)

    def is_alive(self) -> bool:
        """See `Kernel`."""
        return not self._watch.done()

    async def reply_input(self, text: str | None) -> None:
        """See `Kernel`."""
        question_id, self._question_id = self._question_id, ""
        answer = {"status": "ok", "value": _END_OF_INPUT if text is None else text}
        await self._channels.send("stdin", "input_reply", answer, parent_id=question_id)

    async def interrupt(self) -> None:
        """Send a message or SIGINT, as the kernelspec says. Never waits, because the caller may have to kill next."""
        if self._spec.is_interrupted_by_message:
            self._channels.send_nowait("control", "interrupt_request", {})
            return
        send_interrupt(self._process, self._pidfd, self._pid)
        # ipykernel 7 notes the signal in its event loop without waking it, so a cell that awaits would go on waiting.
        # Any request wakes the loop; the answer is dropped.
        self._channels.send_nowait("shell", "kernel_info_request", {})

    async def complete(self, code: str, cursor: int) -> Completion:
        """See `Kernel`."""
        match await self._ask("complete_request", {"code": code, "cursor_pos": cursor}):
            case messages.CompleteReply(matches=matches, cursor_start=start, cursor_end=end):
                return Completion(matches, start, end)
            case _:
                return Completion(start=cursor, end=cursor)

    async def inspect(self, code: str, cursor: int, *, detail: int = 0) -> MimeBundle:
        """See `Kernel`."""
        match await self._ask("inspect_request", {"code": code, "cursor_pos": cursor, "detail_level": detail}):
            case messages.InspectReply(found=True, data=data):
                return _plain(data)
            case _:
                return {}

    async def check_complete(self, code: str) -> Completeness:
        """See `Kernel`. Many kernels answer "unknown"."""
        match await self._ask("is_complete_request", {"code": code}):
            case messages.IsCompleteReply(status=status, indent=indent):
                return Completeness(status, indent)
            case _:
                return Completeness()

    async def _ask(self, kind: str, content: dict[str, str | int]) -> messages.Content | None:
        """Return the answer to a request, or None after `QUESTION_TIMEOUT_S`.

        A kernel that does not know a kind of request need not answer it at all.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                return (await self._channels.ask(kind, content)).content
        return None

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """See `ImportProvingKernel`. Sent as a user expression of an empty, silent cell; only Python kernels answer."""
        expressions = {"proof": proof_expression(modules, watched)}
        request = {"code": "", "silent": True, "store_history": False, "user_expressions": expressions}
        match (await self._channels.ask("execute_request", {**request, "allow_stdin": False})).content:
            case messages.ExecuteReply(user_expressions={"proof": {"data": {"text/plain": str(text)}}}):
                proof = read_proof(text)
            case _:
                proof = None
        return proof or ImportProof(errors=dict.fromkeys(modules, "the kernel did not tell"))

    async def kill(self) -> None:
        """See `Kernel`."""
        await self._sandbox.kill()

    async def aclose(self) -> None:
        """See `Kernel`."""
        await self._resources.aclose()
        self._pidfd = None

    def incidents(self) -> list[Incident]:
        """See `Kernel`."""
        return self._sandbox.incidents()

    def memory_mb(self) -> float:
        """See `Kernel`."""
        return self._usage.memory_mb()

    def cpu_s(self) -> float:
        """See `Kernel`."""
        return self._usage.cpu_s()

    async def _watch_for_end(self) -> None:
        """Wait until the process ends, a connection is lost or the protocol is broken; then end all and say why."""
        exited = asyncio.get_running_loop().create_task(self._process.wait())
        breach = self._channels.breach
        try:
            await asyncio.wait([exited, breach, *self._channels.readers], return_when=asyncio.FIRST_COMPLETED)
            if not breach.done():
                # A process that ends closes its connections, before or after; a forked child may hold them open.
                await asyncio.wait([exited, *self._channels.readers], timeout=EXIT_GRACE_S)
            await self._sandbox.kill()
            self._channels.close(_death(exited.result() if exited.done() else None, breach))
        finally:
            exited.cancel()

    async def _stop_watching(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)


def _death(status: int | None, breach: "asyncio.Future[KernelDied]") -> KernelDied:
    if breach.done():
        return KernelDied(f"{breach.result().message}, so its process was ended")
    if status is not None:
        return KernelDied(f"the kernel's process ended with {cause_of(status)}")
    return KernelDied("the cell closed the kernel's connection, so its process was ended")


class _CellRequest:
    """One request and what has come back for it. It has ended when the reply and "idle" came, in any order."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._is_idle = False
        self._has_raised = False
        self.reply: messages.ExecuteReply | None = None

    @property
    def is_over(self) -> bool:
        return self.reply is not None and self._is_idle

    @property
    def is_ok(self) -> bool:
        return self.reply is not None and self.reply.status == "ok"

    @property
    def execution_count(self) -> int | None:
        return self.reply.execution_count if self.reply else None

    def events(self, message: messages.Message) -> Iterator[Event]:
        """Yield the events of a message. Output of any request counts, because threads of earlier cells print later."""
        match message.content:
            case messages.StreamText(name=name, text=text):
                yield Stream("stderr" if name == "stderr" else "stdout", text)
            case messages.DisplayContent(data=data, transient=transient) as display:
                is_update = isinstance(display, messages.DisplayUpdate)
                yield DisplayData(_plain(data), transient.display_id, is_update)
            case messages.ClearContent(wait=wait):
                yield ClearOutput(wait)
            case _ if message.parent_id == self._request_id:
                yield from self._own_events(message.content)
            case _:
                return

    def _own_events(self, content: messages.Content) -> Iterator[Event]:
        match content:
            case messages.ExecuteReply() as reply:
                self.reply = reply
            case messages.ResultContent(data=data):
                yield ExecuteResult(_plain(data))
            case messages.ErrorContent() as error:
                self._has_raised = True
                yield _raised(error)
            case messages.InputContent(prompt=prompt, password=is_password):
                yield InputRequest(prompt, is_password)
            case messages.Status(execution_state="idle"):
                self._is_idle = True
            case _:
                return

    def closing_events(self) -> Iterator[Event]:
        """Yield what only the reply says. Called at the end, because the reply may overtake the output."""
        if self.reply is None:
            return
        for payload in self.reply.payload:
            if payload.source == "page" and isinstance(text := payload.data.get("text/plain"), str):
                yield Stream("stdout", plain_text(text) + "\n")
        if self.reply.status == "error" and not self._has_raised:
            yield _raised(self.reply)


def _raised(error: messages.ErrorContent) -> Raised:
    lines = [line for block in error.traceback for line in plain_text(block).splitlines()]
    # Some kernels give no name: bash_kernel sends the exit status and nothing else.
    return Raised(error.ename or "Error", plain_text(error.evalue), lines)


def _plain(data: MimeBundle) -> MimeBundle:
    """Remove ANSI codes from `text/plain`, because some kernels write it for terminals, with colours."""
    text = data.get("text/plain")
    return {**data, "text/plain": plain_text(text)} if isinstance(text, str) and "\x1b" in text else data
