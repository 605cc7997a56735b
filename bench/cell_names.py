"""Writes the names that the code of a plain cell uses, for `inside/runner/cell_names.py`, which says what for."""

import importlib.util
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from belljar.inside import RUNNER


def main() -> None:
    """Build a shell as a zygote does, run cells, and write the names in what has run."""
    zygote, compaction = _load("zygote"), _load("compaction")
    runner = _load("runner").Runner()
    runner.prepare()
    zygote.rehearse(runner, zygote.CELLS)
    with compaction.observed_code() as ran:
        zygote.rehearse(runner, zygote.PLAIN_CELLS)
    names = sorted({name for code in ran for name in _names(code)})
    (RUNNER / "cell_names.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    sys.stderr.write(f"{len(names)} names of {len(ran)} functions\n")


def _load(part: str) -> Any:
    """Load a module of the runner by path, as kernels do."""
    if "belljar_runner" not in sys.modules:
        found = importlib.util.spec_from_file_location(
            "belljar_runner", RUNNER / "__init__.py", submodule_search_locations=[str(RUNNER)]
        )
        assert found is not None
        assert found.loader is not None
        package: ModuleType = importlib.util.module_from_spec(found)
        sys.modules["belljar_runner"] = package
        found.loader.exec_module(package)
    return importlib.import_module(f"belljar_runner.{part}")


def _names(code: CodeType) -> Iterator[str]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from (code.co_name, *code.co_names, *code.co_freevars, *code.co_cellvars, *arguments)
    yield from _words(code.co_consts)


def _words(constants: Any) -> Iterator[str]:
    """Yield the strings among constants that Python interns: those that could be names."""
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _words(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


if __name__ == "__main__":
    main()
