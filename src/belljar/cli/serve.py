"""`belljar serve`: the MCP server, over stdio or HTTP."""

from typing import Annotated

import typer


def command(
    http: Annotated[str | None, typer.Option(help="HOST:PORT to serve over HTTP; stdio without it.")] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="namespace, container, gvisor, microvm, process, or one of an installed package."),
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Environment of sessions.")] = None,
    surface: Annotated[list[str] | None, typer.Option(help="Surface to serve; repeatable.")] = None,
    mcp_config: Annotated[str | None, typer.Option(help="File that lists the MCP servers of the toolbox.")] = None,
    policy: Annotated[str | None, typer.Option(help="File of guardrails: what tools and code are allowed.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Serve MCP over stdio, or over HTTP with --http HOST:PORT."""
    import asyncio

    from belljar.cli.importing import at_once

    with at_once():
        from belljar.cli.serving import serve
        from belljar.settings import load_settings

    flags = {
        "http": http,
        "sandbox": sandbox,
        "environment": environment,
        "surfaces": surface or None,
        "mcp_config": mcp_config,
        "policy": policy,
        "log_level": log_level,
    }
    asyncio.run(serve(load_settings(flags)))
