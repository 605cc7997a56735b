"""Notebook files that anybody may have written: checks the parts that a replay needs, and keeps the others as they are.

Files are not validated against the schema of notebooks, because Jupyter opens many that are not valid.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from belljar.errors import InvalidArgument
from belljar.outputs.comparison import text_in
from belljar.outputs.notebook import SKIPPED

_MAJOR = 4


@dataclass(frozen=True, slots=True)
class StoredCell:
    """One code cell of a notebook."""

    number: int
    """Its position in the notebook among cells of all kinds, from 1."""
    document: dict[str, Any]
    """The cell as it is in the file."""
    code: str
    outputs: list[dict[str, Any]]
    tags: frozenset[str]
    status: str
    """How it ended, in a notebook that belljar exported; empty in others."""

    @property
    def is_skipped(self) -> bool:
        """Return whether a replay leaves it out: it is tagged so, was rejected when it was to run, or is empty."""
        return SKIPPED in self.tags or self.status == "rejected" or not self.code.strip()

    @property
    def has_run(self) -> bool:
        """Return whether there is an earlier run to compare with."""
        return bool(self.outputs) or self.document.get("execution_count") is not None

    @property
    def may_raise(self) -> bool:
        """Return whether it is meant to fail."""
        return "raises-exception" in self.tags


@dataclass(frozen=True, slots=True)
class StoredNotebook:
    """A notebook file."""

    document: dict[str, Any]
    cells: list[StoredCell]

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the whole notebook."""
        return _dictionary(self.document.get("metadata"))

    @property
    def language(self) -> str:
        """Return the language of its code in lower case; empty where the file does not say."""
        name = _dictionary(self.metadata.get("language_info")).get("name")
        return str(name or _dictionary(self.metadata.get("kernelspec")).get("language") or "").lower()


def read_notebook(path: Path) -> StoredNotebook:
    """Read a notebook of version 4."""
    document = _parse(path)
    _check_version(path, document)
    cells = document.get("cells")
    if not isinstance(cells, list):
        raise _broken(path, "it has no list of cells")
    found = [_cell(path, number, cell) for number, cell in enumerate(cast("list[Any]", cells), start=1)]
    return StoredNotebook(document, [cell for cell in found if cell is not None])


def _parse(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _broken(path, f"it is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise _broken(path, "it is JSON, but no object")
    return cast("dict[str, Any]", document)


def _check_version(path: Path, document: dict[str, Any]) -> None:
    major = document.get("nbformat")
    if not isinstance(major, int) or isinstance(major, bool):
        raise _broken(path, "it has no nbformat number")
    if major < _MAJOR:
        raise InvalidArgument(
            f"{path} is a notebook of version {major}, and replay takes version {_MAJOR}",
            hint="Convert it with: jupyter nbconvert --to notebook FILE",
        )
    if major > _MAJOR:
        raise InvalidArgument(f"{path} is a notebook of version {major}, later than replay knows ({_MAJOR})")


def _cell(path: Path, number: int, cell: Any) -> StoredCell | None:
    if not isinstance(cell, dict):
        raise _broken(path, f"cell {number} is no object")
    document = cast("dict[str, Any]", cell)
    kind = document.get("cell_type")
    if not isinstance(kind, str):
        raise _broken(path, f"cell {number} has no cell_type")
    if kind != "code":
        return None
    source = document.get("source")
    if not isinstance(source, str | list):
        raise _broken(path, f"cell {number} has no source")
    outputs = cast("list[Any]", document.get("outputs") or [])
    if type(outputs) is not list or not all(isinstance(output, dict) for output in outputs):
        raise _broken(path, f"the outputs of cell {number} are no list of objects")
    metadata = _dictionary(document.get("metadata"))
    tags = metadata.get("tags")
    return StoredCell(
        number,
        document,
        code=text_in(source),
        outputs=outputs,
        tags=frozenset(str(tag) for tag in cast("list[Any]", tags)) if isinstance(tags, list) else frozenset(),
        status=str(_dictionary(metadata.get("belljar")).get("status", "")),
    )


def _dictionary(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _broken(path: Path, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{path} is no notebook: {reason}", hint="Pass an .ipynb file as Jupyter saves it")
