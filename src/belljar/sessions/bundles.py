"""A sleeping session as one sealed stream of bytes: its folder and its rows of the journal, to be put into a store.

A bundle is a tar archive, compressed, and sealed in chunks with AES-256-GCM by a key of its own, derived from
`store_key`: what is altered, cut, in another place than it was put or of another key is refused. Files that the
session's code made are hostile on both sides: entries are opened relative to their folder, links are packed and made
as links and never followed, devices and the like are left out, and sizes are bounded before anything is read. Knows
neither stores nor who may wake what.
"""

import errno
import hmac
import json
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from belljar.errors import EngineError, TooLarge
from belljar.files.fd_walk import MAX_DEPTH, UNFINISHED, open_file, open_folder, remove_tree
from belljar.files.private import make_folder, way_mode
from belljar.files.tree_copy import data_ranges
from belljar.journal.bundle_records import Row, as_lines, of_lines

FORMAT: Final = 1
CHUNK_BYTES: Final = 1024 * 1024
MAX_ENTRIES: Final = 400_000
LEFT_OUT: Final = frozenset({"scratch", "snapshots", "snapshots-left", "skills", "shared.json"})
"""What of a session's folder is its server's: sockets, checkpoints, links to skills, times in the shared folder."""
_LINKED: Final = frozenset({"workspace", "home", "layer"})
"""The folders in which links may be. The server follows paths in the others."""
_FOLDER, _ROWS = "folder", "rows"
_KEPT_MODE: Final = 0o1777
_MOST_FILE_BYTES: Final = 1 << 44
_LATEST_S: Final = 1 << 40
"""The latest time of a file. A session may give its own any, which not every file system can keep."""
_MOST_HEADER_BYTES: Final = 4096
_MOST_ROW_BYTES: Final = 64 * 1024 * 1024
_BLOCK: Final = tarfile.BLOCKSIZE
_READ_BYTES: Final = 2048 * _BLOCK
_TAG_BYTES: Final = 16
_OTHER_KEY: Final = "Give every server of this store the same store_key; if they have it, the object was changed"


class BundleRefused(EngineError):
    """A bundle that cannot be unpacked here: altered, cut, of another key or a later version, or with hostile names."""

    code = "bundle-refused"


class Aborted(EngineError):
    """Somebody wants the session before it is packed."""


# Sealing


class Sealer:
    """Seals what is put into a store, and opens what comes out of it.

    `name` is the object's: one that was moved is refused.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def digest(self, *parts: str) -> str:
        """Return a name for an object by which nobody without the key can tell, or guess, what these are."""
        text = json.dumps(["belljar name", *parts]).encode()
        return hmac.new(self._secret, text, "sha256").hexdigest()

    def seal(self, name: str, content: Iterable[bytes], **told: Any) -> Iterator[bytes]:
        """Yield an object's bytes; `told` is readable without the key, and cannot be changed without it."""
        salt = secrets.token_bytes(16)
        header = json.dumps({"belljar": FORMAT, "salt": salt.hex(), **told}).encode() + b"\n"
        cipher, known = self._cipher(salt), name.encode() + b"\0" + header
        yield header
        number, waiting = 0, b""
        for chunk in _in_chunks(content):
            if waiting:
                yield _frame(cipher.encrypt(_nonce(number, is_last=False), waiting, known))
                number += 1
            waiting = chunk
        yield _frame(cipher.encrypt(_nonce(number, is_last=True), waiting, known))

    def open(self, name: str, content: Iterable[bytes]) -> "tuple[dict[str, Any], Iterator[bytes]]":
        """Return what an object tells without the key, and its content."""
        source = _Source(content)
        header = source.line(_MOST_HEADER_BYTES)
        try:
            told = json.loads(header)
            version, salt = told["belljar"], bytes.fromhex(told["salt"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BundleRefused(f"{name} in the store is none of belljar's objects", hint=_OTHER_KEY) from error
        if version != FORMAT:
            raise BundleRefused(
                f"{name} in the store is of a later belljar (format {str(version)[:20]}, this one knows {FORMAT})",
                hint="Upgrade belljar on this machine",
            )
        return told, self._opened(name, self._cipher(salt), name.encode() + b"\0" + header, source)

    def _opened(self, name: str, cipher: AESGCM, known: bytes, source: "_Source") -> Iterator[bytes]:
        number, is_last = 0, False
        while not is_last:
            length = int.from_bytes(source.exactly(4, name), "big")
            if not _TAG_BYTES <= length <= CHUNK_BYTES + _TAG_BYTES:
                raise BundleRefused(f"{name} in the store is damaged", hint=_OTHER_KEY)
            sealed = source.exactly(length, name)
            is_last = source.is_at_end()
            try:
                yield cipher.decrypt(_nonce(number, is_last=is_last), sealed, known)
            except InvalidTag as error:
                raise BundleRefused(
                    f"{name} in the store was altered or cut, or has another key", hint=_OTHER_KEY
                ) from error
            number += 1

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(HKDF(SHA256(), 32, salt, b"belljar store").derive(self._secret))


def _nonce(number: int, *, is_last: bool) -> bytes:
    # The key is of this object alone, so numbers are enough; that the last chunk has a nonce of its own tells a cut.
    return number.to_bytes(11, "big") + bytes([is_last])


def _frame(sealed: bytes) -> bytes:
    return len(sealed).to_bytes(4, "big") + sealed


def _in_chunks(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in chunks of `CHUNK_BYTES`, of which the last may be shorter."""
    waiting = bytearray()
    for part in content:
        waiting += part
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)


class _Source:
    """Reads exact amounts from chunks of any size."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._waiting, self._at = b"", 0
        """The chunk that is read, and how far it is: cutting off what was read would copy the rest each time."""

    def is_at_end(self) -> bool:
        while self._at >= len(self._waiting):
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            self._waiting, self._at = chunk, 0
        return False

    def exactly(self, count: int, name: str) -> bytes:
        found = self.read(count)
        if len(found) < count:
            raise BundleRefused(f"{name} in the store is cut off", hint=_OTHER_KEY)
        return found

    def read(self, count: int) -> bytes:
        """Return so many bytes, or fewer at the end; a file's `read`, for tarfile."""
        parts: list[bytes] = []
        while count > 0 and not self.is_at_end():
            part = self._waiting[self._at : self._at + count]
            parts.append(part)
            count -= len(part)
            self._at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def line(self, most: int) -> bytes:
        found = b""
        while not found.endswith(b"\n") and len(found) < most and not self.is_at_end():
            end = self._waiting.find(b"\n", self._at) + 1 or len(self._waiting)
            found, self._at = found + self._waiting[self._at : end], end
        return found[:most]


# Compressing


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def compression() -> str:
    """Return how this Python compresses bundles."""
    return "zlib" if _zstd() is None else "zstd"


def _zstd() -> Any:
    """Return the module of Python 3.14 and later; None before."""
    return import_module("compression.zstd") if find_spec("compression") is not None else None


def compressed(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes compressed, by `compression()`."""
    zstd = _zstd()
    compressor: _Compressor = zlib.compressobj(1) if zstd is None else zstd.ZstdCompressor(level=1)
    for chunk in content:
        if packed := compressor.compress(chunk):
            yield packed
    yield compressor.flush()


def decompressed(content: Iterable[bytes], how: str, most: int) -> Iterator[bytes]:
    """Yield bytes that were compressed so; refuse to make more than `most` of them, or more of a chunk at once."""
    if how not in ("zlib", "zstd") or (how == "zstd" and _zstd() is None):
        hint = "Run this server on Python 3.14 or later, as the one that put it"
        raise BundleRefused(f"the bundle is compressed by {how[:20]!r}, which this Python cannot read", hint=hint)
    reader: Any = zlib.decompressobj() if how == "zlib" else _zstd().ZstdDecompressor()
    made = 0
    for chunk in content:
        rest = chunk
        while True:
            try:
                part: bytes = reader.decompress(rest, CHUNK_BYTES)
            except Exception as error:  # zlib.error or zstd's own
                raise BundleRefused("the bundle cannot be decompressed") from error
            made += len(part)
            if made > most:
                raise BundleRefused(f"the bundle unpacks to more than the {most:,} bytes that it says")
            if part:
                yield part
            rest = reader.unconsumed_tail if how == "zlib" else b""
            if not rest and len(part) < CHUNK_BYTES:
                break
            if reader.eof:
                break


# Packing


class Packing:
    """Packs one session that sleeps. `size_bytes` is how much it unpacks to, once it is packed."""

    def __init__(self, root: Path, rows: Iterable[Row], most_bytes: int, is_wanted: Callable[[], bool]) -> None:
        self._root = root
        self._rows = rows
        self._most = most_bytes
        self._is_wanted = is_wanted
        self._entries = 0
        self._parts: list[str] = []
        self.size_bytes = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield the archive: rows first, because they are what whoever unpacks checks first."""
        try:
            for chunk in self._archive():
                self.size_bytes += len(chunk)
                if self.size_bytes > self._most:
                    raise TooLarge(f"the session has more than {self._most:,} bytes")
                if self._is_wanted():
                    raise Aborted("the session is wanted")
                yield chunk
        except OSError as error:
            # Told apart from an error of the store, to which this is passed.
            raise EngineError(f"the session's folder cannot be read: {error.strerror or error}") from error

    def _archive(self) -> Iterator[bytes]:
        waiting, number = bytearray(), 0
        for line in as_lines(self._rows):
            waiting += line
            if len(waiting) > CHUNK_BYTES:
                yield from self._member(f"{_ROWS}/{number:06}", bytes(waiting))
                number, waiting = number + 1, bytearray()
        yield from self._member(f"{_ROWS}/{number:06}", bytes(waiting))
        with open_folder(os.fspath(self._root)) as (root, _):
            for name in self._names(root):
                if name not in LEFT_OUT:
                    yield from self._entry(name, root)
        yield bytes(2 * _BLOCK)

    @staticmethod
    def _member(name: str, content: bytes) -> Iterator[bytes]:
        header = tarfile.TarInfo(name)
        header.size = len(content)
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield content + bytes(-len(content) % _BLOCK)

    def _names(self, folder: int) -> list[str]:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(UNFINISHED))
        self._entries += len(names)
        if self._entries > MAX_ENTRIES:
            raise TooLarge(f"the session has more than {MAX_ENTRIES:,} files")
        if len(self._parts) > MAX_DEPTH:
            raise TooLarge(f"the session has folders more than {MAX_DEPTH} levels deep")
        return names

    def _entry(self, name: str, parent: int) -> Iterator[bytes]:
        self._parts.append(name)
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            header = tarfile.TarInfo("/".join([_FOLDER, *self._parts]))
            header.mode = stat.S_IMODE(status.st_mode) & _KEPT_MODE
            header.mtime = max(-_LATEST_S, min(status.st_mtime, _LATEST_S))
            if stat.S_ISDIR(status.st_mode):
                with open_folder(name, parent) as (folder, _):
                    header.type = tarfile.DIRTYPE
                    yield header.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
                    for below in self._names(folder):
                        yield from self._entry(below, folder)
            elif stat.S_ISLNK(status.st_mode):
                header.type, header.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)
                yield header.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
            elif stat.S_ISREG(status.st_mode):
                with open_file(name, parent) as (file, found):
                    yield from _file(header, file, found.st_size)
        finally:
            self._parts.pop()


def _file(header: tarfile.TarInfo, file: int, size: int) -> Iterator[bytes]:
    """Yield a file's member; of one with holes only its data, as GNU tar does (sparse format 1.0)."""
    ranges = [*data_ranges(file, size)]
    stored = sum(end - start for start, end in ranges)
    index = b""
    if stored < size:
        numbers = [len(ranges) + 1, *(each for start, end in ranges for each in (start, end - start)), size, 0]
        index = b"".join(b"%d\n" % number for number in numbers)
        index += bytes(-len(index) % _BLOCK)
        header.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": header.name,
            "GNU.sparse.realsize": str(size),
        }
    header.size = len(index) + stored
    yield header.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
    if index:
        yield index
    for start, end in ranges:
        at = start
        while at < end:
            # A file is as long as its header says, also one that was cut meanwhile.
            chunk = os.pread(file, min(CHUNK_BYTES, end - at), at) or bytes(min(CHUNK_BYTES, end - at))
            yield chunk
            at += len(chunk)
    yield bytes(-header.size % _BLOCK)


# Unpacking


def unpack(content: Iterable[bytes], target: Path, on_rows: Callable[[list[Row], int], None]) -> None:
    """Unpack an archive into a folder that is there and empty; `on_rows` gets its rows with their size, in order."""
    readable = cast("Any", _Source(content))
    try:
        with (
            tarfile.open(fileobj=readable, mode="r|", errors="surrogateescape", bufsize=_READ_BYTES) as archive,
            open_folder(os.fspath(target), is_written=True) as (root, _),
        ):
            tree = _Tree(root)
            for count, member in enumerate(archive):
                if count > MAX_ENTRIES + 10_000:
                    raise BundleRefused(f"the bundle has more than {MAX_ENTRIES:,} files")
                first, _, rest = member.name.partition("/")
                if first == _ROWS and member.isreg() and not member.issparse():
                    on_rows(*_rows_of(archive, member))
                elif first == _FOLDER:
                    tree.add(archive, member, _checked(rest, member))
                else:
                    raise BundleRefused(f"the bundle has an entry {member.name[:100]!r}, which none has")
                # Otherwise every member stays in memory.
                cast("Any", archive).members.clear()
            tree.close()
    except (tarfile.TarError, UnicodeError, ValueError) as error:
        raise BundleRefused(f"the bundle is no archive: {type(error).__name__}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TooLarge("the disk has no room for the session", hint="Make room in the data directory") from error
        raise BundleRefused(f"the bundle cannot be unpacked: {error.strerror or error}") from error


def _rows_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[list[Row], int]:
    if member.size > _MOST_ROW_BYTES + CHUNK_BYTES:
        raise BundleRefused(f"the bundle has {member.size:,} bytes of rows at once")
    content = archive.extractfile(member)
    lines = content.read() if content is not None else b""
    return of_lines(lines), len(lines)


def _checked(name: str, member: tarfile.TarInfo) -> list[str]:
    """Return the parts of an entry's path, or refuse it."""
    parts = name.split("/")
    is_link = member.issym()
    is_known = is_link or member.isdir() or (member.isreg() and member.size >= 0)
    if (
        not is_known
        or len(parts) > MAX_DEPTH + 2
        or any(part in ("", ".", "..") or "\0" in part for part in parts)
        or (is_link and (len(parts) < 2 or parts[0] not in _LINKED))
    ):
        raise BundleRefused(f"the bundle has an entry {name[:100]!r} that no session's folder has")
    return parts


class _Tree:
    """The folder that is being filled, with the folders that are open on the way to the latest entry."""

    def __init__(self, root: int) -> None:
        self._open: list[tuple[str, int, tarfile.TarInfo, ExitStack]] = []
        self._root = root

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> None:
        parent = self._enter(parts[:-1])
        name, mtime_ns = parts[-1], int(member.mtime * 1e9)
        if member.isdir():
            os.mkdir(name, 0o700, dir_fd=parent)
            stack = ExitStack()
            folder, _ = stack.enter_context(open_folder(name, parent, is_written=True))
            self._open.append((name, folder, member, stack))
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
                _write_file(archive, member, file.fileno())
                os.fchmod(file.fileno(), member.mode & _KEPT_MODE)
                os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))

    def _enter(self, parts: list[str]) -> int:
        """Return the folder of an entry, which must be one that is open: entries come as they are in the tree."""
        while [name for name, *_ in self._open] != parts[: len(self._open)]:
            self._leave()
        while len(self._open) > len(parts):
            self._leave()
        if len(self._open) != len(parts):
            raise BundleRefused("the bundle has entries out of their order")
        return self._open[-1][1] if self._open else self._root

    def _leave(self) -> None:
        _, folder, member, stack = self._open.pop()
        with stack:
            os.fchmod(folder, member.mode & _KEPT_MODE)
            mtime_ns = int(member.mtime * 1e9)
            os.utime(folder, ns=(mtime_ns, mtime_ns))

    def close(self) -> None:
        while self._open:
            self._leave()


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, file: int) -> None:
    content = archive.extractfile(member)
    if content is None or member.size > _MOST_FILE_BYTES:
        raise BundleRefused(f"the bundle has a file of {member.size:,} bytes")
    ranges = cast("list[tuple[int, int]]", member.sparse) if member.issparse() else [(0, member.size)]
    # Not through its buffer, which would ask the archive for its place: a stream has none.
    source = cast("Any", content).raw
    for start, length in ranges:
        source.seek(start)
        at, end = start, start + length
        while at < end:
            chunk = source.read(min(CHUNK_BYTES, end - at))
            if not chunk:
                raise BundleRefused("the bundle ends within a file")
            at += os.pwrite(file, chunk, at)
    os.ftruncate(file, member.size)


@contextmanager
def unpacking(place: Path) -> Generator[Path]:
    """Yield an empty folder for what is unpacked, and remove it unless the block has moved it away."""
    if place.exists():
        remove_tree(place)
    make_folder(place, way_mode())
    try:
        yield place
    finally:
        if place.exists():
            remove_tree(place)
