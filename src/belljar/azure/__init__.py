"""What belljar has for users of Azure's dynamic sessions: their data plane, their MCP tools, and sessions in a pool.

`data_plane` serves the routes of Azure's session pools, with belljar's own sessions behind them; `azure_mcp` has the
four tools of Azure's MCP server; `pool` runs a session's cells in a pool of Azure. `PRODUCT` is all that belljar's core
sees of it, and imports the rest when it is asked for.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp

from belljar.errors import InvalidArgument
from belljar.kernels.base import Kernel
from belljar.products import HttpParts, Product
from belljar.provisioning.environments import RemoteKernels
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.runtime import Runtime
from belljar.sandboxes.base import HostCheck
from belljar.settings import Settings
from belljar.settings.azure import AZURE, check_pool_names, missing_names, pool_endpoint

_AZURE_MCP = (
    "Runs Python in a sealed session whose variables and files stay between calls. Save files to /mnt/data; "
    "download_file brings them to the user's machine. new_session starts afresh."
)
_FOUNDRY = (
    "Runs Python and shell commands in sealed environments. Call launchShell once, then pass its environmentId: "
    "variables and files stay. Files are in /mnt/data; figures come back as images."
)


class AzureProduct(Product):
    """Azure's surfaces, and the environment `azure`."""

    name = "azure"
    instructions = {"azure-mcp": _AZURE_MCP, "foundry": _FOUNDRY}  # noqa: RUF012

    @property
    def kernels(self) -> Mapping[str, RemoteKernels]:
        """See `Product`."""
        return {AZURE: RemoteKernels("azure", _check_environment, _start)}

    def register(self, server: Any, runtime: Runtime, surfaces: Sequence[str]) -> None:
        """See `Product`."""
        if "azure-mcp" in surfaces:
            from belljar.azure.azure_mcp import AzureSurface

            AzureSurface(runtime).register(server)
        if "foundry" in surfaces:
            from belljar.azure.data_plane.executions import Executions
            from belljar.azure.data_plane.tools import FoundryTools

            FoundryTools(runtime, Executions(runtime)).register(server)

    def http(self, runtime: Runtime, servers: Mapping[str, Any]) -> HttpParts | None:
        """See `Product`."""
        if "foundry" not in runtime.settings.surfaces:
            return None
        from belljar.azure.data_plane.app import FoundryApp
        from belljar.azure.data_plane.executions import Executions
        from belljar.azure.data_plane.problems import EnvelopedRefusals
        from belljar.azure.data_plane.tools import PlainRpc
        from belljar.http.app import transport_security
        from belljar.http.health import HostCheckMiddleware

        executions = Executions(runtime)
        data_plane = FoundryApp(runtime, executions)

        def with_plain_dialect(path: str, app: ASGIApp) -> ASGIApp:
            if path not in ("/mcp", "/mcp/foundry"):
                return app
            plain = PlainRpc(servers[path], app, limit_bytes=executions.body_limit)
            guarded = HostCheckMiddleware(plain, transport_security(runtime.settings))
            if path == "/mcp":
                data_plane.mcp = guarded
            return guarded

        return HttpParts(data_plane, with_plain_dialect, EnvelopedRefusals)

    def checks(self, settings: Settings) -> Iterator[tuple[HostCheck, bool]]:
        """See `Product`."""
        is_needed = settings.environment == AZURE
        if missing := missing_names(settings):
            detail = f"named only in part: {', '.join(missing)} not set"
            yield HostCheck("pool", False, detail, "Set all four variables, or none"), is_needed
            return
        if not pool_endpoint(settings):
            if is_needed:
                hint = "Set azure_endpoint, or the four variables"
                yield HostCheck("pool", False, "none is configured", hint), True
            return
        # Its HTTP client takes a while to import, which only those who use a pool should pay.
        from belljar.azure.pool.routes import check_pool

        for check in asyncio.run(check_pool(settings)):
            yield check, is_needed


def _check_environment(settings: Settings) -> None:
    """Refuse the environment `azure` where no pool is configured, only a part of its name, or no way to a token."""
    check_pool_names(settings)
    if not pool_endpoint(settings):
        raise InvalidArgument(
            "no Azure session pool is configured",
            hint="The operator sets azure_endpoint, or AZURE_SUBSCRIPTION_ID, AZURE_RESOURCE_GROUP, AZURE_SESSION_POOL "
            "and AZURE_REGION",
        )
    # Only sessions in a pool need the package that speaks to one.
    from belljar.azure.pool.credentials import check_credential

    check_credential(settings)


async def _start(settings: Settings, folders: KernelFolders) -> Kernel:
    # The HTTP client and azure-identity take 0.4 s to import, which only sessions in a pool should pay.
    from belljar.azure.pool import start_azure

    return await start_azure(settings, workspace=folders.workspace, scratch=folders.scratch, identity=folders.identity)


PRODUCT = AzureProduct()
