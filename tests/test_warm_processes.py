import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(bool(os.environ.get("BELLJAR_COLD")), reason="BELLJAR_COLD=1 starts every process from nothing")
def test_a_server_is_a_copy_of_a_warm_process_and_nothing_else_is(tmp_path: Path) -> None:
    def command_line(*arguments: str) -> str:
        variables = {**os.environ, "BELLJAR_DATA_DIRECTORY": str(tmp_path), "BELLJAR_ENVIRONMENT": sys.executable}
        ends = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, *arguments], **ends, env=variables) as process:
            return Path(f"/proc/{process.pid}/cmdline").read_text()

    assert "warm_processes.py" in command_line("-m", "belljar", "serve")
    assert "warm_processes.py" in command_line(
        str(Path(__file__).with_name("ledger_server.py")), str(tmp_path / "ledger")
    )
    assert "warm_processes.py" not in command_line("-c", "import sys; sys.stdin.read()")
