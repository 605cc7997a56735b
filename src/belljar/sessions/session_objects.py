"""What the store has of sessions: a folder of objects for every session that slept, numbered in order.

    sessions/ID/0000000007.owner       whoever makes it may go on from the latest bundle before it; made only once
    sessions/ID/0000000007.XX.bundle   what that server put when the session fell asleep again
    sessions/ID/0000000007.head        what is known of that bundle, which counts once this is there
    names/DIGEST/ID                    empty: the session has, or had, what its owner calls so

The object with the highest number says how things are: a head, that the session sleeps; an owner, that it is awake
there, or was until that server was lost, or that it was cleared. Everything blocking runs in threads of its own, so
that a slow store delays nobody else. Knows nothing of the sessions of this server.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote, urlsplit

from belljar.errors import SettingsError
from belljar.journal.journal import has_id_form
from belljar.sessions.bundles import BundleRefused, Sealer
from belljar.sessions.store import Store, StoredObject, StoreFailed, open_store
from belljar.settings import MEBIBYTE, Settings, variable

PUTS_AT_ONCE: Final = 4
"""How many bundles are put at once; the other threads are for whoever waits."""
SOON_S: Final = 20.0
MARK: Final = "belljar.json"
"""The object by which a server sees whether it has the store's key."""
_MOST_HEAD_BYTES: Final = 64 * MEBIBYTE
_MOST_SMALL_BYTES: Final = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may go on with a session: what is in an owner object."""

    directory: str
    """The id of its data directory."""
    run: str
    host: str
    at: float
    origin: int
    """The number of the bundle that it goes on from."""
    tag: str = ""
    end: str = ""
    """Why there is nothing to go on with: the session was cleared, or has expired."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a bundle without reading it."""

    principal: str
    environment: str
    slept_at: float
    end: str
    variables: tuple[str, ...]
    unkept: tuple[str, ...]
    executions: tuple[str, ...]
    runs: tuple[str, ...]
    identifiers: tuple[str, ...]
    bundle: str
    """The name of the bundle."""
    size_bytes: int
    """What that unpacks to."""
    keys: tuple[str, ...] = ()
    """Under which executions ran once."""

    def names(self) -> set[tuple[str, str]]:
        """Return what a call may name in place of the session: kinds, and values."""
        named = {"id": (*self.executions, *self.runs), "name": self.identifiers, "key": self.keys}
        return {(kind, value) for kind, values in named.items() for value in values}


@dataclass(frozen=True, slots=True)
class Standing:
    """How a session stands in the store: its latest numbers, 0 for none."""

    head: int = 0
    owner: int = 0
    objects: tuple[StoredObject, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """Return whether anybody may go on with it who makes the next owner object."""
        return self.head >= max(1, self.owner)

    @property
    def next(self) -> int:
        """Return the number of the next owner object."""
        return max(self.head, self.owner) + 1


class SessionObjects:
    """Reads and writes the objects of sessions in one store, sealed with its key."""

    def __init__(self, store: Store, sealer: Sealer) -> None:
        self.store = store
        self.sealer = sealer
        self._threads = ThreadPoolExecutor(PUTS_AT_ONCE + 4, thread_name_prefix="store")
        self._is_checked = False

    async def check(self) -> None:
        """Refuse a store that cannot be used, or that has another key."""
        if not self._is_checked:
            await self._soon(_check_key, self.store, self.sealer)
            self._is_checked = True

    async def standing(self, session_id: str) -> Standing:
        """Return how a session stands in the store."""
        await self.check()
        return await self._soon(self._read_standing, session_id)

    async def all(self) -> dict[str, Standing]:
        """Return how every session in the store stands."""
        await self.check()
        found: dict[str, list[StoredObject]] = {}
        for each in await self.in_thread(self.store.list, "sessions"):
            session_id = each.name.split("/")[1]
            if has_id_form(session_id):
                found.setdefault(session_id, []).append(each)
        return {session_id: _standing(objects) for session_id, objects in found.items()}

    async def owner(self, session_id: str, number: int) -> Owner:
        """Return what an owner object says."""
        return await self._soon(self._read_owner, session_id, number)

    async def make_owner(self, session_id: str, number: int, owner: Owner) -> bool:
        """Make an owner object; return False where somebody else has made it."""
        name = object_name(session_id, number, "owner")
        return await self._soon(self._put_owner, name, owner)

    async def delete_owner(self, session_id: str, number: int) -> None:
        """Delete an owner object that is ours, for others to make the next one."""
        await self._soon(self.store.delete, [object_name(session_id, number, "owner")])

    async def head(self, session_id: str, number: int) -> Head:
        """Return what is known of a bundle."""
        return await self._soon(self.read_head, session_id, number)

    async def put_head(self, session_id: str, number: int, head: Head) -> None:
        """Have a bundle count that is in the store."""
        name = object_name(session_id, number, "head")
        await self.in_thread(self._put_head, name, head)

    async def tidy(self, standing: Standing, number: int) -> None:
        """Delete what is older than an object that is there now: heads last, because whatever has one is looked for.

        `standing` is as it was before; a bundle of that number was then begun by a server that was killed.
        """
        old = [
            each.name
            for each in standing.objects
            if _number(each.name) < number or (_number(each.name) == number and each.name.endswith(".bundle"))
        ]
        await self.in_thread(self.store.delete, sorted(old, key=lambda name: (name.endswith(".head"), name)))

    async def session_of(self, principal: str, kind: str, value: str) -> str:
        """Return the session that has what its owner calls so, by its latest bundle; empty where none has."""
        await self.check()
        for each in await self._soon(self.store.list, f"names/{self.sealer.digest(principal, kind, value)}"):
            session_id = each.name.rpartition("/")[2]
            standing = await self.standing(session_id) if has_id_form(session_id) else Standing()
            head = await self.head(session_id, standing.head) if standing.head else None
            if head is not None and head.principal == principal and (kind, value) in head.names():
                return session_id
        return ""

    async def forget_names(self) -> None:
        """Delete the names of sessions of which nothing is in the store any more."""
        # Listed first, because a session has a bundle there before it has names.
        names = await self.in_thread(self.store.list, "names")
        sessions = await self.all()
        await self.in_thread(
            self.store.delete, [each.name for each in names if each.name.rpartition("/")[2] not in sessions]
        )

    async def in_thread(self, work: Callable[..., T], *values: Any) -> T:
        """Do what blocks, in a thread of the store's."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *values)

    async def _soon(self, work: Callable[..., T], *values: Any) -> T:
        """Do what is little work for a store that works."""
        try:
            async with asyncio.timeout(SOON_S):
                return await self.in_thread(work, *values)
        except TimeoutError as error:
            raise StoreFailed(f"the store {self.store.url} gives no answer in {SOON_S:g} s") from error

    def close(self) -> None:
        """End the threads, as far as they can be."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # In threads

    def put_names(self, session_id: str, head: Head, before: int) -> None:
        """Have a session be found by what is in a bundle and was not in the one of this number; blocks."""
        known = self.read_head(session_id, before).names() if before else set[tuple[str, str]]()
        for kind, value in head.names() - known:
            self.store.put(f"names/{self.sealer.digest(head.principal, kind, value)}/{session_id}", [])

    def read_head(self, session_id: str, number: int) -> Head:
        """Return what is known of a bundle; blocks, for whoever is in a thread."""
        values = self._values(object_name(session_id, number, "head"), _MOST_HEAD_BYTES)
        try:
            return Head(**values)
        except TypeError as error:
            raise _later(session_id) from error

    def _read_standing(self, session_id: str) -> Standing:
        return _standing(self.store.list(f"sessions/{session_id}"))

    def _read_owner(self, session_id: str, number: int) -> Owner:
        values = self._values(object_name(session_id, number, "owner"), _MOST_SMALL_BYTES)
        try:
            return Owner(**values)
        except TypeError as error:
            raise _later(session_id) from error

    def _values(self, name: str, most: int) -> dict[str, Any]:
        """Return the values of a small object, which was sealed, so a server of ours wrote it."""
        values: dict[str, Any] = json.loads(b"".join(self.sealer.open(name, self.store.read(name, most))[1]))
        tuples = {key: tuple(cast("list[str]", value)) for key, value in values.items() if isinstance(value, list)}
        return values | tuples

    def _put_owner(self, name: str, owner: Owner) -> bool:
        return self.store.put_new(name, b"".join(self.sealer.seal(name, [_as_json(owner)])))

    def _put_head(self, name: str, head: Head) -> None:
        self.store.put(name, self.sealer.seal(name, [_as_json(head)]))


def open_session_objects(settings: Settings) -> SessionObjects:
    """Return the objects of sessions in the store that the settings name."""
    return SessionObjects(*_sealed_store(settings))


def _sealed_store(settings: Settings) -> tuple[Store, Sealer]:
    if not settings.store_key.get_secret_value():
        raise SettingsError(
            f"store is {settings.store}, and there is no store_key to encrypt what is put there",
            hint=f"Set {variable('store_key')} for all servers of the store, to what `openssl rand -base64 32` prints",
        )
    place = Path(unquote(urlsplit(settings.store).path)).resolve() if settings.store.startswith("file:") else None
    for name, shown in settings.folders.items():
        folder = Path(shown.path).resolve()
        if place is not None and (place.is_relative_to(folder) or folder.is_relative_to(place)):
            raise SettingsError(
                f"store is {settings.store}, and folders.{name} shows {folder} to sessions",
                hint="Keep the store where no session sees it: put it, or that folder, elsewhere",
            )
    return open_store(settings.store), Sealer(settings.store_key.get_secret_value())


def _check_key(store: Store, sealer: Sealer) -> None:
    """Refuse a store of another key or a later version; the first server that looks leaves its mark there."""
    mark = b"".join(sealer.seal(MARK, [b"belljar"]))
    if not store.put_new(MARK, mark):
        b"".join(sealer.open(MARK, store.read(MARK, _MOST_SMALL_BYTES))[1])


def try_store(settings: Settings) -> str:
    """Write, claim twice, list, read and delete an object of the store; return how that went, or raise why it did not.

    Blocks.
    """
    store, sealer = _sealed_store(settings)
    _check_key(store, sealer)
    name, began = f"tried/{secrets.token_hex(8)}", time.monotonic()
    try:
        is_made, is_made_again = store.put_new(name, b"tried"), store.put_new(name, b"again")
        content = b"".join(store.read(name, _MOST_SMALL_BYTES))
        is_listed = name in {each.name for each in store.list("tried")}
    finally:
        store.delete([name])
    took_ms = 1000 * (time.monotonic() - began)
    if not is_made or is_made_again or content != b"tried":
        raise StoreFailed(
            f"the store {store.url} let an object be made twice, so two servers could wake one session",
            hint="Use a store with conditional writes: S3, Google Cloud Storage, Azure, or a folder",
        )
    if not is_listed:
        raise StoreFailed(f"the store {store.url} does not list what was just written to it")
    return f"{store.url}: written, claimed once of two, listed, read and deleted in {took_ms:.0f} ms"


def _later(session_id: str) -> BundleRefused:
    return BundleRefused(
        f"what the store has of session {session_id} is of a later belljar", hint="Upgrade belljar on this machine"
    )


def _as_json(value: Owner | Head) -> bytes:
    return json.dumps({name: getattr(value, name) for name in value.__slots__}).encode()


def object_name(session_id: str, number: int, kind: str) -> str:
    """Return the name of an object of a session in the store."""
    return f"sessions/{session_id}/{number:010}.{kind}"


def _number(name: str) -> int:
    digits = name.rpartition("/")[2].partition(".")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 18 else 0


def _standing(objects: list[StoredObject]) -> Standing:
    numbers = {
        kind: max((_number(each.name) for each in objects if each.name.endswith(kind)), default=0)
        for kind in (".head", ".owner")
    }
    return Standing(numbers[".head"], numbers[".owner"], tuple(objects))
