"""Running code in a sandbox and reading what it says, for the tests of every provider."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
from imported_image import import_image

from belljar.sandboxes import providers
from belljar.sandboxes.base import HostFolder, Identity, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings

PYTHON = os.path.realpath(sys.executable)
READABLE = [Path(sys.prefix), Path(sys.base_prefix)]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
DEADLINE_S = 60
SLOW = {"container", "microvm"}
"""Providers that take half a second and more for a sandbox: they get fewer of them."""


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str


class Opener(Protocol):
    async def __call__(
        self,
        provider: Provider,
        *,
        readable: Sequence[Path] = (),
        identity: Identity | None = None,
        folders: Sequence[HostFolder] = (),
    ) -> tuple[Sandbox, SandboxSpec]: ...


def usable(name: str) -> Provider:
    """The provider of that name, or a skipped test that says what the host lacks."""
    provider = _provider(name)
    for check in provider.check():
        if not check.is_ok:
            pytest.skip(f"{name}: {check.detail}")
    return provider


def tight(name: str) -> Provider:
    """The same, but not a version that is known to refuse less, which its checks say."""
    provider = usable(name)
    for check in provider.check():
        if check.name == "age":
            pytest.skip(check.detail)
    return provider


@cache
def _provider(name: str) -> Provider:
    # One for all tests: each tries the host once, which for some takes a quarter of a second.
    settings = Settings(container_image=import_image()) if name == "container" else Settings(sandbox=name)
    return providers(settings)[name]


async def run(
    sandbox: Sandbox,
    code: str,
    *,
    environment: Mapping[str, str] = ENVIRONMENT,
    pass_fds: Sequence[int] = (),
    command: Sequence[str] = (),
) -> Outcome:
    """Run Python code in a sandbox to its end; both streams are in the output."""
    reading, writing = os.pipe()
    try:
        process = await sandbox.spawn(
            command or [PYTHON, "-c", code],
            environment=environment,
            stdout=writing,
            stderr=writing,
            pass_fds=pass_fds,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    output = await read_to_end(reading)
    async with asyncio.timeout(DEADLINE_S):
        return Outcome(await process.wait(), output)


async def read_to_end(descriptor: int) -> str:
    """Everything until the last holder of the other end is gone."""
    return (await read_until(descriptor, None)).decode()


async def read_until(descriptor: int, mark: bytes | None) -> bytes:
    """Everything until the mark, or to the end, which closes the descriptor."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    pieces = bytearray()

    def on_readable() -> None:
        piece = os.read(descriptor, 65536)
        pieces.extend(piece)
        if (not piece or (mark and mark in pieces)) and not done.done():
            done.set_result(None)

    loop.add_reader(descriptor, on_readable)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await done
    finally:
        loop.remove_reader(descriptor)
        if mark is None:
            os.close(descriptor)
    return bytes(pieces)
