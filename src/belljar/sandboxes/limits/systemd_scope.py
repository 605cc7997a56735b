"""Asks systemd for a scope: a control group that is this process's own, in which it may make groups for sessions.

Where systemd runs, it alone writes control groups, except below those that it has delegated. So the server has itself
moved into a transient scope with `Delegate=yes`, by one call on the bus of the system's manager (root) or of the user's
own. It stays the same process: its parent, its terminal and its standard streams do not change. `busctl` makes the
call, because it is part of systemd and so is wherever systemd is; a D-Bus library would be one more dependency for it.
"""

import contextlib
import functools
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import ProgramSilent, run_program
from belljar.sandboxes.limits.cgroup_discovery import LEAF, ControlGroups, read_control_groups, read_own_group

log = logging.getLogger(__name__)

_ANSWER_S = 15.0
"""How long systemd may take to answer, and then to move the process."""
_RETRY_S = 0.005
_BOOTED = Path("/run/systemd/system")
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
_DELEGATED = ("trusted.delegate", "user.delegate")
"""The attributes that systemd gives to the folder of a delegated group. Users can read the second, from 251 on."""
# The limits of our present group that the scope gets too, so that nobody escapes the limits of a service by this:
# the file, the property of systemd's, and what a unit in the file is in the property.
_CARRIED = (
    ("memory.max", "MemoryMax"),
    ("memory.high", "MemoryHigh"),
    ("memory.swap.max", "MemorySwapMax"),
    ("pids.max", "TasksMax"),
)
_SECOND_US = 1_000_000
_CONTAINER_ADVICE = (
    "In a container, let it write its own groups: `docker run --security-opt writable-cgroups=true` (Docker 28), or "
    "`podman run --security-opt unmask=/sys/fs/cgroup`"
)


def find_control_groups() -> ControlGroups:
    """Return where groups can be made, after asking systemd for a scope if this process's group is not its own."""
    if refusal := request_scope():
        log.debug("no scope of systemd's: %s", refusal)
    return read_control_groups()


def groups_advice(refusal: str = "") -> str:
    """Return the command that gets this process control groups for its sessions; `refusal` is why it has no scope."""
    own = read_own_group()
    if own is None:
        return f"No control groups are mounted here. {_CONTAINER_ADVICE}"
    if not _BOOTED.is_dir():
        return _CONTAINER_ADVICE
    if refusal and (service := _service(own)):
        return _delegate_advice(own, service)
    if os.geteuid() == 0:
        return "Have a control group delegated: `systemd-run --scope -p Delegate=yes belljar serve`"
    if refusal:
        return "Have systemd run a manager for this user: `sudo loginctl enable-linger $USER`"
    return "Have systemd give users its controllers: `Delegate=yes` in [Service] of `sudo systemctl edit user@.service`"


@functools.cache
def request_scope() -> str:
    """Ask systemd for a scope for this process, where it needs one; return why it gets none, or nothing.

    It asks once a process. Nothing is asked, and nothing is wrong, where systemd does not run, where the groups of
    sessions are not in the v2 hierarchy, or where the present group is delegated already.
    """
    own = read_own_group() if _BOOTED.is_dir() else None
    if own is None or _is_delegated(own):
        return ""
    if service := _service(own):
        # Before the move, because systemd's journal has each line under the unit in which the process then is.
        journal = "journalctl" if _is_of_system(own) else "journalctl --user"
        log.warning(
            "%s lacks Delegate=yes, which control groups for sessions need: this process asks systemd for a scope "
            "of its own instead. What it logs from there is not in `%s -u %s`, but in `%s _PID=%d`. %s",
            *(service, journal, service, journal, os.getpid(), _delegate_advice(own, service)),
        )
    return _move_to_scope(os.getpid(), own)


def _service(own: Path) -> str:
    """Return the service that this group belongs to; empty where it is a login or a scope."""
    name = next((name for name in reversed(own.parts) if name.endswith((".service", ".scope"))), "")
    return name if name.endswith(".service") and not name.startswith("user@") else ""


def _is_of_system(own: Path) -> bool:
    return not any(name.startswith("user@") for name in own.parts)


def _delegate_advice(own: Path, service: str) -> str:
    edit = "sudo systemctl edit" if _is_of_system(own) else "systemctl --user edit"
    return f"Write `Delegate=yes` into its section [Service]: `{edit} {service}`"


def supervisor_groups(pid: int, *, asks_systemd: bool) -> ControlGroups | None:
    """Return where a supervisor's sessions have their groups, if not below the server's own; it may get a scope for it.

    systemd starts the process of a unit in the unit's own group, or in `DelegateSubgroup=` of it, and the kernel allows
    no process in a group that passes controllers on. Sessions with controllers below the unit's own group, which
    outlive its process, would keep the unit from starting again: then their supervisor needs a group elsewhere.
    """
    own = read_own_group() if _BOOTED.is_dir() else None
    if own is None or own.name == LEAF or not _is_delegated(own):
        return None
    process = Path(f"/proc/{pid}")
    present = read_own_group(process)
    if present is None or not present.parent.name.endswith(".scope"):
        refusal = _move_to_scope(pid, own) if asks_systemd else "the setting systemd_scope is off"
        if refusal:
            unit = next((name for name in reversed(own.parts) if name.endswith(".service")), own.name)
            raise SandboxUnavailable(
                f"keep_alive cannot be used: systemd could not start {unit} again beside its sessions, and their"
                f" supervisor gets no scope of its own: {refusal}",
                hint=f"Write `DelegateSubgroup={LEAF}` into the unit (systemd 254 or newer), or run `loginctl"
                " enable-linger` for its user, or set keep_alive = false",
            )
    return read_control_groups(process)


def _move_to_scope(pid: int, own: Path) -> str:
    """Have systemd move a process into a scope of its own, in the slice of `own`; return why not, or nothing."""
    if (busctl := shutil.which("busctl")) is None:
        return "busctl, which is part of systemd, is not on the PATH"
    unit = f"belljar-{pid}-{secrets.token_hex(4)}.scope"
    if refusal := _call(busctl, unit, own, pid):
        return refusal
    return _enter_leaf(unit, pid)


def _is_delegated(own: Path) -> bool:
    """Return whether systemd has given this group, or one above it, to those within it."""
    for folder in (own, *own.parents):
        # The folder of a user's own manager is delegated to that manager, not to us.
        if folder.name.startswith("user@"):
            return _is_delegated_by_own_manager(own)
        for name in _DELEGATED:
            with contextlib.suppress(OSError):
                if os.getxattr(folder, name) == b"1":
                    return True
    return False


def _is_delegated_by_own_manager(own: Path) -> bool:
    """Return whether the user's manager delegates the unit we are in; it sets no attributes (seen with systemd 252)."""
    unit = next((name for name in reversed(own.parts) if name.endswith((".service", ".scope"))), "")
    systemctl = shutil.which("systemctl")
    if systemctl is None or unit.startswith("user@"):
        return False
    environment = _plain_environment() | {"XDG_RUNTIME_DIR": str(_runtime_folder())}
    show = [systemctl, "--user", "show", "--property=Delegate", "--value", "--", unit]
    try:
        return run_program(show, timeout_s=_ANSWER_S, environment=environment).output.strip() == "yes"
    except ProgramSilent:
        return False


def _plain_environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def _runtime_folder() -> Path:
    """Return where the bus of the user's manager is; MCP clients start their servers without the variable for it."""
    return Path("/run/user") / str(os.geteuid())


def _call(busctl: str, unit: str, own: Path, pid: int) -> str:
    """Ask for the scope; return why systemd refuses, or nothing."""
    # No question of polkit's may appear on the terminal, which is the client's where MCP is served over it.
    command = [busctl, "--allow-interactive-authorization=no", f"--timeout={_ANSWER_S:g}"]
    environment = _plain_environment()
    if os.geteuid() == 0:
        command += ["--system"]
    else:
        runtime = _runtime_folder()
        try:
            (runtime / "bus").stat()
        except PermissionError:
            return f"{runtime}/bus is hidden from this process: in a unit, write `ProtectHome=read-only` for `yes`"
        except OSError:
            return f"{runtime}/bus is not there: systemd runs no manager for this user"
        command += ["--user"]
        environment |= {"XDG_RUNTIME_DIR": str(runtime), "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus"}
    properties = [
        ["Description", "s", "belljar and its sessions"],
        ["Delegate", "b", "true"],
        ["PIDs", "au", "1", str(pid)],
        ["CollectMode", "s", "inactive-or-failed"],
        *_placement(own),
        *_limits(own),
    ]
    values = [value for each in properties for value in each]
    call = ["StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", str(len(properties)), *values, "0"]
    asking = [*command, "call", *_MANAGER, *call]
    try:
        answer = run_program(asking, timeout_s=_ANSWER_S + 1, environment=environment)
    except ProgramSilent as silence:
        return f"busctl does not answer: {silence}"
    if answer.status != 0:
        return f"systemd refuses a scope: {' '.join(answer.errors.split())[:300] or answer.status}"
    return ""


def _placement(own: Path) -> list[list[str]]:
    """Return the slice that the process is in already, so that the limits of that slice go on to count."""
    names = list(own.parts)
    if os.geteuid() != 0:
        manager = f"user@{os.geteuid()}.service"
        # A login is no part of the tree of the user's manager; that has a slice for what it starts.
        names = names[names.index(manager) + 1 :] if manager in names else []
    slices = [name for name in names if name.endswith(".slice")]
    return [["Slice", "s", slices[-1]]] if slices else []


def _limits(own: Path) -> list[list[str]]:
    limits = [[name, "t", value] for file, name in _CARRIED if (value := _number(own / file))]
    with contextlib.suppress(OSError, ValueError):
        quota, period = (own / "cpu.max").read_text().split()
        if quota != "max":
            limits.append(["CPUQuotaPerSecUSec", "t", str(int(quota) * _SECOND_US // int(period))])
    return limits


def _number(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    return text if text.isdecimal() else ""


def _enter_leaf(unit: str, pid: int) -> str:
    """Wait until the process is in its scope, and move it into a leaf there, where its children will be as well."""
    deadline = time.monotonic() + _ANSWER_S
    while (group := read_own_group(Path(f"/proc/{pid}"))) is None or group.name != unit:
        if time.monotonic() > deadline:
            return f"systemd did not move process {pid} into {unit}"
        time.sleep(_RETRY_S)
    try:
        (group / LEAF).mkdir(exist_ok=True)
        (group / LEAF / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        return f"{group} cannot be written: {error.strerror}"
    return ""
