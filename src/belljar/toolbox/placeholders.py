"""`${…}` in configuration files, as Claude Code, Cursor and VS Code write them: filled from our own variables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from belljar.errors import SettingsError

_PLACEHOLDER: Final = re.compile(r"\$\{([^{}]*)\}")
_PLAIN: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<has_default>:-(?P<default>.*))?", re.DOTALL)


class Unasked(Exception):
    """A value that another program would ask its person for; its text says how the operator can give it."""


class Placeholders:
    """What one file's placeholders stand for. `where` names the place that errors are about.

    `defaults` are the values that the file itself has for what it would ask for.
    """

    def __init__(self, variables: Mapping[str, str], folder: Path, defaults: Mapping[str, str] | None = None) -> None:
        self._variables = variables
        self._defaults = defaults or {}
        self._known = {"workspaceFolder": str(_workspace(folder)), "userHome": str(Path.home()), "/": "/"}
        self._known |= {"workspaceFolderBasename": _workspace(folder).name, "pathSeparator": "/"}

    def fill(self, text: str, where: str) -> str:
        """The text with every placeholder replaced; what comes in for one is not looked at again."""
        return _PLACEHOLDER.sub(lambda found: self._value(found[1], where), text)

    def _value(self, inside: str, where: str) -> str:
        if inside in self._known:
            return self._known[inside]
        kind, colon, rest = inside.partition(":")
        if kind == "input" and colon:
            return self._input(rest, where)
        if kind == "env" and colon:
            return self._variable(rest, where)
        plain = _PLAIN.fullmatch(inside)
        if plain is None:
            raise SettingsError(
                f"{where} has ${{{inside}}}, which means nothing here", hint="Write ${env:NAME} or ${NAME:-default}"
            )
        if plain["has_default"] and not self._variables.get(plain["name"]):
            return plain["default"]
        return self._variable(plain["name"], where)

    def _input(self, name: str, where: str) -> str:
        """Editors ask for it; there is nobody to ask while a server starts, but a variable may have the answer."""
        variable = f"MCP_INPUT_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
        if variable in self._variables:
            return self._variables[variable]
        if name in self._defaults:
            return self._defaults[name]
        raise Unasked(f"set {variable}, or write {where} without ${{input:{name}}}")

    def _variable(self, name: str, where: str) -> str:
        if name not in self._variables:
            raise SettingsError(
                f"{where} needs the variable {name}, which is not set", hint=f"Set {name} and try again"
            )
        return self._variables[name]


def _workspace(folder: Path) -> Path:
    """The folder that a file is about: editors keep theirs in a folder of their own."""
    return folder.parent if folder.name in (".vscode", ".cursor") else folder
