"""A workflow from a file: the same as `belljar workflow run examples/simple_workflow.yaml`.

Each step is an execution of one session, on record: a run that is interrupted goes on where it was
(`belljar workflow resume --last`), and finished steps never run again. Arguments are passed on: `--var limit=6`.
"""

import sys
from pathlib import Path

from belljar.cli import main as belljar

FILE = Path(__file__).with_name("simple_workflow.yaml")


def main(*arguments: str) -> None:
    """Run the workflow; steps and what they print go to stderr, the last value to stdout."""
    belljar(["workflow", "run", str(FILE), *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
