"""Bubblewrap's command line for a sandbox, a trial whether it works on this host, and advice where it does not."""

import contextlib
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from belljar.sandboxes.base import SandboxSpec
from belljar.sandboxes.namespace.bwrap_args import (
    UserMap,
    arguments,
    encode,
    open_content,
    open_files,
    open_folders,
    user_map_of,
)
from belljar.sandboxes.namespace.hardening import Hardening, drop_command

TRIAL_TIMEOUT_S = 10


class BwrapCommand(NamedTuple):
    """The rest of bubblewrap's command line, and the descriptors that it names."""

    command: list[str]
    descriptors: list[int]
    stdin: int | None = None
    """The command's stdin, instead of an empty one."""

    def after(self, other: "BwrapCommand") -> "BwrapCommand":
        """Return both, the other first."""
        return BwrapCommand([*other.command, *self.command], [*other.descriptors, *self.descriptors], self.stdin)


def bubblewrap_command(
    hardening: Hardening,
    spec: SandboxSpec,
    user_map: UserMap,
    command: Sequence[str],
    environment: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> BwrapCommand:
    """Return the rest of bubblewrap's command line, for a sandbox that runs this command."""
    dropping: list[str] = []
    if user_map.is_for_holder:
        # No signal of the session's reaches it, so it need not ignore any.
        command = ["sleep", "infinity"]
    elif user_map.has_to_drop:
        dropping, environment = drop_command(hardening.setpriv, user_map.user, environment)
    files = open_files(spec, user_map.user, stack)
    # In a file, because every user of the host may read a command line.
    shared = open_folders(spec, stack)
    options = arguments(spec, user_map, environment, files, shared, has_hostname=hardening.has_hostname)
    arguments_fd = open_content(encode(options), stack)
    words, descriptors = ["--args", str(arguments_fd)], [arguments_fd, *files.values(), *shared.values()]
    if hardening.program:
        program = open_content(hardening.program, stack)
        words += ["--seccomp", str(program)]
        descriptors.append(program)
    return BwrapCommand([*words, "--", *dropping, *command], descriptors)


def try_bubblewrap(bubblewrap: Path, hardening: Hardening) -> str:
    """Make a sandbox like a session's, run `true` in it, and return bubblewrap's complaint, or nothing."""
    with open_trial(hardening) as (spec, stack):
        bwrap = bubblewrap_command(
            hardening, spec, user_map_of(spec.identity), ["true"], {"PATH": "/usr/bin:/bin"}, stack
        )
        return try_command(bubblewrap, bwrap)


@contextlib.contextmanager
def open_trial(hardening: Hardening) -> Generator[tuple[SandboxSpec, contextlib.ExitStack]]:
    """Yield the spec of a made-up session, to try a sandbox with."""
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, contextlib.ExitStack() as stack:
        spec = SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder))
        if hardening.identities:
            identity = hardening.identities.take()
            stack.callback(hardening.identities.release, identity)
            spec = replace(spec, identity=identity)
        yield spec, stack


def try_command(bubblewrap: Path, bwrap: BwrapCommand) -> str:
    """Run bubblewrap once and return its complaint, or nothing."""
    try:
        answer = subprocess.run(
            [str(bubblewrap), *bwrap.command],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_TIMEOUT_S,
            pass_fds=bwrap.descriptors,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if answer.returncode == 0 else answer.stderr.strip() or f"bwrap: status {answer.returncode}"


def advice() -> str:
    """Return what the operator can do on a host where bubblewrap is refused."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows bwrap"
    if _setting("user/max_user_namespaces") == "0":
        return "sysctl -w user.max_user_namespaces=10000"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "start the container with --security-opt unmask=ALL (podman), or with --security-opt seccomp=FILE and "
            "--security-opt systempaths=unconfined (docker); `belljar container --seccomp` prints the FILE"
        )
    return "`--sandbox process` does not isolate: choose it knowingly"


def _setting(name: str) -> str:
    try:
        return (Path("/proc/sys") / name).read_text().strip()
    except OSError:
        return ""
