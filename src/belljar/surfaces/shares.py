"""How many requests of one caller may be under way: streams that are left open take connections from others.

A request is under way until its answer has ended, which for the stream of a GET is when the client leaves.
"""

from collections import Counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar import measures
from belljar.surfaces.auth import current_principal


class CallerShares:
    """Counts the requests under way of each caller, over all the apps that it guards."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return the app behind the limit; callers have to be known by then."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            caller = current_principal()
            if self._under_way[caller] >= self._most:
                measures.refusals.add("admission")
                await self._refusal()(scope, receive, send)
                return
            self._under_way[caller] += 1
            try:
                await app(scope, receive, send)
            finally:
                self._under_way[caller] -= 1
                if not self._under_way[caller]:
                    del self._under_way[caller]

        return answer

    def _refusal(self) -> JSONResponse:
        refusal = {
            "error": f"busy: {self._most} requests of yours are under way, the most that one caller may have",
            "hint": "Close streams that nobody reads, or try again in 10 seconds",
        }
        return JSONResponse(refusal, status_code=429, headers={"retry-after": "10"})
