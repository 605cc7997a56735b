"""Adds a server to a client's configuration file and leaves everything else in it as it was.

It knows JSON and files, not clients. Whatever it cannot keep (comments, keys that occur twice, text that is not JSON)
it refuses to rewrite, before anything is touched.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from belljar.errors import UsageError


def add_server(path: Path, key: str, name: str, entry: Mapping[str, object]) -> Path | None:
    """Put `entry` at `key`.`name`; answers with the backup's path, or None when there was no file or no change."""
    # A link into a folder of dotfiles stays a link.
    target = path.resolve()
    try:
        return _add_server(path, target, key, name, entry)
    except OSError as error:
        raise UsageError(f"{target} cannot be changed: {error}") from error


def _add_server(path: Path, target: Path, key: str, name: str, entry: Mapping[str, object]) -> Path | None:
    before = _read(target)
    document = _parse(before, path)
    changed = _with_server(document, key, name, entry, path)
    if changed == document:
        return None
    after = _render(changed, before, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if before is None:
        _replace(target, after, None)
        return None
    backup = _back_up(target, before)
    _replace(target, after, before)
    return backup


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes | None, path: Path) -> dict[str, Any]:
    if not content or not content.strip():
        return {}
    try:
        text = content.decode("utf-8-sig")
        document: Any = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"{path} is not plain JSON: {_reason(content, error)}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", document)


def _reason(content: bytes, error: ValueError) -> str:
    outside_strings = re.sub(rb'"(?:\\.|[^"\\])*"', b'""', content)
    if re.search(rb"//|/\*", outside_strings):
        return "it has comments, which a rewrite would lose"
    return str(error)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return document


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _with_server(
    document: dict[str, Any], key: str, name: str, entry: Mapping[str, object], path: Path
) -> dict[str, Any]:
    servers = document.get(key, {})
    if not isinstance(servers, dict):
        raise UsageError(f'"{key}" in {path} is no JSON object')
    servers = cast("dict[str, Any]", servers)
    present = servers.get(name, {})
    if not isinstance(present, dict) or "url" in present:
        raise UsageError(f'"{name}" in {path} is another kind of server')
    # What a person added to our entry, such as "env", stays.
    return {**document, key: {**servers, name: {**cast("dict[str, Any]", present), **entry}}}


def _render(document: dict[str, Any], before: bytes | None, path: Path) -> bytes:
    indent = re.search(rb"^[ \t]+", before or b"", re.MULTILINE)
    try:
        text = json.dumps(
            document, indent=indent.group().decode() if indent else 2, ensure_ascii=False, allow_nan=False
        )
        return text.encode() + b"\n"
    except ValueError as error:
        raise UsageError(f"{path} cannot be written back as it was: {error}") from error


def _back_up(target: Path, content: bytes) -> Path:
    for number in range(1000):
        backup = target.with_name(f"{target.name}.bak{number or ''}")
        try:
            _write_new(backup, content, like=target)
        except FileExistsError:
            continue
        return backup
    raise UsageError(f"{target.parent} holds a thousand backups of {target.name}")


def _replace(target: Path, content: bytes, expected: bytes | None) -> None:
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        _write_new(staged, content, like=target)
        # Clients write their files too; what one wrote since we read must not be undone.
        if _read(target) != expected:
            raise UsageError(f"{target} was changed by another program just now")
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, *, like: Path) -> None:
    """Make a file that nobody may read who may not read `like`, and that belongs to the same owner."""
    model = like.stat() if like.exists() else None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if model else 0o666)
    with os.fdopen(descriptor, "wb") as file:
        if model and os.name == "posix":
            if (model.st_uid, model.st_gid) != (os.getuid(), os.getgid()) and os.getuid() == 0:
                os.fchown(descriptor, model.st_uid, model.st_gid)
            os.fchmod(descriptor, model.st_mode & 0o777)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
