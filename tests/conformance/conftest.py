import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: the public MCP conformance suite, from the npm registry")
