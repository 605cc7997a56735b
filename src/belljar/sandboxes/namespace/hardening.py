"""How well this host can harden a sandbox: with a filter of system calls, and, for root, with a user per session.

Where something is missing, the next best is chosen and the reason recorded. Starts nothing; `bwrap_args.py` says what
the sandbox shows.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import HostUsers, find_host_users
from belljar.sandboxes.seccomp import load_filter

# Variables that must not reach a privileged program from the session it serves: the C library ignores these for
# set-user-ID programs, but setpriv is not one.
_LOADER_PREFIXES = ("LD_", "MALLOC_")
_LOADER_NAMES = frozenset(
    (
        *("GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "MUSL_LOCPATH"),
        *("NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR"),
    )
)
_SHOWN = ("/usr/", "/bin/", "/sbin/")


@dataclass(frozen=True, slots=True)
class Hardening:
    """What can harden a sandbox here, and why something cannot."""

    program: bytes = b""
    """A filter of system calls; empty for none."""
    identities: HostUsers | None = None
    """Users for sessions; None if they run as the server's user, in a user namespace."""
    setpriv: str = ""
    no_filter_reason: str = ""
    """Why there is no filter."""
    no_identity_reason: str = ""
    """Why a server that root runs has no users for its sessions."""
    identity_hint: str = ""
    has_hostname: bool = True
    """Whether sandboxes have a name of their own; the rules of some container engines let nobody set one."""

    def without_identities(self, why: str) -> "Hardening":
        """Return the next best hardening, in which sessions have no users of their own."""
        return replace(self, identities=None, setpriv="", no_identity_reason=why)


def best_hardening() -> Hardening:
    """Return the strongest hardening that this host should support, without trying it."""
    loaded = load_filter()
    hardening = Hardening(program=loaded.program, no_filter_reason=loaded.complaint)
    if os.geteuid() != 0:
        return hardening
    if not loaded.program:
        # A session without its own user namespace could make one; only the filter keeps it from that.
        return hardening.without_identities("there is no filter of system calls")
    return _with_identities(hardening)


def unfiltered_hardening() -> Hardening:
    """Return the strongest hardening for a sandbox with its own kernel, which filters its system calls itself."""
    return _with_identities(Hardening()) if os.geteuid() == 0 else Hardening()


def _with_identities(hardening: Hardening) -> Hardening:
    setpriv = _find_setpriv()
    if not setpriv:
        return replace(
            hardening, no_identity_reason="setpriv is not installed", identity_hint="install util-linux (setpriv)"
        )
    identities = find_host_users()
    if identities is None:
        return hardening.without_identities("too few users are mapped into this user namespace")
    return replace(hardening, identities=identities, setpriv=setpriv)


def drop_command(setpriv: str, identity: Identity, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return what goes before a command so that it runs as that user without capabilities, and its variables.

    Variables that the dynamic loader obeys are set after the drop, because with them setpriv would load the session's
    code as root.
    """
    held_back = {name: value for name, value in environment.items() if _is_obeyed(name)}
    dropping = [
        *(setpriv, "--reuid", str(identity.uid), "--regid", str(identity.gid), "--clear-groups", "--no-new-privs"),
        *("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--"),
    ]
    if held_back:
        dropping += ["/usr/bin/env", *(f"{name}={value}" for name, value in held_back.items())]
    return dropping, {name: value for name, value in environment.items() if name not in held_back}


def _find_setpriv() -> str:
    found = shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin")
    # As the sandbox shows it, links followed, because busybox's setpriv cannot drop capabilities.
    real = os.path.realpath(found) if found else ""
    return real if real.startswith(_SHOWN) and Path(real).name == "setpriv" else ""


def _is_obeyed(name: str) -> bool:
    return name.startswith(_LOADER_PREFIXES) or name in _LOADER_NAMES
