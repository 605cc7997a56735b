"""Other MCP servers as Python inside sessions: connected here, described there, called through the session's socket."""
