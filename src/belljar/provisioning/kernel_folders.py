"""The contract for a session's folders on the host, as far as kernels need them. `sessions` implements it."""

from pathlib import Path
from typing import Protocol

from belljar.sandboxes.base import Identity


class KernelFolders(Protocol):
    """The folders of one session on the host."""

    @property
    def session_id(self) -> str:
        """Return the id of the session."""
        ...

    @property
    def principal(self) -> str:
        """Return whose session it is; empty while it is nobody's yet."""
        ...

    @property
    def workspace(self) -> Path:
        """Return the working directory of its code."""
        ...

    @property
    def scratch(self) -> Path:
        """Return the folder of the sockets between its code and the host."""
        ...

    @property
    def home(self) -> Path:
        """Return what its code has as HOME."""
        ...

    @property
    def layer(self) -> Path:
        """Return the folder of the packages that were installed for it."""
        ...

    @property
    def skills(self) -> Path:
        """Return the folder of the skills that it sees."""
        ...

    @property
    def identity(self) -> Identity | None:
        """Return the user that owns the folders, where the session has a user of its own."""
        ...
