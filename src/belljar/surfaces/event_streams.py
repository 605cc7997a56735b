"""Server-sent events of the API and the console: their headers, and how many of them one caller may have open."""

from collections import Counter
from collections.abc import AsyncGenerator
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.responses import Response

from belljar.errors import Busy

MOST_STREAMS: Final = 20
_PING_S: Final = 15
# How long a reader that takes nothing may hold up its stream before it is cut off; it comes back where it was.
_SEND_TIMEOUT_S: Final = 60


class StreamShares:
    """Counts the streams of each caller."""

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def take(self, principal: str) -> None:
        """Count one more, or refuse it."""
        if self._open[principal] >= self._most:
            raise TooManyStreams(
                f"{self._most} streams are open already, the most that one caller may have", hint="Close some of them"
            )
        self._open[principal] += 1

    def release(self, principal: str) -> None:
        """Count one less."""
        self._open[principal] -= 1
        if not self._open[principal]:
            del self._open[principal]


class TooManyStreams(Busy):
    """One caller has too many streams open."""

    code = "too-many-streams"


def event_stream(events: AsyncGenerator[dict[str, str]], shares: StreamShares, principal: str) -> Response:
    """Return the stream of these events. It ends when the reader goes or the server stops."""
    shares.take(principal)

    async def counted() -> AsyncGenerator[dict[str, str]]:
        try:
            async for event in events:
                yield event
        finally:
            shares.release(principal)
            await events.aclose()

    return EventSourceResponse(
        counted(),
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        ping=_PING_S,
        sep="\n",
        send_timeout=_SEND_TIMEOUT_S,
    )
