"""State that outlives this session: `save` and `load` files in `workspace/`.

    from workspace_state import save, load
    save("progress.json", {"page": 3})     # .json .csv .txt .md, and bytes under any other name
    load("progress.json", default={})      # in a later session

Plain file access works as well: everything in the folder is kept when the cell ends. Kept across sessions where the
server has its setting `workspace` on.
"""

import csv
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = [
    "load",
    "load_binary",
    "load_csv",
    "load_json",
    "load_text",
    "names",
    "remove",
    "save",
    "save_binary",
    "save_csv",
    "save_json",
    "save_text",
]

# Resolved at import, because a cell may have changed its working directory by the time it saves something.
_FOLDER = Path.cwd() / "workspace"
_TEXT = (".txt", ".md", ".log", ".html", ".xml", ".yaml", ".yml", ".toml")
_MISSING: Any = object()
_MAX_NAMED = 20


def save(name: str, value: Any) -> Path:
    """Save a value in the form that the name's ending says; bytes under any name."""
    ending = Path(name).suffix.lower()
    if isinstance(value, (bytes, bytearray)):
        return save_binary(name, value)
    if ending == ".json":
        return save_json(name, value)
    if ending == ".csv":
        return save_csv(name, value)
    if ending in _TEXT or isinstance(value, str):
        return save_text(name, value)
    raise TypeError(
        f"{name!r} does not say how to save a {type(value).__name__}: use .json, .csv or .txt, or pass bytes"
    )


def load(name: str, default: Any = _MISSING) -> Any:
    """Load what `save` saved; `default`, if one is given, when there is no such file."""
    if not _path(name).exists():
        if default is not _MISSING:
            return default
        there = ", ".join(map(repr, names()[:_MAX_NAMED])) or "nothing"
        raise FileNotFoundError(f"there is no {name!r} in workspace/ (there is {there}); pass a default to begin with")
    ending = Path(name).suffix.lower()
    if ending == ".json":
        return load_json(name)
    if ending == ".csv":
        return load_csv(name)
    return load_text(name) if ending in _TEXT else load_binary(name)


def save_json(name: str, value: Any) -> Path:
    """Save a value as JSON."""
    return _write(name, json.dumps(value, ensure_ascii=False, indent=2).encode())


def load_json(name: str) -> Any:
    """Load a value from JSON."""
    return json.loads(_path(name).read_text("utf-8"))


def save_csv(name: str, rows: Any) -> Path:
    """Save rows, dicts or sequences, or anything with `to_csv` such as a DataFrame."""
    if hasattr(rows, "to_csv"):
        return _write(name, rows.to_csv(index=False).encode())
    path = _path(name)
    with _replacing(path) as file:
        _write_rows(file, list(rows))
    return path


def load_csv(name: str) -> "list[dict[str, str]]":
    """Load rows as dicts by the names in the first line; `pandas.read_csv` reads the same file."""
    with _path(name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save_text(name: str, text: str) -> Path:
    """Save text."""
    return _write(name, str(text).encode())


def load_text(name: str) -> str:
    """Load text."""
    return _path(name).read_text("utf-8")


def save_binary(name: str, data: "bytes | bytearray") -> Path:
    """Save bytes."""
    return _write(name, bytes(data))


def load_binary(name: str) -> bytes:
    """Load bytes."""
    return _path(name).read_bytes()


def names() -> "list[str]":
    """List the files in `workspace/`, sorted."""
    return sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.is_file())


def remove(name: str) -> None:
    """Delete a file, here and for later sessions."""
    _path(name).unlink()


def _path(name: str) -> Path:
    path = Path(name)
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    if not path.parts or path.is_absolute() or is_hidden or "\\" in name or not name.isprintable():
        raise ValueError(f"{name!r} is no name for kept state: use one like 'progress.json' or 'runs/1.csv'")
    return _FOLDER / path


def _write(name: str, data: bytes) -> Path:
    path = _path(name)
    with _replacing(path) as file:
        file.write(data)
    return path


class _replacing:  # noqa: N801  - reads as what it does
    """A temporary file that replaces another in one step when all of it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, self._unfinished = tempfile.mkstemp(prefix=".", dir=str(self._path.parent))
        self._file = os.fdopen(descriptor, "wb")
        return self._file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.close()
        if kind is None:
            Path(self._unfinished).chmod(0o644)
            Path(self._unfinished).replace(self._path)
        else:
            Path(self._unfinished).unlink()


def _write_rows(file: Any, rows: "list[Any]") -> None:
    with io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True) as text:
        if rows and isinstance(rows[0], dict):
            writer = csv.DictWriter(text, list(dict.fromkeys(str(key) for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
        else:
            csv.writer(text).writerows(rows)
