"""A session's places on the host, as far as kernels need them: the contract, which the sessions fulfil."""

from pathlib import Path
from typing import Protocol

from belljar.sandboxes.base import Identity


class KernelFolders(Protocol):
    """The session's places on the host, as far as a kernel needs them."""

    @property
    def session_id(self) -> str:
        """Whose they are."""
        ...

    @property
    def workspace(self) -> Path:
        """Working directory."""
        ...

    @property
    def scratch(self) -> Path:
        """Sockets."""
        ...

    @property
    def home(self) -> Path:
        """HOME."""
        ...

    @property
    def layer(self) -> Path:
        """The session's own packages."""
        ...

    @property
    def identity(self) -> Identity | None:
        """Whose they are, where the session is a user of its own."""
        ...
