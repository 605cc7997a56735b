"""What clients of MCP see: tools, resources, extensions and the stdio transport, each a thin layer over the engine."""
