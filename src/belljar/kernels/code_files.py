"""The folder of code files: named, written, extended and read, and nothing outside it.

The code that runs there may write to it at any time, so every access goes through the same guarded steps as a session
folder's. Blocking calls; knows nothing of environments or tools.
"""

import os
import re
import secrets
from pathlib import Path

from belljar.errors import InvalidArgument, InvalidPath, TooLarge
from belljar.files.names import SANDBOX_ROOT
from belljar.files.private import make_missing
from belljar.files.workspace import Workspace
from belljar.kernels.folder_owner import hand_over_folder
from belljar.sandboxes.base import Identity

LARGEST_FILE_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".py"


class Storage:
    """One caller's code files."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        self.folder = folder
        self._identity = identity
        self._files = Workspace(folder, identity and (identity.uid, identity.gid))

    def open(self) -> None:
        """Make the folder, and let the code that runs in it write there."""
        make_missing(self.folder)
        if self._identity is not None:
            hand_over_folder(self.folder, self._identity)

    def new_name(self, wanted: str) -> str:
        """A name that no file has yet, after the one that is wanted."""
        stem = wanted.removesuffix(_SUFFIX) or "code"
        if not _NAME.fullmatch(stem):
            raise InvalidArgument(
                f"filename {wanted[:120]!r} is not a plain name",
                hint="Use letters, digits, dots, dashes and underscores, without folders",
            )
        return f"{stem}_{secrets.token_hex(4)}{_SUFFIX}"

    def name_of(self, path: str) -> str:
        """The name in the folder that a caller's path means."""
        # As callers were told it, and as tracebacks show it.
        for root in dict.fromkeys((self.folder, self.folder.resolve(), Path(SANDBOX_ROOT))):
            if path.startswith(f"{root}{os.sep}"):
                path = path[len(str(root)) + 1 :]
                break
        if path.startswith("/"):
            raise InvalidPath(
                f"{path[:200]} is outside the folder of code files, {self.folder}",
                hint="Pass a file_path that initialize_code_file or execute_code answered with",
            )
        return "/".join(self._files.check_name(path))

    def path(self, name: str) -> str:
        """As callers are told."""
        return str(self.folder / name)

    def create(self, name: str, content: str) -> None:
        """A new file."""
        self._files.create(name, content.encode(errors="surrogatepass"))

    def read(self, name: str, limit_bytes: int = LARGEST_FILE_BYTES) -> str:
        """A file's text."""
        try:
            return self._files.read(name, limit_bytes).decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument(f"{name} is not text", hint="Code files are UTF-8") from None

    def append(self, name: str, content: str) -> None:
        """Put more at the end of a file."""
        whole = self.read(name) + content
        if len(whole.encode()) > LARGEST_FILE_BYTES:
            raise TooLarge(f"{name} would have more than {LARGEST_FILE_BYTES:,} bytes", hint="Go on in a new code file")
        self._files.write(name, whole.encode())

    def keep(self, name: str, text: str) -> None:
        """Write a file of ours, whatever had its name."""
        self._files.write(name, text.encode(errors="replace"))
