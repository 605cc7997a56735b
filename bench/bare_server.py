"""The peer of `belljar serve`: the SDK's server with one tool that does nothing, over stdio or `--http HOST:PORT`."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("bare")


@server.tool()
async def nothing(code: str, session_id: str = "") -> str:
    """Do nothing."""
    return ""


def _serve_http(address: str) -> None:
    import socket

    import uvicorn

    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        config = uvicorn.Config(server.streamable_http_app(), log_level="error", access_log=False)
        print(f"bare serves MCP at http://{host}:{listener.getsockname()[1]}/mcp", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if "--http" in sys.argv:
        _serve_http(sys.argv[-1])
    else:
        server.run()
