"""A server over HTTP as one was written with an SDK of its time; run with a Python that has one of those.

python early_http_server.py streamable-http|sse PORT
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import sys

from mcp.server.fastmcp import FastMCP

server = FastMCP("early", host="127.0.0.1", port=int(sys.argv[2]))


@server.tool()
def echo(text: str) -> str:
    """Says it again."""
    return text


server.run(transport=sys.argv[1])
