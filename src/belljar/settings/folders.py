"""The entries of the setting `folders`: host folders that sessions see, and for whom.

Only the form is checked here; `provisioning/host_folders.py` says who sees which, `files/host_folders.py` opens them.
"""

import re
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from belljar.settings.kinds import absolute_file

RESERVED = {"data": "/mnt/data is the session's own folder; choose another name, such as datasets"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class FolderSetting(BaseModel):
    """One entry of the setting `folders`; a path alone is a read-only folder that everybody's sessions see."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    path: str
    """The folder on the host, absolute."""
    writable: bool = False
    owners: tuple[str, ...] = ()
    """Whose sessions see it: names of keys, `local`, or `jwt:ISSUER#SUBJECT`; none named means everybody's."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else cast("object", value)

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not path.startswith(("/", "~")):
            raise ValueError("a folder is named by its absolute path, like /home/me/datasets")
        if any(character in path for character in '\0\n,"'):
            raise ValueError("the path of a folder has no commas, quotes or line ends")
        return absolute_file(path)

    def is_for(self, principal: str) -> bool:
        """Tell whether the sessions of this principal see it."""
        return not self.owners or principal in self.owners or principal.removeprefix("key:") in self.owners


def checked_folders(entries: dict[str, FolderSetting]) -> dict[str, FolderSetting]:
    """Refuse names that are taken or could not be a folder's."""
    for name in entries:
        if name in RESERVED:
            raise ValueError(RESERVED[name])
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name, like sales or invoices-2025")
    return entries
