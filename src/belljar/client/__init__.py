"""A running belljar server as Python code uses it: the sessions of `api.py`, over MCP.

`connecting.py` opens the connection and `server.py` sessions over it; `session.py` is the handle of one, `calls.py`
calls its tools, `answering.py` reads what comes back. Knows the tools of the `interpreter` surface; imports nothing of
the engine.
"""

from belljar.client.server import RemoteServer, connect

__all__ = ["RemoteServer", "connect"]
