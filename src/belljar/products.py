"""The products on belljar's core: each is a package that no other one imports, and a line here.

The core works without them: the folder of a product can be removed, and what it adds is not there. Every command
imports this module, so it imports nothing else of belljar.
"""

import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from belljar.engine.contract import Access, Engine
    from belljar.provisioning.environments import RemoteKernels
    from belljar.runtime import Runtime
    from belljar.sandboxes.base import HostCheck
    from belljar.settings import Settings

PRODUCTS: Final[Mapping[str, Mapping[str, str]]] = {
    "belljar.azure": {},
    "belljar.workflows": {"workflow": "belljar.workflows.command_table:WORKFLOW"},
}
"""The package of each, with its groups of commands: their names, and where `belljar.cli` finds the table of each."""


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What a product puts into the app of a server over HTTP."""

    data_plane: "ASGIApp"
    """Answers all paths that nothing else has."""
    wrap_server: "Callable[[str, ASGIApp], ASGIApp]"
    """Puts an app of its own before the MCP server at a path."""
    wrap_refusals: "Callable[[ASGIApp], ASGIApp]"
    """Gives what guards refuse before the data plane the form that its clients know."""


Page = Callable[..., Awaitable["Response"]]
"""Makes a page of the console out of a template, a request and the values of the template."""


@dataclass(frozen=True, slots=True)
class ProductPages:
    """The pages of a product in the console."""

    routes: "Sequence[Route]"
    parts: "Mapping[str, Callable[[Access, str], Awaitable[str]]]"
    """What changes while a page is open, by the id of its element: makes it for somebody, of what is after the `:`
    in the page's `data-stream`.
    """


class Product:
    """What a product adds to belljar; one adds what it overrides."""

    name = ""
    instructions: Mapping[str, str] = {}
    """What MCP clients are told of each of its surfaces, by the names that `surfaces` has."""
    navigation: Mapping[str, str] = {}
    """Places of its pages in the console's navigation: paths with their labels."""
    templates: Path | None = None
    """The folder with the templates of its pages."""

    @property
    def kernels(self) -> "Mapping[str, RemoteKernels]":
        """Return the environments whose sessions run elsewhere, by name."""
        return {}

    def plugin(self) -> object | None:
        """Return what it registers through the hooks of plugins, as one of belljar's own; None for nothing."""

    def open(self, runtime: "Runtime", ready: "asyncio.Task[None] | None") -> AbstractAsyncContextManager[object]:
        """Open what it has for as long as a runtime is open; `Runtime.parts` has it by the product's name.

        `ready` ends when sessions start quickly. It is None in a runtime that does only what it is asked to.
        """
        return nullcontext()

    def register(self, server: Any, runtime: "Runtime", surfaces: Sequence[str]) -> None:
        """Add the tools of those of its surfaces that an MCP server has."""

    def add_tools(self, server: Any, runtime: "Runtime") -> None:
        """Add the tools that it has beside `execute_code`, on the surfaces `interpreter` and `toolbox`."""

    def task_sources(self, runtime: "Runtime") -> Sequence[Any]:
        """Return what it has that clients may follow as tasks, see `TaskSource`."""
        return ()

    def http(self, runtime: "Runtime", servers: Mapping[str, Any]) -> HttpParts | None:
        """Return what it puts into the app over HTTP, for servers at their paths; None for nothing."""

    def pages(self, engine: "Engine", page: Page) -> ProductPages | None:
        """Return its pages in the console, for an engine; `page` puts each into the console's frame."""

    def checks(self, settings: "Settings") -> "Iterator[tuple[HostCheck, bool]]":
        """Yield what `belljar doctor` says of it, and whether sessions need it."""
        yield from ()


def is_installed(package: str) -> bool:
    """Return whether the package of a product is there."""
    return importlib.util.find_spec(package) is not None


@cache
def products() -> tuple[Product, ...]:
    """Return the products that are there."""
    return tuple(importlib.import_module(package).PRODUCT for package in filter(is_installed, PRODUCTS))
