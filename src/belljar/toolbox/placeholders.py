"""`${…}` in configuration files, as Claude Code, Cursor and VS Code write them: filled from our own variables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from belljar.errors import SettingsError

_PLACEHOLDER: Final = re.compile(r"\$\{([^{}]*)\}")
_PLAIN: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<has_default>:-(?P<default>.*))?", re.DOTALL)


class Placeholders:
    """What one file's placeholders stand for. `where` names the place that errors are about."""

    def __init__(self, variables: Mapping[str, str], folder: Path) -> None:
        self._variables = variables
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
            raise SettingsError(
                f"{where} has ${{{inside}}}, and there is nobody to ask while a server starts",
                hint="Put the value into a variable of belljar's environment and write ${env:NAME}, "
                'or leave the server out with "disabled": true',
            )
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

    def _variable(self, name: str, where: str) -> str:
        if name not in self._variables:
            raise SettingsError(
                f"{where} needs the variable {name}, which is not set", hint=f"Set {name} and try again"
            )
        return self._variables[name]


def _workspace(folder: Path) -> Path:
    """The folder that a file is about: editors keep theirs in a folder of their own."""
    return folder.parent if folder.name in (".vscode", ".cursor") else folder
