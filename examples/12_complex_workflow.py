"""A workflow with a loop, branches side by side, a retry, a step that may fail, and a person in the middle.

The run stops at the question and holds no process; the answer may come days later, from another program.
"""

import contextlib
import io
import json
from pathlib import Path

from belljar.cli import main as belljar

FILE = Path(__file__).with_name("12_complex_workflow.yaml")
WAITING = 3


def command(*arguments: str) -> tuple[int, str]:
    """Run a command of belljar in this process, and return its exit status and what it printed."""
    printed = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(printed):
        try:
            belljar([*arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return status, printed.getvalue()


def main() -> None:
    """Start the run, find it among those that wait, and answer as the person would."""
    status, _ = command("workflow", "run", str(FILE))
    if status != WAITING:
        raise SystemExit(f"the run ended with {status}, and should wait for a person")
    waiting = [run for run in json.loads(command("workflow", "list", "--json")[1]) if run["state"] == "waiting"]
    print(f"run {waiting[0]['run']} waits at {waiting[0]['step']}")
    status, report = command("workflow", "answer", waiting[0]["run"], "approver=Ada", "budget=500")
    print(report.strip())
    raise SystemExit(status)


if __name__ == "__main__":
    main()
