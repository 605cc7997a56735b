"""The folders of the host that the settings show to sessions: which session sees which, and where.

The setting is checked when the server starts, so that no session finds out first. What is mounted is opened by the
provider each time a sandbox is made (`files/host_folders.py`), because the folder may have been replaced since.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from belljar.errors import FileMissing, SandboxUnavailable, SettingsError
from belljar.files.host_folders import open_host_folder, read_host_file
from belljar.files.names import shown
from belljar.sandboxes.base import FolderProvider, HostFolder, Provider
from belljar.sandboxes.host_users import closed_to_others
from belljar.settings import Settings
from belljar.settings.trust import user_folder

_KERNEL_FOLDERS = ("/proc", "/sys", "/dev", "/run", "/var/run")
"""What is in them controls the machine or leads to its services, and read-only mounts do not change that."""
_MAX_LISTED = 1_000


class HostFolders:
    """Which folders of the host the sessions of each principal see."""

    def __init__(self, settings: Settings, *, are_mounted: bool = True) -> None:
        self._entries = settings.folders
        self._are_mounted = are_mounted

    def of(self, principal: str) -> tuple[HostFolder, ...]:
        """Return the folders that a principal's sessions see, by name; of nobody (""), those that everybody sees."""
        return tuple(
            HostFolder(name, entry.path, entry.writable)
            for name, entry in sorted(self._entries.items())
            if entry.is_for(principal)
        )

    def all(self) -> tuple[HostFolder, ...]:
        """Return every folder that some session sees."""
        return tuple(HostFolder(name, entry.path, entry.writable) for name, entry in self._entries.items())

    def place(self, folder: HostFolder) -> str:
        """Return the path that code in a session uses for a folder."""
        return folder.inside if self._are_mounted else folder.path

    def read(self, principal: str, path: str, limit_bytes: int) -> bytes:
        """Return a file of a folder that the principal's sessions see, by its path in a session."""
        folders = self.of(principal)
        for folder in folders:
            for root in {folder.inside, self.place(folder)}:
                if path.startswith(f"{root}/"):
                    return _read(folder, str(PurePosixPath(path).relative_to(root)), limit_bytes)
        places = ", ".join(self.place(folder) for folder in folders)
        raise FileMissing(
            f"{shown(path)} is in no folder that sessions see",
            hint=f"path names a file below {places}" if places else "No folder is shown; use text, base64 or url",
        )


def revoked(earlier: Sequence[HostFolder], now: Sequence[HostFolder]) -> list[str]:
    """Return the names of folders that a running sandbox shows and a new one would not, or not as writable."""
    allowed = {(folder.name, folder.path): folder.is_writable for folder in now}
    return [
        folder.name
        for folder in earlier
        if (is_writable := allowed.get((folder.name, folder.path))) is None or folder.is_writable > is_writable
    ]


def open_host_folders(settings: Settings, provider: Provider) -> HostFolders:
    """Check the setting `folders` against this host and the provider; SettingsError for what cannot be shown."""
    if not settings.folders:
        return HostFolders(settings)
    shows_folders = require_folder_provider(provider).shows_folders
    for _, fault in folder_faults(settings, provider):
        if fault is not None:
            raise fault
    return HostFolders(settings, are_mounted=shows_folders == "mounted")


def require_folder_provider(provider: Provider) -> FolderProvider:
    """Return the provider if its sandboxes can show folders of the host; SettingsError if they cannot."""
    if not isinstance(provider, FolderProvider):
        raise SettingsError(
            f"folders cannot be used: the sandbox {provider.name} shows none of the host's",
            hint="Take the setting out, or set sandbox to namespace, container or gvisor",
        )
    return provider


def folder_faults(settings: Settings, provider: Provider) -> Iterator[tuple[HostFolder, SettingsError | None]]:
    """Yield each folder of the settings, and why sessions on this host cannot be shown it."""
    identity = provider.take_identity()
    if identity is not None:
        provider.release_identity(identity)
    for folder in HostFolders(settings).all():
        try:
            _check(folder, settings)
            if identity is not None:
                _check_mode(folder)
        except SettingsError as error:
            yield folder, error
        else:
            yield folder, None


def _check_mode(folder: HostFolder) -> None:
    if why := closed_to_others(folder):
        mode = "o+rwx" if folder.is_writable else "o+rx"
        raise SettingsError(
            f"folders.{folder.name}: {why}",
            hint=f"Run the server as an ordinary user, or chmod {mode} {folder.path}",
        )


def _check(folder: HostFolder, settings: Settings) -> None:
    try:
        descriptor = open_host_folder(folder.path)
    except SandboxUnavailable as error:
        raise SettingsError(f"folders.{folder.name}: {error.message}", hint=error.hint) from error
    os.close(descriptor)
    real = Path(os.path.realpath(folder.path))
    if real == Path("/") or any(real.is_relative_to(os.path.realpath(kernel)) for kernel in _KERNEL_FOLDERS):
        raise SettingsError(
            f"folders.{folder.name}: {folder.path} belongs to the machine, and sessions must not see it",
            hint="Name a folder of files",
        )
    own = [settings.data_directory, *([above] if (above := user_folder()) is not None else [])]
    own += [Path(path) for path in (settings.workspace_directory, settings.plugins_directory) if path]
    for private in (Path(os.path.realpath(path)) for path in own):
        if private.is_relative_to(real) or real.is_relative_to(private):
            raise SettingsError(
                f"folders.{folder.name}: {folder.path} would show sessions belljar's own folder {private}",
                hint="Name a folder that does not contain it",
            )
    if sockets := _sockets(real):
        raise SettingsError(
            f"folders.{folder.name}: {folder.path} has a socket, {sockets[0]}, through which code in a session could "
            "reach whatever listens there",
            hint="Name a folder of files",
        )


def _sockets(folder: Path) -> list[str]:
    """Return the sockets that lie in the folder itself. Those further down are the operator's to know."""
    found: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MAX_LISTED:
                    break
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    found.append(entry.name)
    except OSError:
        pass  # a folder that may be entered and not listed
    return found


def _read(folder: HostFolder, name: str, limit_bytes: int) -> bytes:
    descriptor = open_host_folder(folder.path)
    try:
        return read_host_file(descriptor, name, limit_bytes)
    except OSError as error:
        raise FileMissing(f"{shown(name)} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
