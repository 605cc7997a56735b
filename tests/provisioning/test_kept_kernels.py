"""Kernels that are handed from one server to the next, and what the same calls do where nothing is handed over."""

import json
import os
import select
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.errors import SandboxUnavailable
from belljar.kernels.handover_note import NoteFile, RunningNote
from belljar.kernels.ipython import IPythonKernel
from belljar.provisioning.handover import Handover, RestoredKernel
from belljar.provisioning.kept_kernels import KernelHandover
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes.base import HandoverProvider, Identity
from belljar.sessions.folders import SessionFolders
from belljar.supervisor import client, open_supervisor
from belljar.supervisor.deposit_format import FORM, written
from belljar.toolbox.base import CallRecord
from cells import Place, run, usable
from left_deposits import NAMES, as_left, kind_of, left_by
from serving_process import supervisors
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio

LONG_S = 60.0
CALL = CallRecord("files", "read_text_file", "started")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o711)  # sandboxes pass through it
    yield tmp_path
    for pid in supervisors(tmp_path):
        os.kill(pid, signal.SIGTERM)


@dataclass
class Server:
    """As much of a server as hands kernels over."""

    folder: Path
    environment: Environment
    starter: KernelStarter
    handover: Handover

    def folders(self, identity: Identity | None) -> SessionFolders:
        return SessionFolders("s", self.folder / "s", identity)

    async def start(self) -> IPythonKernel:
        """Start the kernel of session `s`, and deposit it."""
        folders = self.folders(self.starter.provider.take_identity())
        folders.make()
        kernel = await self.starter.start(shared_settings().environment, folders)
        assert isinstance(kernel, IPythonKernel)
        self.handover.deposit("s", kernel, folders.identity)
        return kernel

    async def restore(self) -> RestoredKernel:
        folders = self.folders(self.handover.identity_of("s"))
        return await self.handover.restore("s", folders, self.environment, self.starter.restore_services)


@asynccontextmanager
async def a_server(folder: Path, environment: Environment) -> AsyncGenerator[Server]:
    provider, settings = usable("namespace"), shared_settings().model_copy(update={"fork_start": False})
    assert isinstance(provider, HandoverProvider)
    with open_supervisor(folder, LONG_S) as supervisor:
        assert supervisor is not None
        handover = KernelHandover(supervisor, provider.hand_over_with(supervisor))
        starter = KernelStarter(settings, provider, folder, outlives_server=True)
        try:
            yield Server(folder, environment, starter, handover)
        finally:
            await starter.aclose()


async def test_a_restored_kernel_has_its_variables_and_what_was_noted_of_its_execution(
    folder: Path, default_environment: Environment
) -> None:
    async with a_server(folder, default_environment) as first:
        kernel = await first.start()
        await run(kernel, "x = 1")
        first.handover.note_execution("s", "an execution", 30)
        first.handover.note_call("s", 1, CALL)
        await first.handover.wait_until_settled()
        assert (first.handover.has("s"), first.handover.has_any(), first.handover.left()) == (True, True, [])
        await first.handover.detach("s")
    async with a_server(folder, default_environment) as second:
        assert second.handover.left() == ["s"]
        restored = await second.restore()
        await second.handover.end_unclaimed()
        assert (restored.note.execution_id, restored.note.timeout_s) == ("an execution", 30)
        assert (restored.calls, restored.checkpoints, restored.extra_descriptor) == ([CALL], [], -1)
        await restored.kernel.catch_up()
        outcome = await run(restored.kernel, "x + 1")
        assert outcome.result == {"text/plain": "2"}
        second.handover.withdraw("s")
        assert not second.handover.has("s")
        await restored.kernel.aclose()


async def test_a_sleeping_copy_and_a_descriptor_are_handed_over_with_their_kernel(
    folder: Path, default_environment: Environment
) -> None:
    box = os.memfd_create("box")
    os.write(box, b"kept")
    async with a_server(folder, default_environment) as first:
        kernel = await first.start()
        await run(kernel, "x = 1")
        identity = first.handover.identity_of("s")
        first.handover.deposit("s", kernel, identity, extra_descriptor=box)
        first.handover.deposit_checkpoint("s", "asleep", kernel, await kernel.fork_checkpoint(), {"label": "asleep"})
        first.handover.deposit_checkpoint("s", "gone", kernel, await kernel.fork_checkpoint(), {"label": "gone"})
        first.handover.withdraw_checkpoint("s", "gone")
        await run(kernel, "x = 2")
        await first.handover.detach("s")
    os.close(box)
    async with a_server(folder, default_environment) as second:
        restored = await second.restore()
        with os.fdopen(restored.extra_descriptor, "rb") as handed_over:
            assert os.pread(handed_over.fileno(), 10, 0) == b"kept"
        assert [copy.description for copy in restored.checkpoints] == [{"label": "asleep"}]
        kernel, copy = restored.kernel, restored.checkpoints[0].process
        assert isinstance(kernel, IPythonKernel)
        assert copy is not None
        woken = await kernel.restore(copy)
        outcome = await run(woken, "x")
        assert outcome.result == {"text/plain": "1"}
        await kernel.discard(woken)
        await woken.aclose()


async def test_a_kernel_that_nobody_restores_is_ended(folder: Path, default_environment: Environment) -> None:
    async with a_server(folder, default_environment) as first:
        kernel = await first.start()
        process = os.dup(kernel.pidfd)
        await first.handover.detach("s")
        assert not has_ended(process, within_s=0)
    async with a_server(folder, default_environment) as second:
        second.handover.withdraw("s")
        await second.handover.end_unclaimed()
        assert has_ended(process, within_s=LONG_S)
        with pytest.raises(SandboxUnavailable, match="is not kept"):
            await second.restore()
    os.close(process)


# What another version of belljar has left


@pytest.mark.parametrize("name", NAMES)
async def test_what_each_version_left_of_a_kernel_is_taken_over(
    folder: Path, default_environment: Environment, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by(name)

    def as_written_by_it(fields: dict[str, Any]) -> dict[str, Any]:
        return as_left(left[kind_of(fields)], written(fields) | {"form": left["session"]["form"]})

    with monkeypatch.context() as patch:
        patch.setattr(client, "written", as_written_by_it)
        async with a_server(folder, default_environment) as first:
            kernel = await first.start()
            await run(kernel, "x = 1")
            description = left["checkpoint"]["words"]
            first.handover.deposit_checkpoint("s", "asleep", kernel, await kernel.fork_checkpoint(), description)
            await run(kernel, "x = 2")
            first.handover.note_execution("s", "an execution", 30)
            await first.handover.detach("s")
    async with a_server(folder, default_environment) as second:
        restored = await second.restore()
        await second.handover.end_unclaimed()
        assert restored.note.execution_id == "an execution"
        assert [checkpoint.description for checkpoint in restored.checkpoints] == [description]
        await restored.kernel.catch_up()
        outcome = await run(restored.kernel, "x")
        assert outcome.result == {"text/plain": "2"}
        await restored.kernel.aclose()


@pytest.mark.parametrize("change", [{"form": FORM + 1}, {"doors": 3}, {"identity": 3}])
async def test_what_cannot_be_read_is_told_by_the_version_that_made_it_and_ends(
    folder: Path, default_environment: Environment, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(fields: dict[str, Any]) -> dict[str, Any]:
        return {**written(fields), "version": "9.9", **change}

    with monkeypatch.context() as patch:
        patch.setattr(client, "written", changed)
        async with a_server(folder, default_environment) as first:
            process = os.dup((await first.start()).pidfd)
            await first.handover.detach("s")
    async with a_server(folder, default_environment) as second:
        with pytest.raises(SandboxUnavailable, match=r"it was made by belljar 9\.9, and this is belljar \S+, which"):
            await second.restore()
        second.handover.withdraw("s")
        await second.handover.end_unclaimed()
        assert has_ended(process, within_s=LONG_S)
    os.close(process)


async def test_a_note_of_another_version_is_read_as_far_as_it_is_known() -> None:
    note_file = NoteFile()
    os.pwrite(note_file.descriptor, json.dumps({"execution_id": "e", "later": 1}).encode().ljust(256), 0)
    assert NoteFile(note_file.descriptor).note == RunningNote("e")
    note_file.close()


async def test_a_kernel_outside_a_sandbox_of_namespaces_is_not_deposited(
    folder: Path, default_environment: Environment, process_place: Place
) -> None:
    async with a_server(folder, default_environment) as server, process_place.open("ipython") as kernel:
        server.handover.deposit("s", kernel, None)
        await server.handover.wait_until_settled()
        assert not server.handover.has("s")
        server.handover.note_execution("s", "an execution", 30)
        await server.handover.detach("s")
        assert kernel.is_alive()


async def test_where_nothing_is_handed_over_every_call_leaves_the_kernel_alone(process_place: Place) -> None:
    handover = Handover()
    async with process_place.open("ipython") as kernel:
        handover.deposit("s", kernel, None)
        handover.note_execution("s", "an execution", 30)
        handover.note_call("s", 1, CALL)
        await handover.wait_until_settled()
        assert (handover.is_on, handover.has("s"), handover.has_any(), handover.left()) == (False, False, False, [])
        assert await handover.faults() == {}
        await handover.detach("s")
        handover.withdraw("s")
        await handover.end_unclaimed()
        outcome = await run(kernel, "1 + 1")
        assert outcome.result == {"text/plain": "2"}
    with pytest.raises(SandboxUnavailable):
        handover.identity_of("s")


def has_ended(pidfd: int, *, within_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
