"""Several servers as one engine: lists are merged, a call goes to the server that has what it names.

What is on disk only, any of them can answer. Who has something is asked of all side by side, so that one that is frozen
costs one wait and no sum of them, and is remembered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import JsonValue

from belljar.engine.contract import (
    USUAL_MAP,
    Access,
    CalledEngine,
    Engine,
    MapOptions,
    SessionFilter,
    time_cursor,
    time_place,
)
from belljar.engine.models import (
    ConsoleLink,
    EntryPage,
    Followed,
    FoundPage,
    Health,
    LiveSession,
    Piece,
    Server,
    ServerEvent,
    SessionEntry,
    SessionPage,
    UsageHistory,
)
from belljar.engine.remote import RemoteEngine, ServerGone, ServerSilent
from belljar.engine.runs import RunEntry
from belljar.engine.usage import LATENCY
from belljar.errors import (
    BelljarError,
    EngineError,
    ExecutionNotFound,
    QuestionClosed,
    QuestionNotFound,
    RunNotFound,
    SessionNotFound,
)
from belljar.models import MappedResult
from belljar.questions.models import InboxQuestion
from belljar.servers import http_sockets

_T = TypeVar("_T")
_LOOK_S: Final = 2.0
_WAIT_S: Final = 3.0
"""How long others are waited for once one server has answered."""
_ORDER_S: Final = 1.0
"""How long those before it are waited for once one server has what is meant."""
_MOST_HELD: Final = 10_000
_ABSENCES: Final = (SessionNotFound, ExecutionNotFound, RunNotFound)
_TELLING: Final = (ServerGone, QuestionNotFound, (*_ABSENCES, QuestionClosed), ServerSilent)
"""Of errors of several servers, a later one says more, and one that is none of these most."""
Places = Callable[[], Awaitable[dict[str, Engine]]]
"""Returns the servers that there are now, by their names."""


def servers_of(data_directory: Path, patience_s: float | None = None) -> "ManyEngine":
    """Return the engine of all servers of this user that use a data directory.

    One that is silent for `patience_s` counts as gone; without, a call waits for as long as its server takes.
    """

    def find() -> dict[str, Engine]:
        return {path.parent.name: RemoteEngine(path, patience_s) for path in http_sockets(data_directory)}

    return ManyEngine(lambda: asyncio.to_thread(find))


class ManyEngine(CalledEngine):
    """An `Engine` of every server among `places`."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._held: OrderedDict[str, str] = OrderedDict()
        """Which server had what has this id; for what names nothing, which one answered."""

    async def _all(self, verb: str, access: Access, **arguments: Any) -> list[tuple[str, Any]]:
        """Return the answers of all servers that answer, by the names of the servers."""
        answers, errors = await _side_by_side(
            await self._places(), lambda engine: getattr(engine, verb)(access, **arguments), takes_all=True
        )
        if not answers:
            raise _what_says_most(errors)
        return [*answers.items()]

    async def _holders(self, access: Access, arguments: Mapping[str, Any]) -> AsyncGenerator[Engine]:
        """Yield the server that had the session, the execution or the run that is named, and then the one that has it.

        Where nothing is named, the first that answers; the same where what is named is only on disk, because of two
        callers that wake a session at two servers one would be refused.
        """
        places = await self._places()
        if len(places) == 1:
            yield next(iter(places.values()))
            return
        if (held := self._held.get(named := _named(arguments), "")) in places:
            yield places[held]

        async def has(engine: Engine) -> None:
            if arguments.get("session_id"):
                await engine.session(access, named)
            elif arguments.get("execution_id"):
                await engine.execution(access, named)
            elif arguments.get("run_id"):
                await engine.run(access, named, limit=1)
            else:
                await engine.usage(access)

        answers, errors = await _side_by_side(places, has, takes_all=False)
        name = next(iter(answers), "")
        if not name:
            raise _what_says_most(errors)
        self._held[named] = name
        if len(self._held) > _MOST_HELD:
            self._held.popitem(last=False)
        yield places[name]

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        """Call the server that has what is named."""
        errors: list[BelljarError] = []
        async with aclosing(self._holders(access, arguments)) as engines:
            async for engine in engines:
                try:
                    return await getattr(engine, verb)(access, **arguments)
                except (*_ABSENCES, ServerGone) as error:
                    self._forget(arguments, error)
                    errors.append(error)
        raise _what_says_most(errors)

    async def _stream(self, verb: str, access: Access, **arguments: Any) -> AsyncGenerator[Any]:
        """Yield what the server tells that has what is named."""
        errors: list[BelljarError] = []
        async with aclosing(self._holders(access, arguments)) as engines:
            async for engine in engines:
                has_begun = False
                try:
                    async with aclosing(getattr(engine, verb)(access, **arguments)) as told:
                        async for item in told:
                            has_begun = True
                            yield item
                except (*_ABSENCES, ServerGone) as error:
                    self._forget(arguments, error)
                    if has_begun:
                        raise
                    errors.append(error)
                else:
                    return
        raise _what_says_most(errors)

    def _forget(self, arguments: Mapping[str, Any], error: BelljarError) -> None:
        """Ask all again who has what is named; raise where a server may be doing what it was asked."""
        self._held.pop(_named(arguments), None)
        if isinstance(error, ServerSilent):
            raise error

    # What is put together

    async def health(self, access: Access) -> Health:
        """See `Engine`. Of several servers the checks have the name of each before them."""
        answers: list[tuple[str, Health]] = await self._all("health", access)
        checks = {f"{name} {check}": state for name, health in answers for check, state in health.checks.items()}
        gauges: dict[str, float] = {}
        for _, health in answers:
            for gauge, value in health.gauges.items():
                gauges[gauge] = gauges.get(gauge, 0) + value
        own = [server for name, health in answers for server in health.servers if server.name == name]
        silent = [name for name in await self._places() if name not in dict(answers)]
        others = [Server(name=name, pid=_pid(name), sessions=0, is_answering=False) for name in silent]
        is_ready = all(health.status == "ready" for _, health in answers)
        return Health(
            status="ready" if is_ready else "not ready",
            checks=checks,
            gauges=gauges,
            limits=answers[0][1].limits,
            version=answers[0][1].version,
            servers=[*own, *others],
        )

    async def servers(self, access: Access) -> list[Server]:
        """See `Engine`."""
        return (await self.health(access)).servers

    async def live_sessions(self, access: Access, *, asleep: bool = False) -> list[LiveSession]:
        """See `Engine`. Those that sleep are told by every server."""
        answers: list[tuple[str, list[LiveSession]]] = await self._all("live_sessions", access, asleep=asleep)
        return [*{session.session_id: session for _, sessions in answers for session in sessions}.values()]

    async def console_link(self, access: Access) -> ConsoleLink:
        """See `Engine`. The first server that has a console gives it."""
        answers: list[tuple[str, ConsoleLink]] = await self._all("console_link", access)
        return next((link for _, link in answers if link.url), ConsoleLink())

    async def usage(self, access: Access) -> UsageHistory:
        """See `Engine`. What servers of later start have not measured counts as nothing."""
        answers: list[tuple[str, UsageHistory]] = await self._all("usage", access)
        names = {name: None for _, usage in answers for name in usage.gauges}
        sums = {
            name: _together([usage.gauges.get(name, []) for _, usage in answers], max if name == LATENCY else sum)
            for name in names
        }
        return UsageHistory(interval_s=answers[0][1].interval_s, gauges=sums)

    async def sessions(self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50) -> SessionPage:
        """See `Engine`. A cursor is a place in time and an id, so it means the same to every server."""
        pages: list[tuple[str, SessionPage]] = await self._all(
            "sessions", access, wanted=wanted, cursor=cursor, limit=limit
        )
        if len(pages) == 1:
            return pages[0][1]
        # Those that sleep are told by every server.
        entries = {entry.session_id: entry for _, page in pages for entry in page.items}
        ordered = sorted(((_place(entry), entry) for entry in entries.values()), key=itemgetter(0), reverse=True)
        # Before the end of its page a server may have more, between those that another one told.
        ends = [time_place(page.next) for _, page in pages if page.next]
        told = [entry for place, entry in ordered if not ends or place >= max(ends)]
        end = _place(told[limit - 1]) if len(told) > limit else max(ends, default=None)
        after = ",".join(page.after for _, page in pages)
        return SessionPage(items=told[:limit], next=time_cursor(*end) if end else None, after=after)

    async def search(self, access: Access, text: str, cursor: str = "", limit: int = 50) -> FoundPage:
        """See `Engine`. What sleeps is told by every server of one journal, and all of them read on in one index."""
        pages: list[tuple[str, FoundPage]] = await self._all("search", access, text=text, cursor=cursor, limit=limit)
        entries = {entry.execution_id: entry for _, page in pages for entry in page.items}
        ordered = sorted(((time_place(entry.cursor), entry) for entry in entries.values()), key=itemgetter(0))[::-1]
        ends = [time_place(page.next) for _, page in pages if page.next]  # as with sessions
        told = [entry for place, entry in ordered if not ends or place >= max(ends)]
        end = time_place(told[limit - 1].cursor) if len(told) > limit else max(ends, default=None)
        unread = max(page.unread for _, page in pages)
        return FoundPage(items=told[:limit], next=time_cursor(*end) if end else None, unread=unread)

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """See `Engine`."""
        answers = await self._all("questions", access, state=state)
        found: dict[str, InboxQuestion] = {one.id: one for _, answer in answers for one in answer}
        return [*found.values()]

    async def runs(
        self, access: Access, state: str = "", text: str = "", cursor: str = "", limit: int = 50
    ) -> EntryPage[RunEntry]:
        """See `Engine`. Those of one journal are told by all of its servers."""
        pages: list[tuple[str, EntryPage[RunEntry]]] = await self._all(
            "runs", access, state=state, text=text, cursor=cursor, limit=limit
        )
        entries = {entry.run_id: entry for _, page in pages for entry in page.items}
        ordered = sorted(((time_place(entry.cursor), entry) for entry in entries.values()), key=itemgetter(0))[::-1]
        ends = [time_place(page.next) for _, page in pages if page.next]  # as with sessions
        told = [entry for place, entry in ordered if not ends or place >= max(ends)]
        end = time_place(told[limit - 1].cursor) if len(told) > limit else max(ends, default=None)
        return EntryPage(items=told[:limit], next=time_cursor(*end) if end else None)

    # What happens

    async def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """See `Engine`. A place has the place of every server in it; servers that start later join, from the start."""
        places: dict[str, str] = {}
        for part in after.split(","):
            name, _, number = part.rpartition(":")
            places |= {name: number} if name else {}
        queue: asyncio.Queue[ServerEvent] = asyncio.Queue(1_000)
        listening: dict[str, asyncio.Task[None]] = {}

        async def listen(engine: Engine, place: str) -> None:
            with suppress(ServerGone):
                async for item in engine.server_events(access, place):
                    await queue.put(item)

        async def look() -> None:
            is_from_now = not after
            while True:
                for name, engine in (await self._places()).items():
                    if name not in listening or listening[name].done():
                        place = "" if is_from_now else f"{name}:{places.get(name, '0')}"
                        listening[name] = asyncio.ensure_future(listen(engine, place))
                is_from_now = False
                await asyncio.sleep(_LOOK_S)

        looking = asyncio.ensure_future(look())
        try:
            while True:
                item = await queue.get()
                name, _, number = item.id.rpartition(":")
                places[name] = number
                place = ",".join(f"{one}:{at}" for one, at in places.items())
                yield item.model_copy(update={"id": place})
        finally:
            tasks = [looking, *listening.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Engine`. Ends when the session's server goes; a reader that comes back finds the next one."""
        named, errors = {"session_id": session_id}, list[BelljarError]()
        async with aclosing(self._holders(access, named)) as engines:
            async for engine in engines:
                try:
                    async for item in engine.follow(access, session_id, after):
                        after = item.id or after
                        yield item
                except (SessionNotFound, ServerGone) as error:
                    self._forget(named, error)
                    errors.append(error)
                else:
                    return
        raise _what_says_most(errors)

    # Acting

    async def map(
        self,
        access: Access,
        pieces: Sequence[Piece],
        session_id: str = "",
        options: MapOptions = USUAL_MAP,
    ) -> AsyncGenerator[MappedResult]:
        """See `Engine`. Forks stay with the server of their session, and keys with the first; the rest is shared."""
        # Those that answer get pieces: whoever is frozen would keep theirs.
        stays = bool(session_id) or any(piece.key for piece in pieces)
        answering = dict([] if stays else await self._all("usage", access))
        places = [engine for name, engine in (await self._places()).items() if name in answering]
        if min(len(places), len(pieces), options.at_once) < 2:
            told = self._stream("map", access, pieces=pieces, session_id=session_id, options=options)
        else:
            told = _shared(places[: options.at_once], access, pieces, options)
        async with aclosing(told) as results:
            async for result in results:
                yield result

    async def answer(
        self,
        access: Access,
        question_id: str,
        action: Literal["accept", "decline"],
        values: dict[str, JsonValue],
        *,
        edited: str = "",
        said: str = "",
    ) -> InboxQuestion:
        """See `Engine`."""
        # All are asked, because only the one that has put the question takes the answer: the others do not know it, or
        # say, from the journal, that another one waits for it.
        answers, errors = await _side_by_side(
            await self._places(),
            lambda engine: engine.answer(access, question_id, action, values, edited=edited, said=said),
            takes_all=False,
        )
        for question in answers.values():
            return question
        raise _what_says_most(errors)

    async def note_presence(self, access: Access) -> None:
        """See `Engine`."""
        await self._all("note_presence", access)


async def _shared(
    places: Sequence[Engine],
    access: Access,
    pieces: Sequence[Piece],
    options: MapOptions,
) -> AsyncGenerator[MappedResult]:
    """Yield the results of a map whose pieces are shared among servers, as many for each.

    Those of a server that is lost, and no others, are told as lost, or run at the next one if the options say so.
    """
    count, at_once = len(places), options.at_once
    results: asyncio.Queue[MappedResult | Exception] = asyncio.Queue(at_once)

    async def follow(number: int) -> None:
        # What does not divide evenly goes to the first ones.
        its_options = replace(options, at_once=at_once // count + (number < at_once % count), in_order=False)
        untold = dict.fromkeys(range(number, len(pieces), count))
        try:
            for place in [*places[number:], *places[:number]][: count if options.retries_lost else 1]:
                indices = [*untold]
                with suppress(ServerGone):
                    own = [pieces[index] for index in indices]
                    async with aclosing(place.map(access, own, options=its_options)) as told:
                        async for result in told:
                            index = indices[result.index]
                            del untold[index]
                            await results.put(result.model_copy(update={"index": index}))
                if not untold:
                    return
            for index in untold:
                await results.put(MappedResult.of_lost("the server that had it is gone; it may have run there", index))
        except Exception as error:  # noqa: BLE001 - it is raised where the results are read
            await results.put(error)

    tasks = [asyncio.ensure_future(follow(number)) for number in range(count)]
    waiting: dict[int, MappedResult] = {}
    following = 0
    try:
        for _ in pieces:
            result = await results.get()
            if isinstance(result, Exception):
                raise result
            if not options.in_order:
                yield result
                continue
            waiting[result.index] = result
            while following in waiting:
                yield waiting.pop(following)
                following += 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _named(arguments: Mapping[str, Any]) -> str:
    return next((arguments[name] for name in ("session_id", "execution_id", "run_id") if arguments.get(name)), "")


async def _side_by_side(
    places: Mapping[str, Engine], ask: Callable[[Engine], Awaitable[_T]], *, takes_all: bool
) -> tuple[dict[str, _T], list[BaseException]]:
    """Ask servers all at once; return their answers by their names, in order, and what the others raised.

    Unless it `takes_all` answers, it ends with the first in order. Who is much later than another counts as silent.
    """
    asked = {name: asyncio.ensure_future(ask(engine)) for name, engine in places.items()}
    pending, now, end = {*asked.values()}, asyncio.get_running_loop().time, float("inf")
    try:
        while pending and (end == float("inf") or now() < end):
            left = None if end == float("inf") else end - now()
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                is_first = not takes_all and task.exception() is None
                if not isinstance(task.exception(), ServerGone):
                    end = min(end, now() + (_ORDER_S if is_first else _WAIT_S))
            first = next((one for one in asked.values() if one in pending or one.exception() is None), None)
            if not takes_all and first is not None and first not in pending:
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    ended = {name: task for name, task in asked.items() if task not in pending}
    errors = [error for task in ended.values() if (error := task.exception()) is not None]
    if pending:
        fact = f"{len(pending)} of {len(asked)} servers did not answer in time"
        errors.append(ServerSilent(fact, hint="They may have what was asked for: try again in a few seconds"))
    return {name: task.result() for name, task in ended.items() if task.exception() is None}, errors


def _what_says_most(errors: Iterable[BaseException]) -> BaseException:
    """Return what to tell who gets no answer: that a server may have what is meant, before that others have not."""

    def rank(error: BaseException) -> int:
        return max((number for number, kind in enumerate(_TELLING) if isinstance(error, kind)), default=len(_TELLING))

    found = max(errors, key=rank, default=None)
    return found if found is not None and rank(found) else _nobody()


def _nobody() -> EngineError:
    return EngineError("no running server answers", hint="Start one with `belljar serve`")


def _together(series: list[list[float]], how: Callable[[tuple[float, ...]], float]) -> list[float]:
    """Return the sums, or the largest, of values that all end now."""
    ends = zip_longest(*(reversed(values) for values in series), fillvalue=0.0)
    return [round(how(values), 3) for values in ends][::-1]


def _pid(name: str) -> int:
    number = name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _place(entry: SessionEntry) -> tuple[float, str]:
    if entry.cursor:
        return time_place(entry.cursor)
    return datetime.fromisoformat(entry.created_at).timestamp(), entry.session_id  # of a server of an earlier version
