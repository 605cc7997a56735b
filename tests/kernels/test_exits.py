"""How forked kernels end, told by Linux itself or by a keeper: alike."""

import os
import subprocess
import sys

import pytest
from cells import ForkingPlace, run

from belljar.errors import KernelDied
from belljar.kernels import copies
from belljar.kernels.exits import exit_status, tells_exits

pytestmark = pytest.mark.anyio

ENDS = {"import os; os._exit(3)": "exit status 3", "import os; os.kill(os.getpid(), 9)": "signal SIGKILL"}


@pytest.fixture(params=[True, False], ids=["Linux tells", "a keeper tells"])
def teller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not tells_exits():
        pytest.skip("this Linux does not tell how a process ended that is no child")
    monkeypatch.setattr(copies, "tells_exits", lambda: request.param)


@pytest.mark.parametrize("code", ENDS)
async def test_a_forked_kernel_that_ends_says_how(forking_place: ForkingPlace, teller: None, code: str) -> None:
    async with forking_place.open() as kernel:
        assert (await run(kernel, "1 + 1")).result == {"text/plain": "2"}
        with pytest.raises(KernelDied, match=f"ended with {ENDS[code]}"):
            await run(kernel, code)


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
