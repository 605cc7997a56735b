"""Run a program from a read-only copy, as if Python had been given the original file: `program.py TEXT NAME`.

TEXT is a file that nobody in the sandbox can change; NAME is the path that the program sees as its own. So the code
that runs is the code that was checked, whatever has happened to the file NAME meanwhile. It is always read as UTF-8; a
coding line in it is ignored.
"""

import os
import sys
from types import TracebackType


def _run() -> None:
    text_file, name = sys.argv[1:]
    with open(text_file, encoding="utf-8-sig", newline="") as file:  # noqa: PTH123 - pathlib is 10 ms of every start
        text = file.read()
    path = os.path.abspath(name)  # noqa: PTH100
    sys.argv[:] = [name]
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    _hide_from_tracebacks()
    main = sys.modules["__main__"].__dict__
    for own in [known for known in main if not known.startswith("__")]:
        del main[own]
    main.update(__file__=path, __doc__=None)
    exec(compile(text, path, "exec", dont_inherit=True), main)


def _hide_from_tracebacks() -> None:
    """Remove this script's two frames from tracebacks, so that they begin with the program's own lines."""
    previous_hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
        own_frames = 2
        while trace is not None and own_frames:
            trace, own_frames = trace.tb_next, own_frames - 1
        previous_hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


_run()
