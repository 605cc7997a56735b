"""`belljar plugins`: list belljar's own plugins and the operator's, with what they hook into, without a server."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from belljar.cli.streams import one_line, table
from belljar.mcp.server import add_surfaces
from belljar.runtime import open_plugins
from belljar.settings import load_command_settings


def command(
    directory: Annotated[
        str | None,
        typer.Option("--plugins-directory", help="Look into this folder, not the configured one.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the plugins, what they hook into, and those that failed; exits with 1 if one did."""
    settings = load_command_settings({"plugins_directory": directory})
    plugins = open_plugins(settings)
    add_surfaces(plugins)
    for hook in ("workflow_step_types", "form_targets", "kernels"):
        plugins.named(hook)  # a name that is taken shows only when it is asked for
    plugins.named("sandbox_providers", settings=settings)
    if as_json:
        print(json.dumps([asdict(record) for record in plugins.records], indent=2))
    else:
        rows = [(each.name, each.origin, ", ".join(each.hooks) or "-", each.error) for each in plugins.records]
        print(table([("plugin", "from", "hooks", "failed"), *(tuple(map(one_line, row)) for row in rows)]))
    if any(record.error for record in plugins.records):
        raise typer.Exit(1)
