"""One HTTP request to the pool: credentials, limits on time and size, and how often it may be tried again.

Says of every failure whether the pool may have seen the request, because a cell must not run twice. Does not know what
requests mean. The identifier of a session is sensitive and stands in every URL, so URLs are in no error.
"""

import asyncio
import json
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import httpx2

from belljar.azure.pool.credentials import Credential
from belljar.errors import PoolUnavailable, TooLarge
from belljar.json_values import check_values

MAX_JSON_BYTES = 64 * 1024 * 1024
CONNECT_S = 10.0
TIMEOUT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 8.0
_MAX_CHARACTERS = 300
_CHUNK_BYTES = 1 << 20
# OpenSSL's word, which the client's errors have in their text.
_DISTRUSTED = "CERTIFICATE_VERIFY_FAILED"


class Unanswered(Exception):
    """No whole answer came. `was_sent` is false only where the pool cannot have got any of the request."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.was_sent = was_sent


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """A whole answer of the pool; its body may be anything."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        """Return whether the request was taken."""
        return 200 <= self.status < 300

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may be answered otherwise in a moment."""
        return self.status in (408, 425, 429) or self.status >= 500

    @property
    def retry_after_s(self) -> float:
        """Return how long the pool asks us to wait; 0 where it does not say."""
        text = self.headers.get("retry-after", "")
        return min(float(text), TIMEOUT_S) if text.isascii() and text.isdigit() else 0.0

    def content(self) -> Any:
        """Return the JSON of the body; None where it is none."""
        try:
            check_values(self.body)
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def code(self) -> str:
        """Return the pool's own word for what is wrong; empty where it has none."""
        return self._error("code") or self.headers.get("x-ms-error-code", "")[:_MAX_CHARACTERS]

    @property
    def problem(self) -> str:
        """Return the status and what the pool says, for an error."""
        said = ": ".join(filter(None, (self.code, self._error("message"))))
        return f"HTTP {self.status}{f' ({said})' if said else ''}"

    def _error(self, name: str) -> str:
        match self.content():
            case {"error": {**fields}}:
                text = fields.get(name)
                return " ".join(text.split())[:_MAX_CHARACTERS] if isinstance(text, str) else ""
            case _:
                return ""


class Backoff:
    """Pauses that grow, with some chance in them, until the time for retries is over."""

    def __init__(self, retry_for_s: float = TIMEOUT_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + retry_for_s
        self._pause_s = FIRST_PAUSE_S

    def is_over(self) -> bool:
        """Return whether there is no time for another try."""
        return self._loop.time() >= self._deadline

    async def pause(self, least_s: float = 0.0) -> None:
        """Wait before the next try, for at least as long as the pool asked."""
        pause_s = max(least_s, self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(min(pause_s, max(0.0, self._deadline - self._loop.time())))


class PoolTransport:
    """Sends requests to one endpoint. `aclose` releases the connections."""

    def __init__(self, endpoint: str, credential: Credential, *, answer_s: float = 60.0) -> None:
        self.endpoint = endpoint
        self._credential = credential
        # `create_default_context` and not certifi's list, so that SSL_CERT_FILE and the system's own authorities count.
        self._client = httpx2.AsyncClient(
            verify=ssl.create_default_context(),
            timeout=httpx2.Timeout(answer_s, connect=CONNECT_S),
            headers={"accept-encoding": "identity", "user-agent": "belljar"},
            limits=httpx2.Limits(max_connections=16, max_keepalive_connections=8, keepalive_expiry=30),
        )

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str],
        body: object = None,
        upload: tuple[str, BinaryIO] | None = None,
        headers: Mapping[str, str] | None = None,
        into: BinaryIO | None = None,
        most_bytes: int = MAX_JSON_BYTES,
    ) -> PoolAnswer:
        """Send a request once, and once more with a new token where the pool refused the old one.

        The body of a good answer goes `into` a file, where one is given.
        """
        answer = await self._send(method, path, params, body, upload, headers, into, most_bytes)
        if answer.status == 401:
            self._credential.forget()
            if upload is not None:
                upload[1].seek(0)
            answer = await self._send(method, path, params, body, upload, headers, into, most_bytes)
        return answer

    async def send_with_retries(
        self, method: str, path: str, *, retry_for_s: float = TIMEOUT_S, **chosen: Any
    ) -> PoolAnswer:
        """Send a request that does no harm when it is done twice, until it has an answer that would not change."""
        backoff = Backoff(retry_for_s)
        while True:
            least_s = 0.0
            try:
                answer = await self.send(method, path, **chosen)
                if not answer.is_transient or backoff.is_over():
                    return answer
                least_s = answer.retry_after_s
            except Unanswered as failure:
                if backoff.is_over():
                    raise unreachable(self.endpoint, failure.reason) from failure
            await backoff.pause(least_s)
            for file in (chosen.get("into"), (chosen.get("upload") or ("", None))[1]):
                if file is not None:
                    file.seek(0)

    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: object,
        upload: tuple[str, BinaryIO] | None,
        headers: Mapping[str, str] | None,
        into: BinaryIO | None,
        most_bytes: int,
    ) -> PoolAnswer:
        authorization = f"Bearer {await self._credential.bearer()}"
        request = self._client.build_request(
            method,
            f"{self.endpoint}{path}",
            params=dict(params),
            json=body if body is not None else None,
            files={"file": (upload[0], upload[1], "application/octet-stream")} if upload else None,
            headers={**(headers or {}), "authorization": authorization},
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                return await _read(response, into, most_bytes)
            finally:
                await response.aclose()
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError) as error:
            if _DISTRUSTED in str(error):
                raise PoolUnavailable(
                    f"the certificate of {httpx2.URL(self.endpoint).netloc.decode()} is not accepted: {_reason(error)}",
                    hint="Name the authority that signed it in SSL_CERT_FILE, if you trust it",
                ) from error
            raise Unanswered(_reason(error), was_sent=False) from error
        except httpx2.TransportError as error:
            raise Unanswered(_reason(error), was_sent=True) from error

    async def aclose(self) -> None:
        """Close the connections; may be called twice."""
        await self._client.aclose()


async def _read(response: httpx2.Response, into: BinaryIO | None, most_bytes: int) -> PoolAnswer:
    is_file = into is not None and response.status_code == 200
    limit = most_bytes if is_file or into is None else MAX_JSON_BYTES
    body = bytearray()
    size = 0
    if is_file and into is not None:
        into.truncate(0)
    async for chunk in response.aiter_raw(_CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"the Azure pool answered with more than {limit:,} bytes")
        if is_file and into is not None:
            into.write(chunk)
        else:
            body += chunk
    return PoolAnswer(response.status_code, dict(response.headers), bytes(body))


def _reason(error: Exception) -> str:
    """Return what happened; the library's own words may hold the host, and never the URL."""
    text = str(error).strip().partition("\n")[0][:_MAX_CHARACTERS]
    return text or type(error).__name__


def unreachable(endpoint: str, reason: str) -> PoolUnavailable:
    """Return the error for a pool that does not answer."""
    host = httpx2.URL(endpoint).netloc.decode()
    return PoolUnavailable(
        f"the Azure pool at {host} does not answer: {reason}",
        hint="Try again in a moment; `belljar doctor` checks address, token and role",
    )


def refused(answer: PoolAnswer) -> PoolUnavailable:
    """Return the error for an answer that is no success, with what to do about it."""
    match answer.status:
        case 401:
            hint = "Check the key, or that tokens are for azure_scope and their tenant is the pool's"
        case 403:
            hint = "Give this identity the role `Azure ContainerApps Session Executor` on the pool"
        case 404:
            hint = "Check azure_endpoint, or the four names: the pool's `poolManagementEndpoint` shows it"
        case 429 | 503:
            hint = "The pool has no room at the moment: try again, or raise its most concurrent sessions"
        case _:
            hint = "Try again in a moment; `belljar doctor` checks address, token and role"
    return PoolUnavailable(f"the Azure pool refused: {answer.problem}", hint=hint)
