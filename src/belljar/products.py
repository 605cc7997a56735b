"""The products on belljar's core: each is a package that no other one imports, and a line here.

The core works without them: the folder of a product can be removed, and what it adds is not there.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from starlette.types import ASGIApp

from belljar.provisioning.environments import RemoteKernels
from belljar.runtime import Runtime
from belljar.sandboxes.base import HostCheck
from belljar.settings import Settings

PRODUCTS: Final = ("belljar.azure",)


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What a product puts into the app of a server over HTTP."""

    data_plane: ASGIApp
    """Answers all paths that nothing else has."""
    wrap_server: Callable[[str, ASGIApp], ASGIApp]
    """Puts an app of its own before the MCP server at a path."""
    wrap_refusals: Callable[[ASGIApp], ASGIApp]
    """Gives what guards refuse before the data plane the form that its clients know."""


class Product:
    """What a product adds to belljar; one adds what it overrides."""

    name = ""
    instructions: Mapping[str, str] = {}
    """What MCP clients are told of each of its surfaces, by the names that `surfaces` has."""

    @property
    def kernels(self) -> Mapping[str, RemoteKernels]:
        """Return the environments whose sessions run elsewhere, by name."""
        return {}

    def register(self, server: Any, runtime: Runtime, surfaces: Sequence[str]) -> None:
        """Add the tools of those of its surfaces that an MCP server has."""

    def http(self, runtime: Runtime, servers: Mapping[str, Any]) -> HttpParts | None:
        """Return what it puts into the app over HTTP, for servers at their paths; None for nothing."""

    def checks(self, settings: Settings) -> Iterator[tuple[HostCheck, bool]]:
        """Yield what `belljar doctor` says of it, and whether sessions need it."""
        yield from ()


@cache
def products() -> tuple[Product, ...]:
    """Return the products that are there."""
    return tuple(importlib.import_module(name).PRODUCT for name in PRODUCTS if importlib.util.find_spec(name))
