import os
import signal
import subprocess
import sys

from belljar.environments.uv import GUARD

COMMAND = "import subprocess; held = subprocess.Popen(['sleep', '600']); print('started', flush=True); held.wait()"


def test_a_guard_that_is_told_to_end_ends_its_command_and_what_that_started() -> None:
    lifeline, ours = os.pipe()
    guarded = [sys.executable, str(GUARD), str(lifeline), sys.executable, "-c", COMMAND]
    with subprocess.Popen(
        guarded, stdout=subprocess.PIPE, text=True, pass_fds=[lifeline], start_new_session=True
    ) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == "started\n"
        guard.send_signal(signal.SIGTERM)
        assert guard.stdout.read() == "", "all who could write to the pipe have ended"
    assert guard.returncode == -signal.SIGKILL
    for descriptor in (lifeline, ours):
        os.close(descriptor)
