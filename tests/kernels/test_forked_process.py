"""How forked kernels end, told by Linux itself or by a keeper: alike."""

import os
import subprocess
import sys

import pytest

from belljar.errors import KernelDied
from belljar.kernels import forked_process
from belljar.kernels.forked_process import exit_status, tells_exits
from cells import ForkingPlace, Place, run
from waiting import until

pytestmark = pytest.mark.anyio

ENDS = {"import os; os._exit(3)": "exit status 3", "import os; os.kill(os.getpid(), 9)": "signal SIGKILL"}


@pytest.fixture(params=[True, False], ids=["Linux tells", "a keeper tells"])
def teller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not tells_exits():
        pytest.skip("this Linux does not tell how a process ended that is no child")
    monkeypatch.setattr(forked_process, "tells_exits", lambda: request.param)


@pytest.mark.parametrize("code", ENDS)
async def test_a_forked_kernel_that_ends_says_how(forking_place: ForkingPlace, teller: None, code: str) -> None:
    async with forking_place.open() as kernel:
        assert (await run(kernel, "1 + 1")).result == {"text/plain": "2"}
        with pytest.raises(KernelDied, match=f"ended with {ENDS[code]}"):
            await run(kernel, code)


# Python's hooks, which close the socket in children, do not run here.
CHILD_OF_C = """
import ctypes, os, signal
child = ctypes.PyDLL(None).fork()
if not child:
    signal.pause()
"""


async def test_a_child_that_holds_the_socket_does_not_stand_in_for_a_kernel_that_was_killed(own_place: Place) -> None:
    async with own_place.open("ipython") as kernel:
        with pytest.raises(KernelDied, match="ended with signal SIGKILL"):
            await run(kernel, f"{CHILD_OF_C}os.kill(os.getpid(), 9)")


async def test_nor_for_one_that_was_forked(forking_place: ForkingPlace) -> None:
    async with forking_place.open() as kernel:
        with pytest.raises(KernelDied, match="ended with signal SIGKILL"):
            await run(kernel, f"{CHILD_OF_C}os.kill(os.getpid(), 9)")


async def test_a_kernel_that_was_killed_between_cells_is_not_alive(own_place: Place) -> None:
    code = f"{CHILD_OF_C}import threading\nthreading.Timer(0.05, os.kill, (os.getpid(), 9)).start()"
    async with own_place.open("ipython") as kernel:
        assert (await run(kernel, code)).is_ok
        await until(lambda: not kernel.is_alive())
        with pytest.raises(KernelDied):
            await run(kernel, "1")


@pytest.mark.skipif(not tells_exits(), reason="this Linux does not tell")
@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 15)", -15)]
)
def test_the_status_of_a_process_is_known_once_it_was_waited_for(code: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) as process:
        pidfd = os.pidfd_open(process.pid)
    assert exit_status(pidfd) == status
    os.close(pidfd)


def test_a_process_that_lives_has_no_status() -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert exit_status(pidfd) is None
    os.close(pidfd)
