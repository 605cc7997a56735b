"""The users of a new user namespace, mapped while bubblewrap waits for it. What maps to what is `branches.py`'s."""

import os
import subprocess
from contextlib import ExitStack

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import Child, start_child
from belljar.sandboxes.namespace.branches import Ground
from belljar.sandboxes.namespace.trial import Told


class Mapper:
    """Made with bubblewrap's command line; nothing is written until its first process is known."""

    def __init__(self, ground: Ground) -> None:
        self._maps = ground.maps
        self._mapping = ground.mapping
        self._gate: int | None = None
        self._helper: Child | None = None
        self._told: int | None = None

    def words(self, stack: ExitStack) -> Told:
        """What bubblewrap is told, if it has to wait."""
        if not self._maps:
            return Told([], [])
        gate_end, self._gate = os.pipe()
        stack.callback(os.close, gate_end)
        # The second word is for its end: bubblewrap leaves the first to the command, and takes a `sync-fd` from it.
        return Told(["--userns-block-fd", str(gate_end), "--sync-fd", str(gate_end)], [gate_end])

    def start(self) -> None:
        """Start whoever writes, while bubblewrap is starting too: the kernel wants it done from the namespace above."""
        if not self._mapping:
            return
        reading, self._told = os.pipe()
        try:
            self._helper = start_child(
                self._mapping,
                environment={},
                folder="/",
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(),
            )
        finally:
            os.close(reading)

    async def map(self, pid: int) -> None:
        """Write the maps of a process's user namespace, if there are any to write, and let bubblewrap go on."""
        if self._gate is None:
            return
        try:
            if self._helper is None:
                _write(pid, self._maps)
            else:
                await self._have_written(self._helper, pid)
            is_mapped = all(_read(pid, kind) for kind in _KINDS)
        except OSError as error:
            raise SandboxUnavailable(f"The users of a sandbox cannot be mapped: {error.strerror}") from error
        if not is_mapped:
            raise SandboxUnavailable("The users of a sandbox cannot be mapped from the one it is a branch of")
        os.write(self._gate, b"\n")

    async def _have_written(self, helper: Child, pid: int) -> None:
        if self._told is not None:
            os.write(self._told, f"{pid}\n".encode())
        await helper.wait()

    async def aclose(self) -> None:
        """Let everybody go; called once."""
        for descriptor in (self._gate, self._told):
            if descriptor is not None:
                os.close(descriptor)
        if self._helper is not None:
            # At the end of its input it ends.
            await self._helper.wait()
            self._helper.release()


_KINDS = ("uid_map", "gid_map")


def _write(pid: int, maps: str) -> None:
    for kind in _KINDS:
        descriptor = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, maps.encode())
        finally:
            os.close(descriptor)


def _read(pid: int, kind: str) -> bytes:
    descriptor = os.open(f"/proc/{pid}/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
