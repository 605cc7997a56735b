"""pip in place of uv, where uv is missing: the environment's own, for the few things that an installation asks of uv.

It is slower, runs on the host, and says things in another way: here its words become uv's.
"""

import os
import re
import subprocess
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.inventory import Shelf
from belljar.environments.uv import Uv, UvAnswer, run_solver, stopped_after
from belljar.errors import EnvironmentBroken

_PLAN = re.compile(r"^Would install (?P<names>.+)$", re.MULTILINE)
_RENAMED = {"--constraints": "--constraint", "--compile-bytecode": "--compile"}
# With its value: what the environment has and the layer hides is then installed only if the environment's is unfit.
_LEFT_OUT = ("--python", "--reinstall-package")


@asynccontextmanager
async def open_pip_on_host(environment: Environment, folder: Path) -> AsyncGenerator[Uv]:
    """The environment's pip as a process of this server's user, called as uv is."""
    interpreter = await to_thread.run_sync(inspect_interpreter, environment.python)
    if not any(Shelf(path).find("pip") for path in interpreter.paths):
        raise EnvironmentBroken(
            f"uv is missing, and {environment.python} has no pip", hint="Install uv for belljar: pip install uv"
        )
    yield PipAsUv(environment, folder)


@dataclass(frozen=True, slots=True)
class PipAsUv:
    """pip, which answers as uv does."""

    environment: Environment
    folder: Path

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        """Run it once."""
        command = [str(self.environment.python), "-I", "-m", "pip", *translated(arguments)]
        try:
            with anyio.fail_after(timeout_s):
                done = await anyio.run_process(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    check=False,
                    start_new_session=True,
                    # What it unpacks is measured there, and goes with the folder.
                    env={**os.environ, "TMPDIR": str(self.folder), "PIP_NO_CACHE_DIR": "1"},
                )
        except TimeoutError:
            return stopped_after(timeout_s)
        words = done.stdout.decode("utf-8", "replace")
        return UvAnswer(done.returncode, _complaint(words) if done.returncode else "\n".join(_plan(words)))

    async def solve(self, request: str, *, timeout_s: float) -> UvAnswer:
        """Conda's solver, on the host too."""
        return await run_solver(request, directory=self.folder, timeout_s=timeout_s)


def translated(arguments: Sequence[str]) -> list[str]:
    """The arguments of `uv pip install` as pip takes them."""
    verb, *rest = arguments[1:]
    words = ["--disable-pip-version-check", "--no-input", verb]
    waiting = iter(rest)
    for word in waiting:
        if word in _LEFT_OUT:
            next(waiting, "")
        else:
            words.append(_RENAMED.get(word, word))
    return words


def _plan(words: str) -> Iterator[str]:
    """What pip would install, a line each: NAME-VERSION, where only the name may have dashes."""
    for match in _PLAN.finditer(words):
        for word in match["names"].split():
            name, _, version = word.rpartition("-")
            yield f" + {name}=={version}"


def _complaint(words: str) -> str:
    lines = words.splitlines()
    faults = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "error: " + "\n".join(faults or lines or ["pip failed and said nothing"])
