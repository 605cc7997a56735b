"""What Linux counts for a user of the host over all processes: one session never takes what another one needs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_sandboxes import ForkedSandboxes
from trials import ENVIRONMENT, PYTHON, Opener, read_until, run, usable

from belljar.sandboxes.namespace import provider as namespace_provider
from belljar.sandboxes.namespace import user_namespaces
from belljar.sandboxes.namespace.provider import NamespaceProvider

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]

TAKE_ALL = "taken = []\nwhile (one := libc.inotify_init1(0)) >= 0: taken.append(one)\nanswer = len(taken)"
TAKE_ONE = "answer = libc.inotify_init1(0) >= 0"
IN_C = "import ctypes\nlibc = ctypes.CDLL(None)\n"


def most(name: str) -> int:
    return int(Path(f"/proc/sys/fs/inotify/max_user_{name}").read_text())


@pytest.fixture
def limited() -> None:
    """Skip where the host does not let anybody limit them."""
    (line,) = [check for check in usable("namespace").check() if check.name == "inotify"]
    if "shared" in line.detail:
        pytest.skip(line.detail)


async def test_a_forked_session_that_takes_all_inotify_instances_leaves_others_theirs(
    limited: None, forks: ForkedSandboxes
) -> None:
    parent = await forks.parent()
    one, other = await forks.nested(parent), await forks.nested(parent)
    assert 0 < int(str(await one.ask(TAKE_ALL))) < most("instances") / 2
    assert await other.ask(TAKE_ONE) is True
    assert await parent.ask(TAKE_ONE) is True


async def test_so_does_a_fork_of_it(limited: None, forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one, other = await forks.nested(parent), await forks.nested(parent)
    fork = await forks.nested(one)
    assert 0 < int(str(await fork.ask(TAKE_ALL))) < most("instances") / 2
    assert await other.ask(TAKE_ONE) is True


async def test_so_does_one_that_started_cold(limited: None, open_sandbox: Opener) -> None:
    (one, _), (other, _) = [await open_sandbox(usable("namespace")) for _ in range(2)]
    reading, writing = os.pipe()
    code = f"{IN_C}{TAKE_ALL}\nprint(answer, 'taken', flush=True)\nlibc.pause()"
    await one.spawn([PYTHON, "-c", code], environment=ENVIRONMENT, stdout=writing, stderr=writing)
    os.close(writing)
    assert b"taken" in await read_until(reading, b"taken\n")
    os.close(reading)
    assert (await run(other, f"{IN_C}{TAKE_ONE}\nprint(answer)")).output == "True\n"


@pytest.fixture
def few_watches() -> Iterator[int]:
    """Sessions get so small a part of the watches that it can be used up here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_namespaces, "_PARTS", most("watches") // 10)
        user_namespaces.session_counts.cache_clear()
        yield user_namespaces.session_counts()["max_inotify_watches"]
    user_namespaces.session_counts.cache_clear()


async def test_watches_are_limited_with_them(limited: None, few_watches: int, forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    nested = await forks.nested(parent)
    code = "one = libc.inotify_init1(0)\nnames = [str(number) for number in range(30)]\n"
    code += "for name in names: open(name, 'w').close()\n"
    code += "answer = sum(libc.inotify_add_watch(one, name.encode(), 0xfff) >= 0 for name in names)"
    assert await nested.ask(code) == few_watches
    assert 10 <= few_watches < 30


async def test_a_host_that_does_not_let_it_limit_them_is_told_of(
    monkeypatch: pytest.MonkeyPatch, open_sandbox: Opener
) -> None:
    usable("namespace")
    monkeypatch.setattr(namespace_provider, "why_uncounted", lambda: "cannot create max_inotify_instances: Read-only")
    provider = NamespaceProvider()
    (line,) = [check for check in provider.check() if check.name == "inotify"]
    assert (line.is_ok, line.detail, line.hint) == (
        True,
        "instances and watches are shared by all sessions: cannot create max_inotify_instances: Read-only",
        "let the server write /proc/sys/user",
    )
