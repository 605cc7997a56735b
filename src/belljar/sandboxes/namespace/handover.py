"""Hands namespace sandboxes over to the next server: what is deposited of one, and how it is rebuilt.

A nested sandbox needs its parent, so all those that it is nested in are deposited too. Their processes are the
supervisor's children. What a server can make again, such as the mounts that further ones start from, is not deposited.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HostFolder, Identity, Limits, RestoredSandbox, Sandbox, SandboxSpec
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.namespace.namespaces import NamespaceLevel, NamespaceTools
from belljar.sandboxes.namespace.process import NamespaceProcess
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox, NestedSandbox
from belljar.supervisor import Deposit, SupervisorClient

PREFIX = "sandbox:"
TakeIdentity = Callable[[Identity], Callable[[], None]]
"""Marks a user as taken that a restored sandbox has; returns what releases it."""


class NamespaceHandover:
    """Hands over sandboxes made of namespaces. See `SandboxHandover`."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        enforcer: Enforcer,
        tools: Callable[[], NamespaceTools],
        take_identity: TakeIdentity,
    ) -> None:
        self._supervisor = supervisor
        self._enforcer = enforcer
        self._tools = tools
        self._take_identity = take_identity
        self._restored: dict[str, NamespaceSandbox] = {}
        enforcer.keep_with(supervisor)

    def deposit(self, sandbox: Sandbox) -> str:
        """See `SandboxHandover`. The sandboxes that it was nested in are deposited with it."""
        # Exactly these classes, because other providers' subclasses do not end with their first process alone.
        if not isinstance(sandbox, NamespaceSandbox) or type(sandbox) not in (NamespaceSandbox, NestedSandbox):
            return ""
        parent = self.deposit(sandbox.parent) if isinstance(sandbox, NestedSandbox) else ""
        if not sandbox.key:
            sandbox.key = f"{PREFIX}{secrets.token_hex(8)}"
            sandbox.when_closed(lambda: self._supervisor.drop(sandbox.key))
        self._supervisor.store(sandbox.key, _deposit(sandbox, parent))
        return sandbox.key

    def key_of(self, sandbox: Sandbox) -> str:
        """See `SandboxHandover`."""
        return sandbox.key if isinstance(sandbox, NamespaceSandbox) else ""

    def detach(self, sandbox: Sandbox) -> None:
        """See `SandboxHandover`."""
        if isinstance(sandbox, NamespaceSandbox):
            sandbox.detach()

    # Restoring what an earlier server has left

    def restore(self, key: str) -> RestoredSandbox:
        """See `SandboxHandover`."""
        sandbox = self._restore(key)
        sandbox.claim()
        return RestoredSandbox(sandbox, sandbox.processes())

    async def end_unclaimed(self) -> None:
        """See `SandboxHandover`. Their control groups are removed as well."""
        kept = [key for key in self._supervisor.found if key.startswith(PREFIX)]
        for key in [key for key in kept if key not in self._restored and self._supervisor.has(key)]:
            try:
                await self._restore(key).aclose()
            except (SandboxUnavailable, LookupError, TypeError):  # partly gone, or of another version
                self._supervisor.drop(key, ends=True)
        self._enforcer.groups.remove_unclaimed()

    def _restore(self, key: str) -> NamespaceSandbox:
        """Return a sandbox with those it was nested in; their users stay taken for as long as they live."""
        if key not in self._restored:
            deposit = self._supervisor.take(key)
            with ExitStack() as stack:
                descriptors = [*deposit.descriptors]
                stack.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
                self._restored[key] = self._rebuild(key, deposit.fields, descriptors)
        return self._restored[key]

    def _rebuild(self, key: str, words: dict[str, Any], descriptors: list[int]) -> NamespaceSandbox:
        """Make the sandbox anew; remove from `descriptors` those that it uses."""
        tools, spec = self._tools(), _spec_of(words["spec"])
        parent = self._restore(words["origin"]) if words["origin"] else None
        processes = [self._process_of(saved, descriptors) for saved in words["processes"]]
        user, levels = Identity(*words["user"]), words["levels"]
        enforcement = self._enforcer.restore(words["enforcement"], spec.limits)
        if parent is not None:
            level = NamespaceLevel(user, parent.level.root_view, levels)
            sandbox = NestedSandbox(tools, spec, enforcement, level=level, parent=parent)
        else:
            root_view = descriptors.pop(0) if words["has_root_view"] else -1
            sandbox = NamespaceSandbox(tools, spec, enforcement, level=NamespaceLevel(user, root_view, levels))
            if root_view >= 0:
                sandbox.when_closed(lambda: os.close(root_view))
        sandbox.key = key
        sandbox.when_closed(lambda: self._supervisor.drop(key))
        if spec.identity is not None:
            release = self._take_identity(spec.identity)
            # A forkable one owns its user; a nested one's user is its session's, which may have another after this one.
            if parent is None and levels:
                sandbox.when_closed(release)
        sandbox.restored(processes)
        return sandbox

    def _process_of(self, saved: dict[str, Any], descriptors: list[int]) -> NamespaceProcess:
        child = _Gone(saved["pid"]) if saved["is_alone"] else self._supervisor.find_child(saved["pid"])
        process = NamespaceProcess(child, launcher_depth=saved["hops"])
        process.command = tuple(saved["command"])
        process.restored(saved["first_pid"], descriptors.pop(0), saved["command_pid"], is_alone=saved["is_alone"])
        return process


class _Gone:
    """In place of the process that made a sandbox and is gone: there is nothing to wait for, to kill or to reap."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        return 0

    def kill_group(self) -> None:
        pass

    def release(self) -> None:
        pass

    def detach(self) -> None:
        pass


def _deposit(sandbox: NamespaceSandbox, parent: str) -> Deposit:
    processes = [process for process in sandbox.processes() if process.first is not None]
    descriptors = [process.first for process in processes if process.first is not None]
    has_root_view = not parent and sandbox.level.root_view >= 0
    user = sandbox.level.user
    words = {
        "spec": _words_of(sandbox.spec),
        "origin": parent,
        "user": [user.uid, user.gid],
        "levels": sandbox.level.depth,
        "has_root_view": has_root_view,
        "enforcement": sandbox.enforcement.handover_fields(),
        "processes": [
            {
                "pid": process.pid,
                "first_pid": process.first_pid,
                "command": [*process.command],
                "command_pid": process.command_pid(),
                "hops": process.launcher_depth,
                "is_alone": process.is_alone,
            }
            for process in processes
        ],
    }
    children = [process.pid for process in processes if not process.is_alone]
    return Deposit(words, [*descriptors, *([sandbox.level.root_view] if has_root_view else [])], children)


def _words_of(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "session_id": spec.session_id,
        "workspace": str(spec.workspace),
        "scratch": str(spec.scratch),
        "home": str(spec.home),
        "readable": [*map(str, spec.readable)],
        "folders": [asdict(folder) for folder in spec.folders],
        "devices": {inside: str(path) for inside, path in spec.devices.items()},
        "limits": asdict(spec.limits),
        "identity": [spec.identity.uid, spec.identity.gid] if spec.identity else None,
        "keeps_set_ids": spec.keeps_set_ids,
    }


def _spec_of(words: dict[str, Any]) -> SandboxSpec:
    return SandboxSpec(
        session_id=words["session_id"],
        workspace=Path(words["workspace"]),
        scratch=Path(words["scratch"]),
        home=Path(words["home"]),
        readable=tuple(map(Path, words["readable"])),
        folders=tuple(HostFolder(**folder) for folder in words["folders"]),
        devices={inside: Path(path) for inside, path in words["devices"].items()},
        limits=Limits(**words["limits"]),
        identity=Identity(*words["identity"]) if words["identity"] else None,
        keeps_set_ids=words["keeps_set_ids"],
    )
