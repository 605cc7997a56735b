"""What the supervisor keeps for the next server, by key: a JSON object, descriptors, and the children with them."""

import os
from pathlib import Path
from typing import Any


class StoredDeposit:
    """What one key holds. It takes the descriptors over, so the list that it was given is empty afterwards."""

    def __init__(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.fields: dict[str, Any] = request["words"]
        self.children: set[int] = set(request["children"])
        self.is_session = bool(request["is_session"])
        self.folders: list[str] = request["folders"]
        """Control groups, to be removed when the supervisor shuts down."""
        self.descriptors = [*descriptors]
        descriptors.clear()

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Deposits:
    """All deposits of a supervisor."""

    def __init__(self) -> None:
        self._deposits: dict[str, StoredDeposit] = {}

    @property
    def keys(self) -> "list[str]":
        """Return the keys that hold something."""
        return [*self._deposits]

    @property
    def have_session(self) -> bool:
        """Return whether a session is among them, which is worth waiting for another server."""
        return any(deposit.is_session for deposit in self._deposits.values())

    @property
    def children(self) -> "set[int]":
        """Return the children that are not killed when the server goes."""
        return {pid for deposit in self._deposits.values() for pid in deposit.children}

    @property
    def folders(self) -> "list[Path]":
        """Return the control groups of all deposits."""
        return [Path(folder) for deposit in self._deposits.values() for folder in deposit.folders]

    def store(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        """Store a deposit under its key, in place of what was there."""
        deposit = StoredDeposit(request, descriptors)
        self.drop(request["key"])
        self._deposits[request["key"]] = deposit

    def find(self, key: str) -> "StoredDeposit | None":
        """Return the deposit under a key, or None."""
        return self._deposits.get(key)

    def drop(self, key: str) -> "set[int]":
        """Remove the deposit under a key, and return its children."""
        deposit = self._deposits.pop(key, None)
        if deposit is None:
            return set()
        deposit.close()
        return deposit.children


def is_removed(folder: Path) -> bool:
    """Try to remove a control group and those in it, and return whether it is gone."""
    try:
        for below in [path for path in folder.iterdir() if path.is_dir()]:
            below.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
