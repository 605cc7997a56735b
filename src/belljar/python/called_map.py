"""A map at a server that is reached by MCP alone: each piece is three calls, to fork, to run and to end.

Where the server's HTTP API can be used, the server does all of it, keeps what has a key, and this is not imported.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from belljar.engine.contract import Access, Engine
from belljar.engine.models import Piece
from belljar.errors import BelljarError, InvalidArgument
from belljar.models import MappedResult


async def map_by_calls(
    engine: Engine,
    access: Access,
    pieces: Sequence[Piece],
    session_id: str,
    *,
    environment: str,
    at_once: int,
    timeout_s: float | None,
    in_order: bool,
    keeps: bool,
    reseed: bool,
) -> AsyncGenerator[MappedResult]:
    """Yield the results of a map, as `Engine.map` does; one that fails to fork is told as rejected."""
    if any(piece.key for piece in pieces):
        raise InvalidArgument(
            "keys need the HTTP API of the server", hint="Connect with its URL and an api_key, or pass no keys"
        )
    base = (await engine.fork(access, session_id)).session_id if session_id else ""
    places = asyncio.Semaphore(at_once)

    async def run(index: int, code: str) -> MappedResult:
        async with places:
            own = ""
            try:
                if base:
                    own = (await engine.fork(access, base, reseed=reseed)).session_id
                else:
                    async with aclosing(engine.open_session(access, environment)) as steps:
                        own = [step.session.session_id async for step in steps if step.session is not None][-1]
                submitted = await engine.submit(access, own, code, timeout_s=timeout_s, asks="nobody", wait_s=2)
                progress = submitted.progress
                while progress is None or progress.result is None:
                    progress = await engine.wait(access, submitted.execution_id)
                return MappedResult.of(progress.result, index, session_id=own if keeps else "")
            except BelljarError as error:
                return MappedResult.rejected(f"{error.code}: {error}", index)
            finally:
                if own and not keeps:
                    await engine.end(access, own)

    tasks = [asyncio.ensure_future(run(index, piece.code)) for index, piece in enumerate(pieces)]
    try:
        for task in tasks if in_order else asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if base:
            await engine.end(access, base)
