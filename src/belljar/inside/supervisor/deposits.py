"""What is kept for the next server, by key: words, descriptors, and the children that go with them."""

import os
from pathlib import Path
from typing import Any


class StoredDeposit:
    """What is under one key."""

    def __init__(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.words: dict[str, Any] = request["words"]
        self.children: set[int] = set(request["children"])
        self.is_session = bool(request["is_session"])
        self.folders: list[str] = request["folders"]
        """Control groups, to be removed when everything ends."""
        self.descriptors = [*descriptors]
        descriptors.clear()

    def close(self) -> None:
        """Let go of the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Deposits:
    """All of them."""

    def __init__(self) -> None:
        self._deposits: dict[str, StoredDeposit] = {}

    @property
    def keys(self) -> "list[str]":
        """What there is."""
        return [*self._deposits]

    @property
    def have_session(self) -> bool:
        """Whether it is worth waiting for another server with them."""
        return any(deposit.is_session for deposit in self._deposits.values())

    @property
    def children(self) -> "set[int]":
        """Who does not end with the server."""
        return {pid for deposit in self._deposits.values() for pid in deposit.children}

    @property
    def folders(self) -> "list[Path]":
        """The control groups of all."""
        return [Path(folder) for deposit in self._deposits.values() for folder in deposit.folders]

    def store(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        """Keep something under a key, in place of what was there."""
        deposit = StoredDeposit(request, descriptors)
        self.drop(request["key"])
        self._deposits[request["key"]] = deposit

    def find(self, key: str) -> "StoredDeposit | None":
        """What is under a key."""
        return self._deposits.get(key)

    def drop(self, key: str) -> "set[int]":
        """Keep it no longer; its children are told."""
        deposit = self._deposits.pop(key, None)
        if deposit is None:
            return set()
        deposit.close()
        return deposit.children


def is_removed(folder: Path) -> bool:
    """Whether a control group is gone, with those in it."""
    try:
        for below in [path for path in folder.iterdir() if path.is_dir()]:
            below.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
