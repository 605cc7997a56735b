"""The default environment, prepared once for all test runs: it takes 20 s and 750 MB.

It is kept under `BELLJAR_TEST_DATA`, or in the user's cache folder.
"""

import os
from functools import cache, partial
from pathlib import Path

import anyio
import platformdirs

from belljar.environments import Environment, open_environment
from belljar.environments.managed import compile_packages
from belljar.settings import Settings, load_settings


def settings_with(**flags: object) -> Settings:
    return load_settings(flags)


def shared_settings() -> Settings:
    kept = os.environ.get("BELLJAR_TEST_DATA")
    folder = Path(kept) if kept else platformdirs.user_cache_path("belljar") / "tests"
    return settings_with(data_directory=folder, environment="default")


@cache
def prepared_environment() -> Environment:
    environment = anyio.run(partial(open_environment, shared_settings(), "default"))
    anyio.run(compile_packages, environment.prefix)
    return environment
