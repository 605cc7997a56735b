"""Sandboxes to fork from, those nested in them, and processes that fork into those as a zygote
does."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, READABLE

from belljar.sandboxes.base import (
    HOLD,
    ForkedSandbox,
    HostFolder,
    Identity,
    Limits,
    Sandbox,
    SandboxProcess,
    SandboxSpec,
)
from belljar.sandboxes.namespace.provider import NamespaceProvider

FORKER = """
import ctypes, json, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def enter(holder, message, groups):
    for group in groups:
        os.write(group, b"0")
    if libc.setns(holder, message["flags"]):
        raise OSError(ctypes.get_errno(), "setns")
    os.setresgid(message["gid"], message["gid"], message["gid"])
    for number in range(64):
        if libc.prctl(24, number, 0, 0, 0):
            break
    os.setresuid(message["uid"], message["uid"], message["uid"])
    if libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)):
        raise OSError("capset")

def become(holder, peer, groups, message):
    try:
        enter(holder, message, groups)
        if os.fork():
            os._exit(0)
    except OSError as error:
        peer.send(json.dumps(repr(error)).encode())
        os._exit(1)
    libc.prctl(4, 1, 0, 0, 0)
    os.chdir("/mnt/data")
    os.closerange(3, peer.fileno())
    os.closerange(peer.fileno() + 1, 500)
    return peer

def serve(peer):
    names = {"os": os, "signal": signal, "libc": libc, "time": time}
    while True:
        data, descriptors, _, _ = socket.recv_fds(peer, 65536, 8)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if "code" in message:
            try:
                names.pop("answer", None)
                exec(message["code"], names)
                answer = names.get("answer")
            except BaseException as error:
                answer = repr(error)
            peer.send(json.dumps(answer).encode())
            continue
        if "copy" in message:
            if os.fork() == 0:
                peer = socket.socket(fileno=descriptors[0])
                peer.send(b'"copied"')
            else:
                os.close(descriptors[0])
            continue
        holder, other, *groups = descriptors
        child = os.fork()
        if child == 0:
            peer = become(holder, socket.socket(fileno=other), groups, message)
            peer.send(b'"entered"')
            continue
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(child, 0)

if os.fork():
    os.closerange(0, 500)
    os.execvp("sleep", ["sleep", "infinity"])
serve(socket.socket(fileno=int(sys.argv[1])))
"""


@dataclass
class SandboxedProcess:
    """A process in a sandbox of its own that does what it is asked."""

    sandbox: Sandbox
    spec: SandboxSpec
    peer: socket.socket
    process: SandboxProcess
    pid: int = 0

    async def ask(self, code: str) -> object:
        """Run code in it; what it calls `answer` comes back."""
        self.peer.send(json.dumps({"code": code}).encode())
        return await self.hear()

    async def hear(self) -> object:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            data = await loop.sock_recv(self.peer, 65536)
        return json.loads(data) if data else None

    async def is_gone(self) -> bool:
        """Whether the other end is closed, once it has nothing more to say."""
        return await self.hear() is None


class ForkedSandboxes:
    """Opens forkable and nested sandboxes and their processes, and closes what was opened."""

    def __init__(self, provider: NamespaceProvider, folder: Path, limits: Limits) -> None:
        self.provider = provider
        self.folder = folder / "sessions"
        self.folder.mkdir(mode=0o711)
        self.folder.chmod(0o711)
        self.limits = limits
        self.folders: Sequence[HostFolder] = ()
        self.opened: list[Sandbox] = []
        self.peers: list[socket.socket] = []

    def spec(self, identity: Identity | None = None, readable: Sequence[Path] = ()) -> SandboxSpec:
        place = self.folder / f"session-{len(list(self.folder.iterdir()))}"
        for name in ("workspace", "scratch", "home"):
            (place / name).mkdir(parents=True, mode=0o700)
        place.chmod(0o711)
        (place / "workspace" / place.name).touch()
        return SandboxSpec(
            session_id=place.name,
            workspace=place / "workspace",
            scratch=place / "scratch",
            home=place / "home",
            readable=[*READABLE, *readable],
            limits=self.limits,
            identity=identity,
            folders=self.folders,
        )

    async def parent(self, readable: Sequence[Path] = ()) -> SandboxedProcess:
        spec = self.spec(readable=readable)
        sandbox = await self.provider.open_forkable(spec)
        self.opened.append(sandbox)
        ours, theirs = self._pair()
        command = [PYTHON, "-I", "-S", "-c", FORKER, str(theirs.fileno())]
        process = await self.hold(sandbox, command, [theirs.fileno()])
        theirs.close()
        return SandboxedProcess(sandbox, spec, ours, process)

    async def hold(self, sandbox: Sandbox, command: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> SandboxProcess:
        with Path(os.devnull).open("w") as nowhere:
            return await sandbox.spawn(
                command or HOLD,
                environment=ENVIRONMENT,
                stdout=nowhere.fileno(),
                stderr=nowhere.fileno(),
                pass_fds=pass_fds,
            )

    async def open_nested(
        self, parent: Sandbox, spec: SandboxSpec | None = None
    ) -> tuple[ForkedSandbox, SandboxProcess]:
        nested = await self.provider.open_nested(spec or self.spec(), parent)
        self.opened.append(nested)
        return nested, await self.hold(nested)

    async def nested(self, parent: SandboxedProcess, *, joins: bool = True) -> SandboxedProcess:
        """A nested sandbox of the sandbox, entered by a fork of the process in it."""
        spec = self.spec()
        nested, process = await self.open_nested(parent.sandbox, spec)
        return await self.enter(parent, nested, process, spec, joins=joins)

    async def enter(
        self,
        parent: SandboxedProcess,
        nested: ForkedSandbox,
        process: SandboxProcess,
        spec: SandboxSpec,
        *,
        joins: bool = True,
    ) -> SandboxedProcess:
        entry = nested.entry()
        message = {"flags": entry.flags, "uid": entry.identity.uid, "gid": entry.identity.gid}
        groups = entry.groups if joins else ()
        peer, pid = await self._tell(parent, message, "entered", [entry.holder], groups)
        await nested.admit(pid)
        return SandboxedProcess(nested, spec, peer, process, pid)

    async def copy(self, sandboxed: SandboxedProcess) -> SandboxedProcess:
        """A fork that stays in the sandbox."""
        peer, pid = await self._tell(sandboxed, {"copy": True}, "copied")
        return replace(sandboxed, peer=peer, pid=pid)

    async def _tell(
        self,
        sandboxed: SandboxedProcess,
        message: Mapping[str, object],
        expected: str,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> tuple[socket.socket, int]:
        """Have a process fork; a way to talk to the fork, and its pid on the host."""
        ours, theirs = self._pair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        socket.send_fds(sandboxed.peer, [json.dumps(message).encode()], [*before, theirs.fileno(), *after])
        theirs.close()
        ours.settimeout(DEADLINE_S)
        data, notes, _, _ = await asyncio.to_thread(ours.recvmsg, 65536, 1024)
        ours.setblocking(False)
        assert json.loads(data or "null") == expected
        (credentials,) = [note[2] for note in notes if note[1] == socket.SCM_CREDENTIALS]
        return ours, struct.unpack("iII", credentials)[0]

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.peers += [ours, theirs]
        return ours, theirs

    async def aclose(self) -> None:
        for sandbox in self.opened:
            await sandbox.aclose()
        for peer in self.peers:
            peer.close()


def nesting_provider() -> NamespaceProvider:
    """One that can nested sandbox here, or a skipped test that says why not."""
    provider = _provider()
    if gap := provider.no_nesting_reason():
        pytest.skip(f"no nested sandboxes: {gap}")
    return provider


@cache
def _provider() -> NamespaceProvider:
    """Tried once for all tests."""
    return NamespaceProvider()


class NestedProvider:
    """A provider like any other, whose sandboxes are nested sandboxes: each of a parent that is closed but for it."""

    name = "nested"
    isolates = True

    def __init__(self, provider: NamespaceProvider) -> None:
        self._provider = provider
        self.warning = provider.warning
        self.check = provider.check
        self.take_identity = provider.take_identity
        self.release_identity = provider.release_identity

    async def open(self, spec: SandboxSpec) -> Sandbox:
        spec.workspace.parent.parent.chmod(0o711)
        folder = spec.workspace.parent / "parent"
        folder.mkdir()
        parent = await self._provider.open_forkable(
            SandboxSpec("parent", folder, folder, folder, spec.readable, nested_folder=spec.workspace.parent.parent)
        )
        with Path(os.devnull).open("w") as nowhere:
            await parent.spawn(
                ["sleep", "infinity"], environment=ENVIRONMENT, stdout=nowhere.fileno(), stderr=nowhere.fileno()
            )
        try:
            return await self._provider.open_nested(spec, parent)
        finally:
            await parent.aclose()
