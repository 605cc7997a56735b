"""Calls that their client gives up: whether the code that they run is stopped, or only the waiting for it.

A client that cancels says so (`notifications/cancelled`). An HTTP client of protocol 2026-07-28 closes the response
instead, which looks like a connection that was lost: the setting decides what that means.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from mcp.server.mcpserver import Context
from starlette.requests import Request

InterruptOn = Literal["cancel", "disconnect", "nothing"]
CANCELLED = "by its client, which cancelled the call"
LEFT = "because its client went away"


@asynccontextmanager
async def stopping_when_cancelled(
    ctx: Context[Any, Any], interrupt_on: InterruptOn, stop: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Call `stop` with who asked for it when the client gives up the call that is waited for inside."""
    request: object = ctx.request_context.request
    watching = None
    if interrupt_on == "disconnect" and isinstance(request, Request):
        watching = asyncio.get_running_loop().create_task(_stop_on_disconnect(cast("Request[Any]", request), stop))
    try:
        yield
    except asyncio.CancelledError:
        # The server that ends cancels its calls too; then sessions are left as they are.
        if interrupt_on != "nothing" and _is_cancelled(ctx):
            stop(CANCELLED)
        raise
    finally:
        if watching is not None:
            watching.cancel()


def _is_cancelled(ctx: Context[Any, Any]) -> bool:
    # The SDK has told the two apart, but keeps it from handlers.
    outbound = ctx.request_context.session._request_outbound  # pyright: ignore[reportPrivateUsage]
    return outbound.cancel_requested.is_set()


async def _stop_on_disconnect(request: Request[Any], stop: Callable[[str], None]) -> None:
    # In a task of its own: the SDK cancels the call itself in the same moment, or, in older eras, never.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop(LEFT)
