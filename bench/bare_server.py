"""The peer of `belljar serve`: the SDK's server with one tool that does nothing, over stdio or `--http HOST:PORT`."""

import socket
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("bare")


@server.tool()
async def nothing(code: str, session_id: str = "") -> str:
    """Do nothing."""
    return ""


def _serve_http(address: str) -> None:
    import uvicorn

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"bare serves MCP at http://{host}:{port}/mcp", file=sys.stderr, flush=True)

    host, _, port = address.rpartition(":")
    # As `run("streamable-http")` does, which tells nobody the port it was given.
    app = server.streamable_http_app()
    Announcing(uvicorn.Config(app, host=host, port=int(port), log_level="error", access_log=False)).run()


if __name__ == "__main__":
    if "--http" in sys.argv:
        _serve_http(sys.argv[-1])
    else:
        server.run()
