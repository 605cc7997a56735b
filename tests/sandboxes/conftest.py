"""Sandboxes to try things in: one of every provider this host can run.

`SANDBOX_UNDER_TEST=NAME pytest tests/sandboxes/test_contract.py` runs the contract for a provider that an installed
package brings, and for that one only.
"""

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from forked_sandboxes import ForkedSandboxes, NestedProvider, nesting_provider
from trials import READABLE, Opener, tight, usable

from belljar.sandboxes.base import HostFolder, Identity, Limits, Provider, Sandbox, SandboxSpec

FOREIGN = os.environ.get("SANDBOX_UNDER_TEST", "")


def _usable(name: str) -> Provider:
    return NestedProvider(nesting_provider()) if name == "nested" else usable(name)


@pytest.fixture(params=[FOREIGN] if FOREIGN else ["process", "namespace", "nested", "gvisor", "container", "microvm"])
def provider(request: pytest.FixtureRequest) -> Provider:
    return _usable(request.param)


@pytest.fixture(params=["namespace", "nested", "gvisor", "container"])
def isolating(request: pytest.FixtureRequest) -> Provider:
    return _usable("nested") if request.param == "nested" else tight(request.param)


@pytest.fixture(params=["namespace", "nested", "gvisor", "container"])
def mounting(request: pytest.FixtureRequest) -> Provider:
    """The same, and versions that refuse less of other things but mount as the others do."""
    return _usable(request.param)


@pytest.fixture
async def open_sandbox(tmp_path: Path) -> AsyncIterator[Opener]:
    opened: list[Sandbox] = []

    async def open_(
        provider: Provider,
        *,
        readable: Sequence[Path] = (),
        identity: Identity | None = None,
        folders: Sequence[HostFolder] = (),
    ) -> tuple[Sandbox, SandboxSpec]:
        folder = tmp_path / f"session-{len(opened)}"
        for name in ("workspace", "scratch", "home"):
            (folder / name).mkdir(parents=True)
        spec = SandboxSpec(
            session_id=folder.name,
            workspace=folder / "workspace",
            scratch=folder / "scratch",
            home=folder / "home",
            readable=[*READABLE, *readable],
            identity=identity,
            folders=folders,
        )
        sandbox = await provider.open(spec)
        opened.append(sandbox)
        return sandbox, spec

    yield open_
    for sandbox in opened:
        await sandbox.aclose()


@pytest.fixture
async def forks(tmp_path: Path) -> AsyncIterator[ForkedSandboxes]:
    forks = ForkedSandboxes(nesting_provider(), tmp_path, Limits(memory_mb=256, cpus=1, processes=64, open_files=256))
    yield forks
    await forks.aclose()


@pytest.fixture
async def sandbox(provider: Provider, open_sandbox: Opener) -> Sandbox:
    sandbox, _ = await open_sandbox(provider)
    return sandbox
