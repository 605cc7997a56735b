"""Server-sent events of the API and the console: their headers, and how many of them one caller may have open."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from belljar.errors import Busy

MAX_STREAMS: Final = 20
_PING_S: Final = 15
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
# How long a reader that takes nothing may hold up its stream before it is cut off; it comes back where it was.
_SEND_TIMEOUT_S: Final = 60


class StreamShares:
    """Counts the streams of each caller."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
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


def event_stream(
    request: Request,
    events: AsyncGenerator[dict[str, str]],
    shares: StreamShares,
    principal: str,
    *,
    send_timeout_s: float | None = _SEND_TIMEOUT_S,
) -> Response:
    """Return the stream of these events. It ends when the reader goes or the server stops."""
    if request.method == "HEAD":
        # Nobody reads what follows, and nobody would notice when they go.
        return Response(headers=_HEADERS, media_type="text/event-stream")
    shares.take(principal)
    return _CountedStream(events, lambda: shares.release(principal), send_timeout_s)


class _CountedStream(EventSourceResponse):
    """A stream that tells when it is over, also if its reader was gone before it began."""

    def __init__(
        self, events: AsyncGenerator[dict[str, str]], on_end: Callable[[], None], send_timeout_s: float | None
    ) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            events, headers=_HEADERS, ping=_PING_S, sep="\n", send_timeout=send_timeout_s
        )
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._events.aclose()
