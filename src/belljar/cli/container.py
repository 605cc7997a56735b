"""`belljar container`: serve as the image does when nothing is set.

Chooses what `belljar serve` is told elsewhere: stdio where somebody writes to stdin (`docker run -i`), else HTTP at
port 8000; a key where none is set, made once and shown once; the strongest sandbox that the container's own rules
allow. What the variables say goes first. All that it prints goes to stderr, because stdout may carry the protocol.
"""

import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli.workers import start
from belljar.errors import SandboxUnavailable, SettingsError
from belljar.files.private import open_data_directory
from belljar.sandboxes import ask_checks, providers
from belljar.sandboxes.base import Provider
from belljar.sandboxes.data_path import is_in_container
from belljar.sandboxes.seccomp import container_profile
from belljar.settings import Settings, explain, hash_key, load_command_settings

ADDRESS = "0.0.0.0:8000"
NAMES = ["localhost", "127.0.0.1", "[::1]"]
KEY_FILE = "container-key"
STRONGEST_FIRST = ("namespace", "gvisor")

OPTIONS = "--security-opt seccomp=belljar-seccomp.json --security-opt systempaths=unconfined"
_ADVICE = f"""Let the engine allow nested namespaces, in which each session is sealed off:
    docker run --rm IMAGE container --seccomp > belljar-seccomp.json
    docker run {OPTIONS} …
The same with podman. On hosts with AppArmor add `--security-opt apparmor=unconfined`"""
_ONLY_WALL = (
    "sandbox: process, because the rules of this container's engine allow none that is stronger. The container is the "
    "only wall: sessions are not sealed off from each other or from this server, and reach what it can reach. "
    + _ADVICE
)
_HINT = f"{_ADVICE}. Or choose `-e BELLJAR_SANDBOX=process` knowingly: it isolates nothing"


def command(
    seccomp: Annotated[
        bool, typer.Option("--seccomp", help="Print the rules for system calls that the engine needs, and end.")
    ] = False,
) -> None:
    """Serve as the image does: stdio under `docker run -i`, else HTTP at port 8000 with a key of its own."""
    if seccomp:
        print(json.dumps(container_profile(), indent=2))
        return
    settings = load_command_settings()
    flags: dict[str, Any] = {"sandbox": choose_sandbox(settings)}
    if settings.http or not is_spoken_to(sys.stdin.fileno()):
        flags |= listening_flags(settings)
    start(flags)


def is_spoken_to(descriptor: int) -> bool:
    """Tell whether somebody may write to stdin: a pipe, a socket or a file, and neither `/dev/null` nor a terminal."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return not stat.S_ISCHR(mode)


def listening_flags(settings: Settings) -> dict[str, Any]:
    """Return the flags of a server that listens: its address, the names it answers to, and a key if there is none."""
    flags: dict[str, Any] = {"http": settings.http or ADDRESS}
    if settings.trust_network:
        return flags
    if not settings.allowed_hosts:
        flags["allowed_hosts"] = NAMES
    if not settings.api_keys and not settings.oauth_issuer:
        flags["api_keys"] = [_own_key(settings.data_directory)]
    return flags


def _own_key(folder: Path) -> str:
    """Return the hashed entry of this container's own key; a new one is shown, and only its hash is stored."""
    open_data_directory(folder)
    path = folder / KEY_FILE
    try:
        entry = path.read_text().strip()
    except FileNotFoundError:
        entry = ""
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", hint="Remove it, and another is made"
        ) from error
    if entry:
        _note(f"no keys are set: the key that the first start showed is accepted; remove {path} for another")
        return entry
    key = f"bj_{secrets.token_urlsafe(32)}"
    entry = f"container:sha256:{hash_key(key)}"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(entry + "\n")
    except OSError as error:
        raise SettingsError(
            f"data_directory {folder} cannot be used: {error.strerror}", hint=f"Mount a volume: -v belljar:{folder}"
        ) from error
    _note("no keys are set, so here is one, shown only now. Clients send it as a header:")
    _note(f"    Authorization: Bearer {key}")
    return entry


def choose_sandbox(settings: Settings) -> str:
    """Return the sandbox that was asked for, or the strongest that works here.

    Where none works, the container itself is the wall around one owner's sessions. It is none between owners, nor
    outside of containers: there the start is refused.
    """
    if _is_chosen("sandbox"):
        return settings.sandbox
    known = providers(settings)
    complaints: list[str] = []
    for name in STRONGEST_FIRST:
        complaint = _complaint(known[name])
        if not complaint:
            _note(f"sandbox: {name}")
            return name
        complaints.append(f"{name}: {complaint}")
    if is_in_container() and settings.only_owner:
        _note(_ONLY_WALL)
        return "process"
    owners = "" if settings.only_owner else ", and several people's sessions must be"
    raise SandboxUnavailable(
        f"sessions cannot be sealed off from each other here ({'; '.join(complaints)}){owners}", hint=_HINT
    )


def _is_chosen(name: str) -> bool:
    return any(setting.name == name and setting.origin != "default" for setting in explain())


def _complaint(provider: Provider) -> str:
    return next((f"{check.name}: {check.detail}" for check in ask_checks(provider) if not check.is_ok), "")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
