"""What `tools/list` says beyond our docstrings: small schemas, and where the caller's code will run.

A model reads every tool before its first call, so each word is paid for in every conversation. Schemas lose what says
nothing (titles that repeat the name, defaults that are empty). The description of `execute_code` gains what the model
would otherwise find out by failing: the packages that are there, the network, the folders of the user.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from belljar.environments.installed_check import check_installed
from belljar.environments.managed import DEFAULT
from belljar.errors import BelljarError
from belljar.provisioning.environments import is_remote
from belljar.runtime import Runtime
from belljar.sandboxes.base import WORKSPACE
from belljar.settings.azure import AZURE

NOTABLE = (
    *("pandas", "numpy", "scipy", "scikit-learn", "matplotlib", "seaborn", "plotly", "sympy", "pillow", "openpyxl"),
    *("pypdf", "lxml", "requests", "pyarrow", "polars", "duckdb", "statsmodels", "networkx", "torch", "tensorflow"),
    *("transformers", "xgboost", "lightgbm", "opencv-python", "opencv-python-headless", "scikit-image", "geopandas"),
    *("beautifulsoup4", "httpx", "sqlalchemy", "python-docx", "python-pptx", "reportlab", "nltk", "spacy", "altair"),
    *("bokeh", "jax", "numba", "dask", "xarray", "h5py", "biopython", "rdkit", "astropy"),
)
"""Packages that a model would ask for, best known first; others that are installed are not named."""
_OF_DEFAULT = NOTABLE[:14]
_MAX_NAMED = 16
_TIMEOUT_S = 1.0
_UNNEEDED = ("title", "maxLength", "minItems", "maxItems")
_EMPTY: dict[str, tuple[object, ...]] = {"default": ("", None, False), "minimum": (0,), "exclusiveMinimum": (0,)}


def truthful(text: str, runtime: Runtime) -> str:
    """Return a text for clients without what is not so here: that sessions are sealed off, or have /mnt/data."""
    if not runtime.isolates:
        text = text.replace("sealed, ", "").replace("sealed ", "")
    if not runtime.shows_workspace:
        folder = "the working directory"
        text = text.replace(f"{folder}, {WORKSPACE}", folder).replace(WORKSPACE, folder)
    return text


def small_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments without what a model does not need to call it.

    That are titles, empty defaults, null beside another type, and bounds that nobody would exceed; the server knows the
    whole schema and tells what an argument must be.
    """
    return {key: _small(value, is_properties=key == "properties") for key, value in schema.items() if key != "title"}


def _small(value: Any, *, is_properties: bool = False) -> Any:
    if isinstance(value, list):
        return [_small(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return int(value) if isinstance(value, float) and value.is_integer() else value
    entries = cast("dict[str, Any]", value)
    if is_properties:  # its keys are names of arguments, one of which may be `title`
        return {name: _small(entry) for name, entry in entries.items()}
    kept = {
        key: _small(entry, is_properties=key == "properties")
        for key, entry in entries.items()
        if key not in _UNNEEDED and not any(entry is empty for empty in _EMPTY.get(key, ()))
    }
    choices = [choice for choice in kept.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        del kept["anyOf"]
        return {**choices[0], **kept}
    return kept


class Surroundings:
    """Says where a caller's code runs: packages, network and folders; and which tools can do nothing there."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._looking: asyncio.Task[list[str]] | None = None

    async def text(self, principal: str) -> str:
        """Return the sentences for the description of `execute_code`."""
        sentences = [await self._packages_sentence(), self._network(), self._folders(principal)]
        return " ".join(filter(None, sentences))

    async def useless_tools(self) -> set[str]:
        """Return the tools that would be refused in every session of this server, so that no model is offered them."""
        names: set[str] = set()
        if not self._settings.checkpoints:
            names.add("rewind_session")
        # Where the host is still being tried, the tool is offered, as it will be on most hosts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                if not await self._runtime.starter.can_fork():
                    names.add("fork_session")
        return names

    async def _packages_sentence(self) -> str:
        if (names := await self._find_packages()) is None:
            return ""
        if not names:
            return "install_dependencies adds packages."
        return f"Installed: {', '.join(names)} and more; install_dependencies adds others."

    async def _find_packages(self) -> list[str] | None:
        """Return the notable packages of the configured environment; None while they are not known."""
        name = self._settings.environment
        if name == DEFAULT.name:
            return [*_OF_DEFAULT]
        if is_remote(name):
            return None
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(name))
            # Retrieve an error that no list waits for, or asyncio logs it.
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # The look goes on when this call has waited long enough: where it takes longer, the next list tells.
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.shield(self._looking)
        except TimeoutError:
            return None
        except BelljarError:
            self._looking = None  # the next list tries again
            return None

    async def _look(self, name: str) -> list[str]:
        environment = await self._runtime.starter.environments.get(name)
        statuses = await asyncio.to_thread(check_installed, environment, None, [*NOTABLE])
        return [status.name for status in statuses if status.installed][:_MAX_NAMED]

    def _network(self) -> str:
        if not self._runtime.provider.isolates:
            return ""
        hosts = [rule for rule in self._settings.egress if rule != "packages"]
        return f"Network: only {', '.join(hosts)}." if hosts else "No network."

    def _folders(self, principal: str) -> str:
        if self._settings.environment == AZURE:  # its sessions run on other machines
            return ""
        seen = self._runtime.starter.host_folders
        isolates = self._runtime.provider.isolates
        places = [
            f"{seen.place(folder)} ({'writable' if folder.is_writable or not isolates else 'read-only'})"
            for folder in seen.of(principal)
        ]
        return f"The user's folders: {', '.join(places)}." if places else ""
