"""The folder of code files: naming, writing, extending and reading them, and giving the folder to the user they run as.

Code that runs there may write to the folder at any time, so every access goes through `Workspace`, as for a session
folder, and nothing outside is reached. All calls block. Knows nothing of environments or tools.
"""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from belljar.errors import InvalidArgument, InvalidPath, SettingsError, TooLarge
from belljar.files.names import MAX_DEPTH, SANDBOX_ROOT
from belljar.files.private import make_missing
from belljar.files.workspace import Workspace
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import is_given_out

LARGEST_FILE_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".py"


class CodeFiles:
    """One caller's code files."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        self.folder = folder
        self._identity = identity
        self._files = Workspace(folder, identity and (identity.uid, identity.gid))

    def open(self) -> None:
        """Make the folder, and let the user that runs the code write there."""
        make_missing(self.folder)
        if self._identity is not None:
            hand_over_folder(self.folder, self._identity)

    def new_name(self, wanted: str) -> str:
        """Return a new name that begins like the wanted one."""
        stem = wanted.removesuffix(_SUFFIX) or "code"
        if not _NAME.fullmatch(stem):
            raise InvalidArgument(
                f"filename {wanted[:120]!r} is not a plain name",
                hint="Use letters, digits, dots, dashes and underscores, without folders",
            )
        return f"{stem}_{secrets.token_hex(4)}{_SUFFIX}"

    def name_of(self, path: str) -> str:
        """Return the name inside the folder that a caller's path means."""
        # Callers know the path that they were answered with, and the one that tracebacks show.
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
        """Return the path that callers are answered with."""
        return str(self.folder / name)

    def create(self, name: str, content: str) -> None:
        """Create a file."""
        self._files.create(name, content.encode(errors="surrogatepass"))

    def read(self, name: str, limit_bytes: int = LARGEST_FILE_BYTES) -> str:
        """Return the text of a file."""
        try:
            return self._files.read(name, limit_bytes).decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument(f"{name} is not text", hint="Code files are UTF-8") from None

    def append(self, name: str, content: str) -> None:
        """Append to a file."""
        whole = self.read(name) + content
        if len(whole.encode()) > LARGEST_FILE_BYTES:
            raise TooLarge(f"{name} would have more than {LARGEST_FILE_BYTES:,} bytes", hint="Go on in a new code file")
        self._files.write(name, whole.encode())

    def write(self, name: str, text: str) -> None:
        """Write a file of the server's, and replace whatever had its name."""
        self._files.write(name, text.encode(errors="replace"))


# On a server that runs as root, the folder of code files is given to the user that runs them.
# Root changes owners here, in a folder that hostile code has written to and that an operator may have named by
# mistake. So no link is followed, and only files that belong to a user of an earlier server's sessions change owner. A
# file of anybody else is left alone, and so is one with a second hard link, which may be anywhere.

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_HINT = "Choose a folder that nobody else uses, or give it to the user that belljar runs as"


def hand_over_folder(folder: Path, identity: Identity) -> None:
    """Give the folder to this user; SettingsError for a folder of another account."""
    try:
        top = os.open(folder, _DIRECTORY)
    except OSError as error:
        raise SettingsError(f"the folder of code files {folder}: {error.strerror}", hint=_HINT) from error
    try:
        status = os.fstat(top)
        if status.st_uid != os.geteuid() and not is_given_out(status.st_uid):
            raise SettingsError(f"the folder of code files {folder} belongs to user {status.st_uid}", hint=_HINT)
        if status.st_mode & stat.S_IWOTH:
            raise SettingsError(f"everybody may write to the folder of code files {folder}", hint=_HINT)
        os.fchown(top, identity.uid, identity.gid)
        _hand_over_below(top, status.st_dev, identity, MAX_DEPTH)
    finally:
        os.close(top)


def _hand_over_below(directory: int, device: int, identity: Identity, depth: int) -> None:
    """Give what is in a directory to this user, down to the depth that a caller's path may have.

    The depth is limited because each level holds a descriptor.
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _hand_over(name, directory, device, identity)
        if depth > 1:
            with contextlib.suppress(OSError):  # not a directory, or not any more
                below = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    _hand_over_below(below, device, identity, depth - 1)
                finally:
                    os.close(below)


def _hand_over(name: str, directory: int, device: int, identity: Identity) -> None:
    entry = os.open(name, _LOOK, dir_fd=directory)
    try:
        status = os.fstat(entry)
        is_alone = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
        is_left = status.st_uid != identity.uid and is_given_out(status.st_uid)
        if is_left and is_alone and status.st_dev == device:
            # Through the descriptor, so that it is the file that was checked. `fchown` refuses an O_PATH descriptor.
            os.chown(f"/proc/self/fd/{entry}", identity.uid, identity.gid)
    finally:
        os.close(entry)
