"""Interns the names in the code that every cell runs, IPython's and ours, before any of that code is imported.

Python has one string for a name and uses it wherever that name is loaded. It makes the string when it first meets the
name, so the names that cells use lie spread among all others. Up to Python 3.11 each use writes to the string's page,
and each page that a fork writes to is copied. Made here they lie side by side, on 17 pages: a cell copies 45 pages
less, and an idle session and its kept states take 0.2 MB less each.

`cell_names.txt` is written by `scripts/name_cells`. A name that is missing there costs a page; one too many costs less.
"""

import os
import sys


def _read() -> "list[str]":
    # By `os`, because `pathlib` would import half of what must come later.
    path = os.path.join(os.path.dirname(__file__), "cell_names.txt")  # noqa: PTH118, PTH120
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read().splitlines()


INTERNED = [sys.intern(name) for name in _read()]
"""Held here, because an interned string without a reference is freed."""
