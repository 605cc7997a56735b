"""The folder of code files: named, written, extended and read, and nothing outside it.

The code that runs there may write to it at any time, so every access goes through the same guarded steps as a session
folder's. Blocking calls; knows nothing of environments or tools.
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

    def write(self, name: str, text: str) -> None:
        """Write a file of ours, whatever had its name."""
        self._files.write(name, text.encode(errors="replace"))


# A folder of code files becomes the user's that runs them, on a server that root runs.
# Root changes owners here, in a folder that hostile code has written to and that an operator may have named by
# mistake. So nothing is reached through a link, and only what belonged to the code of an earlier server changes
# hands: a file of anybody else's stays theirs, and so does one that has a second name, which may be anywhere.

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_HINT = "Choose a folder that nobody else uses, or give it to the user that belljar runs as"


def hand_over_folder(folder: Path, identity: Identity) -> None:
    """Let this user write there; a folder that is another account's is refused."""
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
    """Not below the depth that a caller's path may have: each step holds a descriptor."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _hand_over(name, directory, device, identity)
        if depth > 1:
            with contextlib.suppress(OSError):  # no directory, or none any more
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
            # By its descriptor, so it is the one that was looked at; it was opened without rights of its own.
            os.chown(f"/proc/self/fd/{entry}", identity.uid, identity.gid)
    finally:
        os.close(entry)
