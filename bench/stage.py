"""Where measurements happen: a data directory for this run alone, around a default environment that is kept.

The environment is the one the tests keep, under `BELLJAR_TEST_DATA` or in the user's cache folder: it takes a minute
and 750 MB to make, and both sides of every comparison run in it.
"""

import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from belljar.environments import Environment, open_environment
from belljar.environments.managed import compile_packages
from belljar.kernels.base import Kernel
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes import open_provider
from belljar.sessions.folders import SessionFolders
from belljar.settings import Settings, load_settings

ENGINES = ("container_engine", "container_image", "runsc")


@dataclass(frozen=True, slots=True)
class Stage:
    """What every measurement is given."""

    folder: Path
    environment: Environment
    is_quick: bool

    def settings(self, sandbox: str = "namespace") -> Settings:
        """Settings of this run; of the user's files and variables only those count that say where an engine is."""
        own = {"data_directory": self.folder, "environment": "default", "sandbox": sandbox, "log_level": "ERROR"}
        return Settings.model_validate({**_host(), **own})

    def pick(self, full: int, quick: int) -> int:
        """How many."""
        return quick if self.is_quick else full

    def rounds(self, count: int, *, within_s: float) -> Iterator[int]:
        """At least one round, at most `count`, no new one once the time is over: a busy machine gets fewer."""
        ends_at = time.monotonic() + within_s
        for number in range(count):
            if number and time.monotonic() > ends_at:
                return
            yield number

    @asynccontextmanager
    async def open_kernel(self, sandbox: str = "namespace") -> AsyncGenerator[Kernel]:
        """A kernel with nothing above it: no session, no journal. Started cold; `forking` measures the others."""
        grounds = self.folder / "kernels"
        grounds.mkdir(mode=0o711, exist_ok=True)
        settings = self.settings(sandbox).model_copy(update={"fork_start": False})
        provider = open_provider(settings)
        starter = KernelStarter(settings, provider, grounds)
        identifier = secrets.token_hex(8)
        folders = SessionFolders(identifier, grounds / identifier, provider.take_identity())
        folders.make()
        kernel = await starter.start("default", folders)
        try:
            yield kernel
        finally:
            await kernel.aclose()
            await starter.aclose()


def _host() -> dict[str, object]:
    found = load_settings()
    return {name: getattr(found, name) for name in ENGINES}


@asynccontextmanager
async def open_stage(*, is_quick: bool) -> AsyncGenerator[Stage]:
    """A stage whose folder goes when it closes."""
    kept = os.environ.get("BELLJAR_TEST_DATA")
    cache = Path(kept) if kept else platformdirs.user_cache_path("belljar") / "tests"
    settings = Settings(data_directory=cache, environment="default")
    environment = await open_environment(settings, "default", on_progress=print)
    # Here, or the first server would do it in the background while it is measured.
    await compile_packages(environment.prefix, on_progress=print)
    with tempfile.TemporaryDirectory(prefix="belljar-bench-") as name:
        folder = Path(name)
        # As a data directory is: the users of sessions pass through it, and list nothing.
        folder.chmod(0o711)
        (folder / "environments").symlink_to(cache / "environments")
        settings = Settings(data_directory=folder, environment="default")
        yield Stage(folder, await open_environment(settings, "default"), is_quick)
