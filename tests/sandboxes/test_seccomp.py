"""The filter of system calls: that it is built, what it costs nothing of, and what is said where it cannot be had."""

import builtins
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trials import Opener, run, usable

from belljar.sandboxes import seccomp
from belljar.sandboxes.seccomp import Filter, load_filter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

ORDINARY = {
    "threads": """
import threading
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(done) == 8""",
    "a shell": "import subprocess; assert subprocess.check_output('echo hi | cat', shell=True) == b'hi\\n'",
    "asyncio": """
import asyncio
async def main():
    server = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close(); server.close()
    assert await (await asyncio.create_subprocess_exec('true')).wait() == 0
asyncio.run(main())""",
    "processes": """
import multiprocessing
with multiprocessing.get_context('fork').Pool(2) as pool: assert sum(pool.map(abs, range(5))) == 10""",
    "shared memory": """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64); memory.close(); memory.unlink()""",
    "a terminal": """
import os, pty
pid, fd = pty.fork()
if not pid: os.execvp('tty', ['tty'])
assert os.read(fd, 99).startswith(b'/dev/pts/'); os.waitpid(pid, 0)""",
    "interfaces": "import socket; assert socket.if_nameindex() == [(1, 'lo')]; socket.socket(socket.AF_NETLINK, 3, 0)",
    "its personality": "import ctypes; assert ctypes.CDLL(None).personality(ctypes.c_ulong(0xffffffff)) == 0",
    "its own files": "import os; os.mkfifo('f'); os.chmod('f', 0o600); os.link('f', 'g')",
    "its user": "import getpass, os, pwd; assert pwd.getpwuid(os.getuid()).pw_name == 'belljar'",
}


@pytest.fixture
def fresh() -> Iterator[Callable[[], Filter]]:
    """A filter loaded anew."""
    load_filter.cache_clear()
    yield load_filter
    load_filter.cache_clear()


@pytest.mark.anyio
@pytest.mark.parametrize("code", ORDINARY.values(), ids=ORDINARY.keys())
async def test_ordinary_code_notices_nothing(code: str, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(usable("namespace"))
    outcome = await run(sandbox, code)
    assert (outcome.status, outcome.output) == (0, "")


@pytest.mark.anyio
async def test_no_file_gets_a_set_user_id_bit_in_any_way(open_sandbox: Opener) -> None:
    """In a writable folder of the host, another user who runs such a file would be the server's."""
    if not load_filter().program:
        pytest.skip(load_filter().complaint)
    sandbox, _ = await open_sandbox(usable("namespace"))
    code = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def opened(mode): os.close(os.open(f'o{mode:o}', os.O_CREAT | os.O_WRONLY, mode))
def temporary(mode): os.close(os.open('.', os.O_TMPFILE | os.O_WRONLY, mode))
def made(mode): os.mknod(f'n{mode:o}', 0o100000 | mode)
def changed(mode): os.chmod(f'c{mode & 0o777:o}', mode)
def by_number(mode):  # fchmodat2
    if libc.syscall(452, -100, b'c755', mode, 0) < 0: raise OSError(ctypes.get_errno(), 'refused')
open('c755', 'w').close()
def fchanged(mode):
    with open('c755') as file: os.fchmod(file.fileno(), mode)
ways = [opened, temporary, made, changed, fchanged, by_number]
for way in ways:
    for mode in (0o4755, 0o2755, 0o6755):
        try: way(mode)
        except OSError: continue
        print('breach', way.__name__, oct(mode))
for way in ways[:-1]: way(0o755)
assert not any(os.stat(name).st_mode & 0o6000 for name in os.listdir('.'))
"""
    outcome = await run(sandbox, code)
    assert (outcome.status, outcome.output) == (0, "")


@pytest.mark.anyio
async def test_the_filter_is_on_the_command_and_on_the_first_process(open_sandbox: Opener) -> None:
    if not load_filter().program:
        pytest.skip(load_filter().complaint)
    sandbox, _ = await open_sandbox(usable("namespace"))
    code = "for pid in ('self', 1): print(*[l.split()[1] for l in open(f'/proc/{pid}/status') if 'Seccomp:' in l])"
    assert (await run(sandbox, code)).output == "2\n2\n"


def test_every_call_of_the_list_is_known() -> None:
    pyseccomp = pytest.importorskip("pyseccomp", exc_type=RuntimeError)
    architecture = pyseccomp.system_arch()
    # On this machine and, by the same names, on the others that people have.
    names = {rule.call for rule in seccomp._rules()}
    unknown = {name for name in names if pyseccomp.resolve_syscall(architecture, name) == -1}
    assert unknown <= seccomp._NUMBERS.keys()
    for name in seccomp._NUMBERS.keys() - unknown:
        assert pyseccomp.resolve_syscall(architecture, name) == seccomp._NUMBERS[name]


def test_a_library_that_knows_none_of_the_newer_calls_still_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pyseccomp = pytest.importorskip("pyseccomp", exc_type=RuntimeError)
    resolve = pyseccomp.resolve_syscall
    monkeypatch.setattr(pyseccomp, "resolve_syscall", lambda a, n: -1 if n in seccomp._NUMBERS else resolve(a, n))
    assert seccomp._build(pyseccomp) == load_filter().program


def test_a_name_that_nobody_knows_is_an_error_and_not_a_gap(
    fresh: Callable[[], Filter], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyseccomp", exc_type=RuntimeError)
    monkeypatch.setattr(seccomp, "_REFUSED", {"none": ("make_coffee",)})
    assert not fresh().program
    assert "make_coffee" in fresh().complaint


@pytest.mark.parametrize("error", [ImportError("No module"), RuntimeError("Unable to find libseccomp")])
def test_a_missing_library_is_a_complaint(
    fresh: Callable[[], Filter], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    actual = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "pyseccomp":
            raise error
        return actual(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    found = fresh()
    assert not found.program
    assert str(error) in found.complaint


def test_refusals_are_errors_and_never_kills() -> None:
    errors = {rule.error for rule in seccomp._rules()}
    assert errors == {errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}
    assert os.strerror(errno.EPERM)
