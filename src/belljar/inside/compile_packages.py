"""Compile the packages of an environment: `compile_packages.py NICENESS FOLDER…`, run by the environment's own Python.

Sessions see their environment read-only and cannot store what they compile, so that without this every session compiles
again whatever it imports: `import pandas, sklearn` takes 8 s instead of 2.5 s. Files that are compiled already are
skipped, so a run that was killed is continued by the next one. It is started with `-I -S`, so that no code of the
environment runs. NICENESS says how much it gives way to everything else on the machine.
"""

import compileall
import multiprocessing
import os
import sys
from pathlib import Path

# What a kernel itself imports comes first, then what most cells import, then everything else by name.
_FIRST = (
    *("IPython", "traitlets", "pygments", "decorator.py", "matplotlib_inline", "stack_data", "executing"),
    *("numpy", "pandas", "matplotlib"),
)
_MAX_WORKERS = 8
_CHUNK = 16
_LINES = 20
"""How many lines of progress are written."""


def main(niceness: int, folders: "list[str]") -> None:
    """Compile every Python file below the folders, and say on stderr how many are done."""
    os.nice(niceness)
    files = [str(file) for folder in folders for file in _files(Path(folder))]
    step = max(1, len(files) // _LINES)
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, _MAX_WORKERS)) as pool:
        for number, _ in enumerate(pool.imap_unordered(_compile, files, _CHUNK), 1):
            if number % step == 0 or number == len(files):
                print(f"compiled {number:,} of {len(files):,} files", file=sys.stderr, flush=True)


def _files(folder: Path) -> "list[Path]":
    places = {name: number for number, name in enumerate(_FIRST)}
    entries = sorted(folder.iterdir(), key=lambda entry: (places.get(entry.name, len(places)), entry.name))
    found = [path for entry in entries for path in ([entry] if entry.is_file() else sorted(entry.rglob("*.py")))]
    return [path for path in found if path.suffix == ".py"]


def _compile(file: str) -> None:
    # Packages may have files that are not Python of this version, such as templates; nobody imports those.
    compileall.compile_file(file, quiet=2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
