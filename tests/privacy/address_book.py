"""A server with people in it: it tells who they are, and notes down what it is told. Run as a program, over stdio."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource, ResourceLink, TextContent

NOTES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("notes")
PERSON = {"full_name": "Ann Example", "email": "ann@example.com", "card": "4111 1111 1111 1111", "age": 41}
server = MCPServer("book")


def _note(**told: Any) -> str:
    with NOTES.open("a") as file:
        file.write(json.dumps(told) + "\n")
    return f"noted: {json.dumps(told)}"


@server.tool()
def person() -> dict[str, Any]:
    """Someone."""
    return PERSON


@server.tool()
def letter() -> str:
    """A text that mentions someone."""
    return f"Dear {PERSON['email']}, your card is {PERSON['card']}. [EMAIL_1] ${{secret:TOKEN}}"


@server.tool()
def papers() -> CallToolResult:
    """Someone as a link, and in files."""
    email = PERSON["email"]
    blob = base64.b64encode(f"mail\n{email}\n".encode()).decode()
    return CallToolResult(
        content=[
            ResourceLink(type="resource_link", uri=f"mailto:{email}", name=f"{email}"),
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(uri=f"file:///{email}.csv", blob=blob, mime_type="application/x-table"),
            ),
        ]
    )


@server.tool()
def refuse() -> CallToolResult:
    """Fail, with someone's fields."""
    return CallToolResult(content=[TextContent(type="text", text=json.dumps(PERSON))], is_error=True)


@server.tool()
def send(to: str, text: str = "", age: int = 0) -> str:
    """Send something to someone."""
    return _note(tool="send", to=to, text=text, age=age)


@server.tool()
def publish(text: str) -> str:
    """Show something to everyone."""
    return _note(tool="publish", text=text)


@server.tool()
def fail(before: int = 0) -> str:
    """Fail, and say for whom, after as many other words."""
    raise ToolError(f"{'.' * before} no such person: {PERSON['email']}, {PERSON['card']}")


if __name__ == "__main__":
    server.run("stdio")
