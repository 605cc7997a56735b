"""What only the namespace provider has: bubblewrap's refusals, trees to show, and an end with its server."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trials import ENVIRONMENT, PYTHON, READABLE, Opener, read_to_end, read_until, run, usable

from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.sandboxes.base import Provider, SandboxSpec
from belljar.sandboxes.namespace import provider as namespace
from belljar.sandboxes.namespace import trial

pytestmark = pytest.mark.anyio

Refuser = Callable[[str], Provider]

SERVER = """
import asyncio, os, pathlib, sys
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import SandboxSpec
from belljar.settings import Settings

async def main():
    folder, python, *readable = map(pathlib.Path, sys.argv[2:])
    provider = open_provider(Settings(sandbox="namespace"))
    sandbox = await provider.open(SandboxSpec("s", folder, folder, folder, readable))
    pipe = int(sys.argv[1])
    code = f"import os, signal; os.fork() or os.setsid(); os.write({pipe}, b'x'); signal.pause()"
    await sandbox.spawn([str(python), "-c", code], environment={}, stdout=1, stderr=2, pass_fds=[pipe])
    os.close(pipe)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def provider() -> Provider:
    return usable("namespace")


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuser:
    """A provider whose bubblewrap says no, in the given words."""
    if sys.platform != "linux":
        pytest.skip("Linux only")

    def make(words: str) -> Provider:
        binary = tmp_path / "bwrap"
        binary.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        binary.chmod(0o755)
        monkeypatch.setattr(namespace, "find_bubblewrap", lambda: binary)
        return namespace.NamespaceProvider()

    return make


async def test_a_tree_shows_at_its_own_path_though_its_parents_are_private(
    provider: Provider, open_sandbox: Opener, tmp_path: Path
) -> None:
    tree = tmp_path / "private" / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").write_text("shown")
    (tmp_path / "private" / "hidden").write_text("hidden")
    (tmp_path / "private").chmod(0o700)
    sandbox, _ = await open_sandbox(provider, readable=[tree / "inner", tree])
    code = f"""
import os
print(open({str(tree / "inner" / "file")!r}).read(), os.listdir({str(tree.parent)!r}))
try:
    open({str(tree / "inner" / "file")!r}, "w")
except OSError as error:
    print(error.strerror)
"""
    assert (await run(sandbox, code)).output == "shown ['tree']\nRead-only file system\n"


@pytest.mark.parametrize("tree", ["/", "/tmp", "/proc", "/home", "/mnt/data", "/run", "relative"])
async def test_a_tree_that_would_cover_the_sandbox_is_refused(provider: Provider, tmp_path: Path, tree: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await provider.open(SandboxSpec("s", tmp_path, tmp_path, tmp_path, [Path(tree)]))
    assert tree in refusal.value.message


async def test_a_missing_folder_is_named(provider: Provider, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="gone"):
        await provider.open(SandboxSpec("s", tmp_path, tmp_path, tmp_path, [tmp_path / "gone"]))


async def test_a_variable_cannot_smuggle_arguments(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(provider)
    with pytest.raises(InvalidArgument, match="NUL"):
        await run(sandbox, "pass", environment={"NAME": "x\0--bind\0/\0/host"})


async def test_a_variable_is_not_on_the_command_line(provider: Provider, open_sandbox: Opener, tmp_path: Path) -> None:
    sandbox, _ = await open_sandbox(provider)
    reading, writing = os.pipe()
    process = await sandbox.spawn(
        [PYTHON, "-c", "import signal; print('up', flush=True); signal.pause()"],
        environment={**ENVIRONMENT, "TOKEN": "hunter2"},
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    await read_until(reading, b"up")
    os.close(reading)
    line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"bwrap" in line
    assert b"hunter2" not in line
    assert bytes(tmp_path) not in line


async def test_a_missing_command_is_told_on_stderr(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(provider)
    outcome = await run(sandbox, "", command=["/nowhere/python"])
    assert outcome.status in {1, 127}  # bubblewrap's, and setpriv's as shells have it
    assert "/nowhere/python: No such file or directory" in outcome.output


async def test_the_sandbox_dies_with_its_server(provider: Provider, tmp_path: Path) -> None:
    sandbox_folder = tmp_path / "folder"
    sandbox_folder.mkdir()
    sources = Path(namespace.__file__).parents[2]
    # The server itself needs no sandbox: the other provider starts it here, and kill is what a crash looks like.
    host = await usable("process").open(SandboxSpec("server", tmp_path, tmp_path, tmp_path))
    reading, writing = os.pipe()
    readable = [str(path) for path in READABLE]
    server = await host.spawn(
        [sys.executable, "-c", SERVER, str(writing), str(sandbox_folder), PYTHON, *readable],
        environment={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(sources), *sys.path])},
        stdout=writing,
        stderr=writing,
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        assert await read_until(reading, b"xx") == b"xx"
        os.kill(server.pid, signal.SIGKILL)
        assert await read_to_end(reading) == ""
    finally:
        await host.aclose()


def test_a_refusal_is_told_in_bubblewraps_words_with_advice(refusing: Refuser) -> None:
    words = "bwrap: No permissions to create a new namespace"
    *_, line = refusing(words).check()
    assert (line.name, line.is_ok, line.detail) == ("namespaces", False, words)


async def test_a_refusal_at_spawn_carries_bubblewraps_words(refusing: Refuser, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(refusing("bwrap: setting up uid map: Permission denied"))
    with pytest.raises(SandboxUnavailable) as refusal:
        await run(sandbox, "pass")
    assert "status 1" in refusal.value.message
    assert "setting up uid map" in refusal.value.message


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces"),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
    ],
)
def test_the_advice_names_the_setting_that_forbids(
    refusing: Refuser, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, advice: str
) -> None:
    monkeypatch.setattr(trial, "_setting", lambda name: value if name == setting else "")
    *_, line = refusing("bwrap: No permissions").check()
    assert advice in line.hint
