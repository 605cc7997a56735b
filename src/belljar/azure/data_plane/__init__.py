"""The `foundry` surface: the data plane of Azure Container Apps dynamic sessions, served by belljar's own sessions.

A request walks `app.py` (which route, which version), then `executions.py` or `files.py`. `problems.py` has the
envelope of errors, `description.py` the OpenAPI document, `tools.py` the same over MCP.
"""
