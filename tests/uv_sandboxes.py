"""uv in a sandbox of its own, for tests; skips where this host cannot isolate."""

import pytest

from belljar.provisioning.confined_uv import UvSandbox
from belljar.sandboxes.namespace.provider import NamespaceProvider
from shared_environment import settings_with


def open_uv_sandbox(**flags: object) -> UvSandbox:
    provider = NamespaceProvider()
    for check in provider.check():
        if not check.is_ok:
            pytest.skip(f"{check.name}: {check.detail}")
    return UvSandbox(settings_with(**flags), provider)
