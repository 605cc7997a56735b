"""Sessions as Python code holds them: `session_handle.py` is the one way to hold one, over whatever engine it is on.

`local.py` opens an engine in this process, `remote.py` connects to a server, `mcp_engine.py` is that server as an
engine, and `sync.py` opens a session for programs without `async`.
"""
