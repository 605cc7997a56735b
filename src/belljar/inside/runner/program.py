"""Run a program whose text was settled beforehand, as if Python had been given its file.

`program.py TEXT NAME`: the text is that of a file which nobody in the sandbox can change, NAME is where the program
believes to be. So what runs is what was looked at, whatever has happened to the file of that name meanwhile, and no
line in it says that it is to be read in another encoding.
"""

import os
import sys
from types import TracebackType


def _begin() -> None:
    settled, name = sys.argv[1:]
    with open(settled, encoding="utf-8-sig", newline="") as file:  # noqa: PTH123 - pathlib is 10 ms of every start
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
    """The program's own lines come first, as they would have without us."""
    said = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
        ours = 2
        while trace is not None and ours:
            trace, ours = trace.tb_next, ours - 1
        said(kind, error.with_traceback(trace), trace)

    sys.excepthook = say


_begin()
