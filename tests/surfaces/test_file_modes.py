"""Modes that programs give their files: kept in sessions, where set-user-ID bits mean nothing, and gone from copies."""

import os
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from calls import FORKS, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime
from belljar.sandboxes.base import HostFolder, Identity, SandboxSpec
from belljar.sandboxes.defaults import may_keep_set_ids
from belljar.sandboxes.seccomp import load_filter

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not load_filter().program, reason=load_filter().complaint or "-"),
]

UNPACK = """
import io, os, shutil, subprocess, tarfile
with tarfile.open('a.tar', 'w') as archive:
    entry = tarfile.TarInfo('tool')
    entry.mode = 0o4755
    archive.addfile(entry, io.BytesIO())
os.mkdir('out')
tarfile.open('a.tar').extractall('out')
done = [subprocess.run(command).returncode for command in (
    ['mkdir', '-m', '2775', 'ours'], ['tar', 'xpf', 'a.tar', '--no-same-owner'],
    *([['git', 'init', '-q', '--shared=group', 'repository']] if shutil.which('git') else []),
)]
any(done), *(oct(os.stat(name).st_mode & 0o7777) for name in ('out/tool', 'tool', 'ours'))
"""
MODES = "', '".join(("0o4755", "0o4755", "0o2775"))


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("modes")
    async with opened_runtime(default_environment, folder, hibernate=True, **FORKS) as runtime:
        await runtime.starter.wait_until_warm(runtime.settings.environment)
        yield runtime


async def test_archives_and_shared_repositories_keep_their_modes_and_copies_lose_what_is_dangerous(
    runtime: Runtime,
) -> None:
    if not runtime.provider.isolates or runtime.provider.name != "namespace":
        pytest.skip("files have the modes of the host's")
    async with connected(runtime) as caller:
        first = await caller.execute(UNPACK)
        assert (first.status, first.result) == ("ok", f"(False, '{MODES}')")
        session = runtime.sessions.get(first.session_id, "local")
        tool = session.folders.workspace / "tool"
        # Nobody but the server's user gets there.
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in tool.parents)
        fork = (await caller.fields("fork_session", session_id=first.session_id))["session_id"]
        copied = runtime.sessions.get(fork, "local").folders.workspace / "tool"
        assert copied.stat().st_mode & 0o7777 == 0o755
        await runtime.sessions.endings.hibernate(session, "to be woken")
        assert tool.stat().st_mode & 0o7777 == 0o755


def test_such_files_are_possible_only_where_nobody_else_gets_to(tmp_path: Path) -> None:
    (tmp_path / "closed" / "s").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    spec = SandboxSpec("s", tmp_path / "closed" / "s", tmp_path, tmp_path, keeps_set_ids=True)
    identity = Identity(os.geteuid() or 1000, 1000)
    assert may_keep_set_ids(spec, identity)
    assert not may_keep_set_ids(replace(spec, keeps_set_ids=False), identity)
    assert not may_keep_set_ids(replace(spec, folders=[HostFolder("out", "/srv", is_writable=True)]), identity)
    assert may_keep_set_ids(replace(spec, folders=[HostFolder("in", "/srv")]), identity)
    # Files of the host's root are nobody's to copy.
    assert may_keep_set_ids(spec, None) == (os.geteuid() != 0)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        assert not may_keep_set_ids(replace(spec, workspace=Path(folder)), identity)
