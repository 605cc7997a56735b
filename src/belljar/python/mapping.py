"""A map as Python code makes one: pieces of code become one request to an engine, or calls of tools for each.

The latter is for a server that is reached by MCP alone: to fork, to run and to end are three calls. Where its HTTP API
can be used, the server does all of it, and keeps what has a key.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Final

from belljar.engine.contract import MAX_PIECES, Access, Engine, MapOptions
from belljar.engine.models import Piece
from belljar.errors import BelljarError, EngineError, InvalidArgument
from belljar.models import MappedResult
from belljar.python.execution_handle import CALLER

_KEY_BYTES: Final = 250
_MOST_MAP_CHARS: Final = 16 * 1024 * 1024


async def mapped(
    engine: Engine,
    codes: Iterable[str],
    keys: Iterable[str] | None,
    options: MapOptions,
    session_id: str = "",
) -> AsyncGenerator[MappedResult]:
    """Yield the results of a map; one of more pieces than an engine takes is several, one after the other."""
    if isinstance(codes, str):
        raise InvalidArgument("codes is one string", hint="Pass a list of them")
    given = [*codes]
    named = [*keys] if keys is not None else [""] * len(given)
    if len(named) != len(given):
        raise InvalidArgument(f"there are {len(named)} keys for {len(given)} codes", hint="Pass one for each")
    pieces = [Piece(code=code, key=key) for code, key in zip(given, named, strict=True)]
    first = 0
    while first < len(pieces):
        size, last = 0, first
        while last < len(pieces) and last - first < MAX_PIECES:
            size += 2 * len(pieces[last].code) + _KEY_BYTES
            if size > _MOST_MAP_CHARS and last > first:
                break
            last += 1
        told = engine.map(CALLER, pieces[first:last], session_id, options)
        missing = last - first
        async with aclosing(told) as results:
            async for result in results:
                missing -= 1
                yield result.model_copy(update={"index": result.index + first}) if first else result
        if missing:
            raise EngineError(
                f"the server ended the map before {missing} of its results were told",
                hint="Make it again: with the same keys, nothing runs twice",
            )
        first = last


async def map_by_calls(
    engine: Engine,
    access: Access,
    pieces: Sequence[Piece],
    session_id: str,
    options: MapOptions,
) -> AsyncGenerator[MappedResult]:
    """Yield the results of a map, as `Engine.map` does; one that fails to fork is told as rejected."""
    if any(piece.key for piece in pieces):
        raise InvalidArgument(
            "keys need the HTTP API of the server", hint="Connect with its URL and an api_key, or pass no keys"
        )
    base = (await engine.fork(access, session_id)).session_id if session_id else ""
    places = asyncio.Semaphore(options.at_once)

    async def run(index: int, code: str) -> MappedResult:
        async with places:
            own = ""
            try:
                if base:
                    own = (await engine.fork(access, base, reseed=options.reseed)).session_id
                else:
                    async with aclosing(engine.open_session(access, options.environment)) as steps:
                        own = [step.session.session_id async for step in steps if step.session is not None][-1]
                submitted = await engine.submit(access, own, code, timeout_s=options.timeout_s, asks="nobody", wait_s=2)
                progress = submitted.progress
                while progress is None or progress.result is None:
                    progress = await engine.wait(access, submitted.execution_id)
                return MappedResult.of(progress.result, index, session_id=own if options.keeps else "")
            except BelljarError as error:
                return MappedResult.rejected(f"{error.code}: {error}", index)
            finally:
                if own and not options.keeps:
                    await engine.end(access, own)

    tasks = [asyncio.ensure_future(run(index, piece.code)) for index, piece in enumerate(pieces)]
    try:
        for task in tasks if options.in_order else asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if base:
            await engine.end(access, base)
