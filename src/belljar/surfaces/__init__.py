"""MCP surfaces: the tools, resources and transports that clients see, each a thin layer over the runtime."""
