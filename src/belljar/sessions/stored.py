"""Sessions in the store: put there when they fall asleep, brought back when they are wanted, also by another server.

Decides who may go on with a session, by its objects in the store (`session_objects.py`) and by what the journal here
has of it (`journal/bundle_records.py`), and what is put, given up and deleted when.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from belljar import metrics
from belljar.errors import BelljarError, Busy, TooLarge
from belljar.files.fd_walk import remove_tree
from belljar.journal.bundle_records import BundleRecord, BundleRecords
from belljar.journal.journal import Journal, has_id_form
from belljar.logs import pseudonym
from belljar.models import iso
from belljar.servers import directory_id, is_living
from belljar.sessions.bundle_transfer import BundleTransfer
from belljar.sessions.bundles import Aborted
from belljar.sessions.session_objects import (
    PUTS_AT_ONCE,
    SOON_S,
    Owner,
    SessionObjects,
    Standing,
    open_session_objects,
)
from belljar.sessions.store import StoreFailed
from belljar.settings import Settings

RETRY_S: Final = 30.0
SWEEP_S: Final = 3600.0
_DAY_S: Final = 24 * 60 * 60
UNKNOWN_S: Final = 5.0
_MOST_UNKNOWN: Final = 10_000
_TRIES: Final = 5

T = TypeVar("T")
log = logging.getLogger(__name__)


class StoredSessions:
    """The sessions of one data directory in the store that its server shares with others."""

    def __init__(self, objects: SessionObjects, settings: Settings, folder: Path, journal: Journal, run: str) -> None:
        self.objects = objects
        self._settings = settings
        self._folder = folder
        self._runs = settings.data_directory / "runs"
        self._journal = journal
        self.records = BundleRecords(journal, run)
        self._run = run
        self.directory = directory_id(settings.data_directory)
        self._transfer = BundleTransfer(objects, folder, journal, run, settings.bundle_mb)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._puts: dict[str, _Put] = {}
        self._slots = asyncio.Semaphore(PUTS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._news = asyncio.Event()
        self._unknown: dict[tuple[str, str], float] = {}
        self._too_large: dict[str, float] = {}
        """Sessions that are too large to be put, and when they fell asleep."""
        self._swept_at = -SWEEP_S
        self.problem = ""
        """Why the store could not be used the last time; empty when it could."""
        self.on_gone: Callable[[str, str], None] = lambda _session_id, _principal: None
        """Called when a session that slept here turns out to go on elsewhere, or to be over."""

    # For whoever wants a session

    async def bring(
        self,
        session_id: str,
        principal: str,
        make_room: Callable[[], Awaitable[None]],
        *,
        after_loss: bool = False,
    ) -> Standing | None:
        """See that a sleeping session of the caller's can be woken here: that it is ours, and that its bundle is here.

        Nothing happens where it is awake here, unknown, or another's: the registry says so. With `after_loss` it goes
        on from its latest bundle although a server had it awake since, which its caller has told before. `make_room` is
        called before it becomes ours. Returns how it stood, if the store was asked.
        """
        if not has_id_form(session_id):
            return None
        # Not cancelled with its caller, because a session that is half brought is nobody's.
        work = self._bring(session_id, principal, make_room, after_loss=after_loss)
        try:
            return await asyncio.shield(self._spawn(work))
        except StoreFailed as error:
            log.warning("session %s cannot be brought from the store: %s", session_id, error)
            raise Busy(
                f"whether session {session_id} may go on here is asked of the store, which cannot be used now",
                hint="Make the same call again in 30 seconds; the server's operator finds the reason in its log",
            ) from error

    async def _bring(
        self, session_id: str, principal: str, make_room: Callable[[], Awaitable[None]], *, after_loss: bool
    ) -> Standing | None:
        async with self._turns.setdefault(session_id, asyncio.Lock()):
            found = self.records.find(session_id)
            if found is not None and (found.principal != principal or found.state == "live"):
                return None
            if found is not None and found.state == "gone" and found.is_pending:
                return None  # it is over, and the store hears of it as soon as it can
            if found is not None and found.state == "asleep":
                await self._stop_putting(session_id)
                self._too_large.pop(session_id, None)
                found = self.records.find(session_id)
                if found is None or (found.state == "asleep" and found.is_free):
                    return None
            if found is None and self._is_known_unknown(session_id, principal):
                return None
            standing = await self.objects.standing(session_id)
            if found is not None and found.owned < 0:
                found = self._settled(session_id, found, standing)
                if found.is_free:
                    return standing
            if not standing.next > 1:
                return self._nothing_stored(session_id, principal, found, standing)
            if standing.owner > standing.head and await self._ends(session_id, found, standing):
                return standing
            if found is None or found.bundle != standing.head:
                head = await self.objects.head(session_id, standing.head) if standing.head else None
                if head is None or head.principal != principal:
                    self._note_unknown(session_id, principal)
                    return None
            await make_room()
            origin, owned = await self._claim(session_id, standing, after_loss=after_loss)
            try:
                await self._take(session_id, principal, found, origin, owned)
            except BelljarError:
                with suppress(StoreFailed):  # for others to try
                    await self.objects.delete_owner(session_id, owned)
                raise
            return standing

    def _nothing_stored(
        self, session_id: str, principal: str, found: BundleRecord | None, standing: Standing
    ) -> Standing:
        """Go on with what is here of a session of which the store has nothing any more."""
        if found is None or found.state != "asleep":
            self._note_unknown(session_id, principal)
        else:
            log.warning("session %s is not in the store any more, and goes on from what is here of it", session_id)
            self.records.change(session_id, found, bundle=0, owned=0)
        return standing

    async def _ends(self, session_id: str, found: BundleRecord | None, standing: Standing) -> bool:
        """Return whether a session is over, and record here that it is."""
        owner = await self.objects.owner(session_id, standing.owner)
        if (
            owner.end
            and found is not None
            and found.state == "asleep"
            and self.records.end(session_id, found, owner.end)
        ):
            self.on_gone(session_id, found.principal)
            await asyncio.to_thread(remove_tree, self._folder / session_id)
        return bool(owner.end)

    async def _claim(self, session_id: str, standing: Standing, *, after_loss: bool) -> tuple[int, int]:
        """Make the next owner object, or find that it is ours; return the bundle it goes on from, and its number."""
        for _ in range(_TRIES):
            if standing.owner > standing.head:
                owner = await self.objects.owner(session_id, standing.owner)
                if owner.directory == self.directory and not self._is_anothers(owner.run):
                    return standing.head, standing.owner  # this server, or one before it, was stopped after it made it
                if not after_loss:
                    raise Busy(
                        f"session {session_id} is open at another server ({owner.host}, since {iso(owner.at)})",
                        hint="Use it there; once it sleeps, any server of the store wakes it",
                    )
            number = standing.next
            is_made = await self.objects.make_owner(session_id, number, self._own(standing.head))
            now = await self.objects.standing(session_id)
            # Looked at again, because whoever had it meanwhile may have put it and tidied away what we would have seen.
            if is_made and (now.head, now.owner) == (standing.head, number):
                return standing.head, number
            if is_made:
                await self.objects.delete_owner(session_id, number)
            standing = now
            if not standing.head:
                break
        raise Busy(
            f"session {session_id} is being woken by another server", hint="Make the same call again in 5 seconds"
        )

    async def _take(self, session_id: str, principal: str, found: BundleRecord | None, origin: int, owned: int) -> None:
        """Have a session that is ours sleep here, from the folder if that is its bundle, else from the store."""
        is_cached = found is not None and found.state == "asleep" and found.bundle == origin
        if is_cached and found is not None and (self._folder / session_id).is_dir():
            if not self.records.change(session_id, found, bundle=origin, owned=owned):
                raise Busy(f"session {session_id} changes", hint="Make the same call again")
            return
        await self.objects.in_thread(self._transfer.fetch, session_id, principal, origin, owned)
        metrics.bundles.add("fetched")
        ids = {"session_id": session_id, "principal": pseudonym(principal)}
        log.info("session %s is brought from the store, as of bundle %d", session_id, origin, extra=ids)

    async def keep(self, session_id: str) -> bool:
        """Have a session that sleeps in the store here as well, for lists and for a quick wake; claim nothing.

        Return False where there is none, or where what is here is as new.
        """
        async with self._turns.setdefault(session_id, asyncio.Lock()):
            standing, found = await self.objects.standing(session_id), self.records.find(session_id)
            is_kept = found is not None and (found.state == "live" or found.is_pending or found.bundle == standing.head)
            if not standing.is_asleep or is_kept:
                return False
            head = await self.objects.head(session_id, standing.head)
            await self.objects.in_thread(self._transfer.fetch, session_id, head.principal, standing.head, 0)
            return True

    def is_free(self, session_id: str) -> bool:
        """Return whether a session that sleeps here may be woken without asking the store."""
        found = self.records.find(session_id)
        return found is None or found.is_free

    # For sessions that sleep

    def put_later(self) -> None:
        """Put what sleeps here and is not in the store yet, and tell it of what is over."""
        self._news.set()

    def waiting(self) -> dict[str, int]:
        """Return how many sessions are here alone, by the reason."""
        pending = self._own_pending()
        large = sum(session_id in self._too_large for session_id in pending)
        reason = "failing" if self.problem else "queued"
        return {"queued": 0, "failing": 0, "too_large": large} | {reason: len(pending) - large}

    async def run(self) -> None:
        """Put what waits whenever there is news, and again after a while where it could not be put."""
        self._transfer.remove_half_brought(self._is_anothers)
        while True:
            self._news.clear()
            is_done = False
            try:
                is_done = await self.put_all()
                if time.monotonic() > self._swept_at + SWEEP_S:
                    self._swept_at = time.monotonic()
                    await self.sweep()
            except BelljarError as error:
                self._note_problem(error)
            except Exception:
                # What is wrong at one moment must not keep sessions from being put later.
                log.exception("the store could not be looked after")
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S if is_done else RETRY_S):
                    await self._news.wait()

    async def sweep(self) -> None:
        """Delete from the store what nobody used for `keep_days`, and what is left of sessions that are over.

        By the store's own clock: what was written last is of now.
        """
        standings = await self.objects.all()
        newest = {session_id: max(each.at for each in one.objects) for session_id, one in standings.items()}
        before = max(newest.values(), default=0.0) - self._settings.keep_days * _DAY_S
        for session_id, standing in standings.items():
            if newest[session_id] >= before:
                continue
            if standing.is_asleep:
                expired = self._own(end="expired")
                if await self.objects.make_owner(session_id, standing.next, expired):
                    await self.objects.tidy(standing, standing.next)
            elif not standing.head:  # what is left is of a session that is over, or of one that was never put whole
                await self.objects.tidy(standing, 1 << 62)
        await self.objects.forget_names()

    def _own(self, origin: int = 0, end: str = "") -> Owner:
        host, tag = socket.gethostname(), self._journal.tag
        return Owner(self.directory, self._run, host, time.time(), origin, tag, end)

    async def put_all(self) -> bool:
        """Put everything that waits, some at once; return False where something has to be tried again."""
        pending = [each for each in self._own_pending() if each not in self._too_large]
        if not pending:
            return True
        try:
            await self.objects.check()
        except BelljarError as error:
            self._note_problem(error)
            return False
        done = await asyncio.gather(*(self.put(each) for each in pending))
        return all(done)

    async def put(self, session_id: str) -> bool:
        """Put one session that sleeps here; return False where that has to be tried again."""
        if (running := self._puts.get(session_id)) is None:
            running = self._puts[session_id] = _Put()
        if running.task is None:
            running.task = self._spawn(self._put_safely(session_id, running))
        return await asyncio.shield(running.task)

    async def _stop_putting(self, session_id: str) -> None:
        """See that a session is put no more, or wait until its head is."""
        running = self._puts.get(session_id)
        if running is not None and running.is_past_stopping and running.task is not None:
            await asyncio.wait([running.task])
        elif running is not None:
            # What it has of the bundle counts for nothing, so there is no need to wait for a slow store.
            running.is_wanted = True
            del self._puts[session_id]

    async def _put_safely(self, session_id: str, running: "_Put") -> bool:
        async with self._slots:
            try:
                await self.objects.check()
                await self._put(session_id, running)
            except Aborted:
                return True
            except TooLarge as error:
                self._too_large[session_id] = time.time()
                hint = "bundle_mb is the limit" if "bytes" in error.message else ""
                log.warning("session %s sleeps here only: %s. %s", session_id, error.message, hint)
                metrics.bundles.add("too_large")
            except BelljarError as error:
                self._note_problem(error)
                return False
            except Exception:
                # What is wrong with one session must not keep the others from being put.
                log.exception("session %s could not be put into the store", session_id)
                return False
            else:
                self._note_no_problem()
            finally:
                if self._puts.get(session_id) is running:
                    del self._puts[session_id]
            return True

    async def _put(self, session_id: str, running: "_Put") -> None:
        self._journal.commit()
        found = self.records.find(session_id)
        if found is None or not found.is_pending or running.is_wanted:
            return
        standing = await self.objects.standing(session_id)
        if found.state == "gone":
            await self._delete(session_id, found, standing)
            return
        if found.owned < 0:
            found = self._settled(session_id, found, standing)
            if not found.is_pending:
                return
        if found.bundle < 0 and standing.is_asleep and standing.head == -found.bundle:
            found = await self._own_again(session_id, found, standing)
        number = found.owned or 1
        if found.bundle < 0 or standing.owner > found.owned or standing.head >= number:
            await self._part(session_id, found, standing)
            return
        head = await self.objects.in_thread(
            self._transfer.put, session_id, number, standing.head, lambda: running.is_wanted
        )
        if running.is_wanted or not self.records.change(session_id, found, bundle=found.bundle, owned=-number):
            raise Aborted("the session is wanted")
        running.is_past_stopping = True  # with no pause since the change, so nobody has found it stoppable
        await self.objects.put_head(session_id, number, head)
        self.records.change(session_id, found._replace(owned=-number), bundle=number, owned=0)
        metrics.bundles.add("put")
        log.info("session %s is in the store, as bundle %d", session_id, number, extra={"session_id": session_id})
        await self.objects.tidy(standing, number)

    async def _own_again(self, session_id: str, found: BundleRecord, standing: Standing) -> BundleRecord:
        """Own a session that went on here while the settings named no store, and that nobody else has used since."""
        origin, owned = await self._claim(session_id, standing, after_loss=False)
        if not self.records.change(session_id, found, bundle=origin, owned=owned):
            raise Aborted("the session is wanted")
        return found._replace(bundle=origin, owned=owned)

    async def _part(self, session_id: str, found: BundleRecord, standing: Standing) -> None:
        """Give up what is here of a session that goes on elsewhere, or is over there."""
        where = "in the store"
        if standing.owner > standing.head:
            owner = await self.objects.owner(session_id, standing.owner)
            where = f"at {owner.host}"
            if owner.end:
                where = ""
        end = f"goes on {where}: what was here since is not in it" if where else "was ended at another server"
        if self.records.end(session_id, found, end):
            log.warning("session %s %s", session_id, end, extra={"session_id": session_id})
            self.on_gone(session_id, found.principal)
            await asyncio.to_thread(remove_tree, self._folder / session_id)

    async def _delete(self, session_id: str, found: BundleRecord, standing: Standing) -> None:
        """Delete a session from the store that is over here, unless it goes on elsewhere."""
        owned = abs(found.owned)
        is_ours = owned > 0 and standing.owner <= owned
        if standing.next > 1 and (is_ours or (standing.is_asleep and standing.head == abs(found.bundle))):
            number = standing.next
            if not await self.objects.make_owner(session_id, number, self._own(end=found.end)):
                return  # somebody goes on with it at this moment
            await self.objects.tidy(standing, number)
        self.records.change(session_id, found, bundle=0, owned=0)

    def _settled(self, session_id: str, found: BundleRecord, standing: Standing) -> BundleRecord:
        """Return what is so of a session whose head was being put when its server ended."""
        number = -found.owned
        is_put = standing.head >= number
        settled = found._replace(
            bundle=number if is_put else found.bundle, owned=0 if is_put or not found.bundle else number
        )
        self.records.change(session_id, found, bundle=settled.bundle, owned=settled.owned)
        return settled

    # Around it

    async def settle(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop what is under way, as far as it can be, and end the threads."""
        for running in self._puts.values():
            running.is_wanted = True
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await self.settle()
        self.objects.close()

    def _note_problem(self, error: BelljarError) -> None:
        if error.message != self.problem:
            log.warning("%s; sessions sleep on this disk meanwhile, and are put later", error)
        self.problem = error.message
        metrics.bundles.add("failed")

    def _note_no_problem(self) -> None:
        if self.problem:
            log.warning("the store %s can be used again", self.objects.store.url)
        self.problem = ""

    def _own_pending(self) -> list[str]:
        """Return the sessions here that wait for the store, but for those that another server of this folder has."""
        return [session_id for session_id, run in self.records.pending() if not self._is_anothers(run)]

    def _is_anothers(self, run: str) -> bool:
        return run != self._run and is_living(self._runs, run)

    def _is_known_unknown(self, session_id: str, principal: str) -> bool:
        return self._unknown.get((session_id, principal), 0.0) > time.monotonic()

    def _note_unknown(self, session_id: str, principal: str) -> None:
        """Remember for a moment what the caller asked for in vain, so that guesses cost the store little."""
        if len(self._unknown) >= _MOST_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]
        self._unknown[session_id, principal] = time.monotonic() + UNKNOWN_S

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone, and then asyncio would log it


def open_stored(settings: Settings, folder: Path, journal: Journal, run: str) -> StoredSessions:
    """Return the sessions of a data directory in the store that the settings name; `run` is the server's name."""
    return StoredSessions(open_session_objects(settings), settings, folder, journal, run)


class _Put:
    """One session on its way into the store."""

    def __init__(self) -> None:
        self.task: asyncio.Task[bool] | None = None
        self.is_wanted = False
        """Set when somebody wants to wake it; read by the thread that packs it."""
        self.is_past_stopping = False
