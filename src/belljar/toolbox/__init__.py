"""Other MCP servers as Python functions in sessions: the host connects to them, cells call them through a socket."""
