"""A running belljar server as Python code uses it: the session handles of `api.py`, over MCP.

`server.py` opens the connection and sessions over it, `session.py` is the handle of one, and `connection.py` calls
tools and reads their answers. Knows the tools of the `interpreter` surface; imports nothing of the engine.
"""

from belljar.client.server import RemoteServer, connect

__all__ = ["RemoteServer", "connect"]
