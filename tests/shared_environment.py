"""The default environment, prepared once for all test runs: it takes 25 s and 950 MB.

It is kept under `BELLJAR_TEST_DATA`, or in the user's cache folder.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import platformdirs
import pytest

from belljar.environments import Environment, base, open_environment
from belljar.environments.installed_packages import Distribution, PackageFolder
from belljar.environments.managed import compile_packages
from belljar.settings import Settings, load_settings

# Looked up once: some tests have another home.
_KEPT = os.environ.get("BELLJAR_TEST_DATA")
FOLDER = Path(_KEPT) if _KEPT else platformdirs.user_cache_path("belljar") / "tests"


UNCHANGING = [FOLDER / "environments"]
"""Folders of environments that no test changes."""


def settings_with(**flags: object) -> Settings:
    return load_settings(flags)


def shared_settings() -> Settings:
    return settings_with(data_directory=FOLDER, environment="default")


@cache
def prepared_environment() -> Environment:
    environment = anyio.run(partial(open_environment, shared_settings(), "default"))
    anyio.run(compile_packages, environment.prefix)
    return environment


def share_support(data: Path, name: str = "support") -> None:
    """Let a data directory have what brings IPython to environments without it: made once for all test runs.

    Tests with an index of made-up packages, which may be fetched where Python is not the server's own, have another.
    """
    (support := FOLDER / name).mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    (data / "support").symlink_to(support)


@contextmanager
def with_shared_inspection() -> Generator[None]:
    """Look at environments that nobody changes once, and not for every engine, until the block ends.

    Starting an interpreter to ask what it is takes a seventh of a second of a processor, and reading which packages it
    has a sixteenth.
    """
    usual, answers = base.run_briefly, dict[tuple[str, ...], base.ProgramAnswer]()

    def is_unchanging(path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in UNCHANGING)

    def run_briefly(command: list[str], timeout_s: float) -> base.ProgramAnswer:
        key = tuple(command)
        if key in answers:
            return answers[key]
        answer = usual(command, timeout_s)
        if answer[0] == 0 and command[1:3] == ["-I", "-c"] and is_unchanging(Path(command[0])):
            answers[key] = answer
        return answer

    listing: Any = vars(PackageFolder)["distributions"]
    read, found = listing.func, dict[Path, dict[str, Distribution]]()

    def distributions(packages: PackageFolder) -> dict[str, Distribution]:
        if not packages.is_trusted or not is_unchanging(packages.directory):
            return read(packages)
        if packages.directory not in found:
            found[packages.directory] = read(packages)
        return found[packages.directory]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "run_briefly", run_briefly)
        patch.setattr(listing, "func", distributions)
        yield
