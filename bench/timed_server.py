"""`belljar` that times each call of its journal, for which its event loop stands still.

The seconds go to a file in the folder that `TIMES` names, when the server ends.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from belljar.cli import main
from belljar.journal.journal import Journal

_times: list[float] = []


def _timed(method: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        began = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            _times.append(time.perf_counter() - began)

    return call


for name in ("submit", "start", "append", "finish", "commit"):
    setattr(Journal, name, _timed(getattr(Journal, name)))

if __name__ == "__main__":
    try:
        main()
    finally:
        (Path(os.environ["TIMES"]) / f"{os.getpid()}.times").write_text(json.dumps(_times))
