"""An MCP server with one tool, for the example of a guardrail: it sends no mail, and says that it did."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("mail")


@server.tool()
def send(to: str, text: str) -> str:
    """Send a mail."""
    return f"{len(text)} characters to {to}"


if __name__ == "__main__":
    server.run()
