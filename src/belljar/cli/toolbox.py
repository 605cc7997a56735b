"""`belljar toolbox`: the MCP servers that sessions can call, tried from the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

ABOUT = "The MCP servers that sessions can call: list, search, call, sync."

Config = Annotated[str | None, typer.Option("--mcp-config", help="File that lists the servers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_tools(
    server: Annotated[str, typer.Argument(help="One server's tools; all servers without it.", show_default=False)] = "",
    mcp_config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Connect to the servers and list them, or the tools of one."""
    from belljar.cli.toolbox_runs import configured, listed, run

    run(listed, configured(mcp_config), server, as_json)


def search(
    query: Annotated[str, typer.Argument(help="What the tool should do, in words.")],
    detail: Annotated[Literal["names", "signatures", "source"], typer.Option(help="How much of each.")] = "signatures",
    limit: Annotated[int, typer.Option(help="How many at most.", min=1, max=50)] = 8,
    server: Annotated[str, typer.Option(help="Look through one server only.")] = "",
    mcp_config: Config = None,
) -> None:
    """Find tools, as search_tools does for a model."""
    from belljar.cli.toolbox_runs import configured, run, searched

    run(searched, configured(mcp_config), query, detail, limit, server)


def call(
    server: Annotated[str, typer.Argument(help="The server.")],
    tool: Annotated[str, typer.Argument(help="The tool, by its own name.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments as a JSON object.")] = "{}",
    out: Annotated[Path | None, typer.Option(help="Folder for images and other data.", show_default=False)] = None,
    mcp_config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Call one tool and print what it answers; exits with 1 when the tool reports an error."""
    from belljar.cli.toolbox_runs import called, configured, run

    run(called, configured(mcp_config), server, tool, arguments, out, as_json)


def sync(
    folder: Annotated[Path, typer.Argument(help="Where to write servers/.")] = Path(),
    mcp_config: Config = None,
) -> None:
    """Write the tools as Python, as sessions see them, into the folder servers."""
    from belljar.cli.toolbox_runs import configured, run, synced

    run(synced, configured(mcp_config), folder)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_tools, "search": search, "call": call, "sync": sync}
