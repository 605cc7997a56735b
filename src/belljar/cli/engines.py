"""The container engines of this machine, docker and podman, and the command with which they start our image.

`belljar install --docker` writes that command, and on a Mac or on Windows `belljar serve` and `run` use it. This module
and what it imports do without the modules that only Linux has.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.seccomp import container_profile

START_ENGINE = (
    "Start Docker Desktop or the docker service, or install podman (elsewhere than on Linux: `podman machine start`)"
)
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on the PATH: its version, or why it does not answer."""

    path: str
    version: str = ""
    complaint: str = ""

    @property
    def name(self) -> str:
        """Return docker or podman."""
        return Path(self.path).stem


def probed_engines() -> list[Engine]:
    """Return the engines on the PATH, docker first, each with its version or why it does not answer."""
    # With their paths, because a desktop gives its programs a short PATH.
    paths = filter(None, map(shutil.which, ("docker", "podman")))
    return [_probe(path) for path in paths]


def find_engine(*, reason: str = "", hint: str = START_ENGINE) -> Engine:
    """Return an engine that answers; `reason` says what it is needed for, and `hint` what to do where none does."""
    engines = probed_engines()
    for engine in engines:
        if engine.version:
            return engine
    complaints = "; ".join(f"{engine.name}: {engine.complaint}" for engine in engines)
    why = f" ({complaints})" if complaints else ""
    raise SandboxUnavailable(f"{reason}neither docker nor podman answers{why}", hint=hint)


def _probe(path: str) -> Engine:
    try:
        answer = subprocess.run(
            # Podman answers this for docker's template too. Only the server's part needs the engine to run.
            [path, "version", "--format", "{{.Server.Version}}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Engine(path, complaint=str(error))
    version = answer.stdout.strip()
    if answer.returncode or not version:
        return Engine(path, complaint=(answer.stderr.strip().splitlines() or ["no answer"])[-1][:300])
    return Engine(path, version=version)


def container_command(
    image: str, arguments: Sequence[str], *, has_profile: bool = True, engine: Engine | None = None
) -> list[str]:
    """Return the command that starts belljar in a container; `has_profile` writes the engine's rules.

    The container is removed when the client ends it; sessions sleep in a named volume and wake under the next one.
    """
    engine = engine or find_engine()
    options = ["--security-opt", "systempaths=unconfined"]
    # Podman's own rules for system calls allow namespaces and forbid more than ours; elsewhere than on Linux it would
    # look for the file in its virtual machine.
    if engine.name != "podman":
        profile = platformdirs.user_config_path("belljar", appauthor=False) / "container-seccomp.json"
        if has_profile:
            profile.parent.mkdir(parents=True, exist_ok=True)
            profile.write_text(json.dumps(container_profile(), indent=2) + "\n")
        options = ["--security-opt", f"seccomp={profile}", *options]
    if Path("/sys/module/apparmor").exists():
        options += ["--security-opt", "apparmor=unconfined"]
    run = ["run", "-i", "--rm", *options, "-v", "belljar:/data", image]
    return [engine.path, *run, *(["serve", *arguments] if arguments else [])]
