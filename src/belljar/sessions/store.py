"""The store: where sleeping sessions lie as objects, in a folder or in an object store of a cloud.

An object is written whole or not at all. `put_new` makes one only if there is none of its name, which is how servers
that share nothing else agree on who goes on with a session. Every method blocks; call it in a thread. Knows names and
bytes, not what they mean.
"""

import asyncio
import contextlib
import errno
import importlib
import importlib.util
import os
import secrets
import socket
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from belljar.egress.rules import reserve_for_store
from belljar.errors import EngineError, SettingsError
from belljar.files.private import make_folder, write_file

READ_BYTES: Final = 4 * 1024 * 1024
_UNFINISHED: Final = ".unfinished"
_STALE_S: Final = 24 * 60 * 60
_EXTRA_HINT: Final = "pip install 'belljar-mcp[store]'"
# Plain HTTP only where the operator's own variable names such an endpoint.
_CLIENT: Final[dict[str, Any]] = {"connect_timeout": "10s", "timeout": "600s", "allow_http": True}
_RETRIES: Final[dict[str, Any]] = {"max_retries": 3}
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""The variables that name a service of the operator's own, by the scheme of a store."""
_LOOK_UP_S: Final = 60.0


class StoreFailed(EngineError):
    """The store cannot be reached, is full, or refuses what is asked of it."""

    code = "store-failed"


class ObjectMissing(StoreFailed):
    """There is no object of that name."""


class StoredObject(NamedTuple):
    """One object, as lists have it."""

    name: str
    size: int
    at: float
    """When it was written, by the store's clock."""


class Store(Protocol):
    """What is asked of a store. Names have the form `folder/folder/name`."""

    url: str

    def put_new(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one of its name; return whether it was written."""
        ...

    def put(self, name: str, content: Iterable[bytes]) -> None:
        """Write an object, in place of one of its name; nothing is written if `content` raises."""
        ...

    def read(self, name: str, most: int) -> Iterator[bytes]:
        """Yield the content of an object; refuse one of more than `most` bytes before anything of it."""
        ...

    def list(self, prefix: str) -> list[StoredObject]:
        """Return the objects whose names begin with a folder, `prefix`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in this order; those that are missing are none to delete."""
        ...


def open_store(url: str) -> Store:
    """Return the store at a URL."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderStore(url, Path(unquote(parts.path)))
    if importlib.util.find_spec("obstore") is None:
        raise SettingsError(f"store = {url} needs the extra `store`, which is not installed", hint=_EXTRA_HINT)
    return CloudStore(url)


async def keep_sessions_away(url: str) -> None:
    """Refuse sessions the way to the operator's own service that has the store at a URL, until cancelled.

    Not to a cloud's own endpoint, whose address does not tell which bucket is meant.
    """
    variables = _ENDPOINTS.get(urlsplit(url).scheme, ())
    endpoints = [urlsplit(os.environ[name]) for name in variables if os.environ.get(name)]
    try:
        while endpoints:
            found: set[tuple[str, int]] = set()
            # Those of before stay where one cannot be looked up.
            with contextlib.suppress(OSError, ValueError):
                for each in endpoints:
                    port = each.port or (80 if each.scheme == "http" else 443)
                    answers = await asyncio.get_running_loop().getaddrinfo(each.hostname, port, type=socket.SOCK_STREAM)
                    found |= {(str(address[0]), port) for *_, address in answers}
                reserve_for_store(found)
            await asyncio.sleep(_LOOK_UP_S)
    finally:
        reserve_for_store([])


class FolderStore:
    """A store in a folder, of this machine or of a file server."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self._root = root
        self._tidy()

    def put_new(self, name: str, content: bytes) -> bool:
        """See `Store`."""
        with _said(self.url), self._draft() as draft:
            write_file(draft, content)
            target = self._made(name)
            try:
                os.link(draft, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                return _made_new(target, content)  # a file system without hard links
            return True

    def put(self, name: str, content: Iterable[bytes]) -> None:
        """See `Store`."""
        with _said(self.url), self._draft() as draft:
            write_file(draft, b"")
            with draft.open("r+b") as file:
                for chunk in content:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._made(name))

    def read(self, name: str, most: int) -> Iterator[bytes]:
        """See `Store`."""
        with _said(self.url):
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                _check_size(name, os.fstat(descriptor).st_size, most)
                while chunk := file.read(READ_BYTES):
                    yield chunk

    def list(self, prefix: str) -> list[StoredObject]:
        """See `Store`."""
        found: list[StoredObject] = []
        with _said(self.url):
            self._check()
            for folder, _, names in os.walk(self._root / prefix):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        found.append(StoredObject(str(path.relative_to(self._root)), status.st_size, status.st_mtime))
        return found

    def delete(self, names: Iterable[str]) -> None:
        """See `Store`."""
        with _said(self.url):
            self._check()
            for name in names:
                path = self._root / name
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # others are in it
                    path.parent.rmdir()

    def _check(self) -> None:
        if not self._root.is_dir():
            raise StoreFailed(f"the store's folder {self._root} does not exist", hint="Make it, or mount what it is on")

    def _made(self, name: str) -> Path:
        target = self._root / name
        make_folder(target.parent)
        return target

    @contextmanager
    def _draft(self) -> Generator[Path]:
        """Yield a path beside the objects, and remove what is left there."""
        self._check()
        folder = self._root / _UNFINISHED
        if not folder.is_dir():
            make_folder(folder)
        draft = folder / secrets.token_hex(8)
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what servers that were killed had begun to write a day ago."""
        with contextlib.suppress(OSError):
            for draft in (self._root / _UNFINISHED).iterdir():
                if draft.stat().st_mtime < time.time() - _STALE_S:
                    draft.unlink()


def _made_new(target: Path, content: bytes) -> bool:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return True


class CloudStore:
    """A store of S3, Google Cloud Storage or Azure, by obstore; credentials are where each cloud's own tools look."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Imported here, because obstore is an extra.
        self._obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
        self._errors = importlib.import_module("obstore.exceptions")
        try:
            self._store: Any = stores.from_url(url, client_options=_CLIENT, retry_config=_RETRIES)
        except (self._errors.BaseError, ValueError) as error:
            raise SettingsError(f"store = {url} cannot be used: {_brief(error)}") from error

    def put_new(self, name: str, content: bytes) -> bool:
        """See `Store`."""
        with self._mapped():
            try:
                self._obstore.put(self._store, name, content, mode="create")
            except self._errors.AlreadyExistsError:
                return False
            return True

    def put(self, name: str, content: Iterable[bytes]) -> None:
        """See `Store`."""
        with self._mapped():
            self._obstore.put(self._store, name, iter(content))

    def read(self, name: str, most: int) -> Iterator[bytes]:
        """See `Store`."""
        with self._mapped():
            found = self._obstore.get(self._store, name)
            _check_size(name, found.meta["size"], most)
            yield from found.stream(min_chunk_size=READ_BYTES)

    def list(self, prefix: str) -> list[StoredObject]:
        """See `Store`."""
        with self._mapped():
            return [
                StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                for page in self._obstore.list(self._store, prefix)
                for each in page
            ]

    def delete(self, names: Iterable[str]) -> None:
        """See `Store`."""
        with self._mapped():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._obstore.delete(self._store, name)

    @contextmanager
    def _mapped(self) -> Generator[None]:
        try:
            with _said(self.url):
                yield
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            hint = "Give this server's credentials the right to list, read, write and delete objects there"
            raise StoreFailed(f"the store {self.url} refuses: {_brief(error)}", hint=hint) from error
        except self._errors.BaseError as error:
            raise StoreFailed(f"the store {self.url} cannot be used: {_brief(error)}") from error


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise StoreFailed(f"{name} has {size:,} bytes in the store, and at most {most:,} are read")


def _brief(error: Exception) -> str:
    """Return the first line of what a library says, without the addresses that a signed URL has in it."""
    return str(error).strip().partition("\n")[0].partition("?")[0][:300]


@contextmanager
def _said(url: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"the store {url} has no such object, or is none itself") from error
    except OSError as error:
        hint = (
            "Make room there"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "See that this server's user may write there"
        )
        raise StoreFailed(f"the store {url} cannot be used: {error.strerror or error}", hint=hint) from error
