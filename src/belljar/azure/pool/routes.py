"""The routes and shapes of a session pool, of its newer versions and of the older ones.

`PoolSession` is one session of the pool under one identifier. Its methods raise `PoolUnavailable` for what can be told
and tried again, and `Unanswered` only from `submit`, where the caller must find out whether the pool has the cell.
What the pool answers was partly written by the session's code, so form and size are checked here.
"""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, ValidationError

from belljar.azure.pool.credentials import Credential, open_credential
from belljar.azure.pool.transport import Backoff, PoolAnswer, PoolTransport, Unanswered, refused, unreachable
from belljar.errors import BelljarError, PoolUnavailable
from belljar.sandboxes.base import HostCheck
from belljar.settings import Settings
from belljar.settings.azure import pool_endpoint

NEWER_VERSIONS = ("2025-10-02-preview", "2025-02-02-preview", "2024-10-02-preview")
"""The versions of the pool's API that can run a cell asynchronously, newest first."""
OLDER_VERSIONS = ("2024-08-02-preview", "2024-02-02-preview")
"""Those that run cells synchronously only, newest first."""
# Azure stops every cell after this time, and refuses to be asked for more.
_AZURE_LONGEST_S = 220
_LONGEST_S = 86_400
_MAX_PAGES = 200
MAX_STREAM_CHARS = 8_000_000
"""How much of each stream a pool is asked for, in versions that can be asked; some send far less by themselves."""
MAX_FILES = 20_000
ROOT = "/mnt/data"
_VERSION_COMPLAINT = re.compile(r"api[- ]?version", re.IGNORECASE)

# An expression, so that it leaves no name behind. Cells of other sessions run in /mnt/data, too.
_SET_UP = (
    f"(lambda os: os.path.isdir({ROOT!r}) and os.chdir({ROOT!r}))(__import__('os'))"
    " or setattr(__import__('builtins'), '_belljar_mark', {mark!r})"
)
_MARK = "getattr(__import__('builtins'), '_belljar_mark', '')"


Entry = TypeVar("Entry", bound=BaseModel)
ANSWER_S = 20.0
_ADDRESS_HINT = "Check azure_endpoint or AZURE_REGION, and that this machine may connect to it"


def _text(value: object) -> object:
    return "" if value is None else value


Text = Annotated[str, BeforeValidator(_text)]


class PoolOutput(BaseModel):
    """The output of an execution, whole."""

    stdout: Text = ""
    stderr: Text = ""
    result: JsonValue = Field(None, alias="executionResult")


class PoolExecution(BaseModel):
    """An execution, as the pool tells of it."""

    status: str
    output: PoolOutput | None = Field(None, alias="result")
    error: JsonValue = None

    @property
    def is_over(self) -> bool:
        """Return whether nothing of it will change."""
        return self.status.lower() in ("succeeded", "failed", "canceled", "success", "failure")

    @property
    def is_ok(self) -> bool:
        """Return whether the code ran to its end."""
        return self.status.lower() in ("succeeded", "success")


class _NewFile(BaseModel):
    name: str = Field(max_length=4096)
    type: str = "file"
    size: int = Field(0, alias="sizeInBytes")
    modified: str = Field("", alias="lastModifiedAt", max_length=64)
    directory: Text = Field("", max_length=4096)


class _OldFile(BaseModel):
    name: str = Field(alias="filename", max_length=4096)
    size: int = 0
    modified: str = Field("", alias="lastModifiedTime", max_length=64)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in the pool: its path below `/mnt/data`, its size, and when it was changed, in the pool's words."""

    name: str
    size: int
    modified: str


class PoolSession:
    """One session of the pool."""

    def __init__(self, transport: PoolTransport) -> None:
        self._transport = transport
        self._identifier = f"belljar-{secrets.token_hex(16)}"
        self._mark = secrets.token_hex(8)
        self._version = NEWER_VERSIONS[0]
        self._is_azure = (urlsplit(transport.endpoint).hostname or "").endswith(".dynamicsessions.io")

    @property
    def is_old(self) -> bool:
        """Return whether the pool knows the older versions only, which run cells synchronously."""
        return self._version in OLDER_VERSIONS

    @property
    def deduplicates_cells(self) -> bool:
        """Return whether a cell that comes twice under one `operation-id` runs once. belljar promises it, Azure not."""
        return not self._is_azure and not self.is_old

    # The session

    async def open(self, retry_for_s: float) -> None:
        """Have the pool allocate the session, in the newest version that it knows."""
        code = _SET_UP.format(mark=self._mark)
        answer = PoolAnswer(404, {})
        for version in (*NEWER_VERSIONS, *OLDER_VERSIONS):
            self._version = version
            # Doing this twice does no harm, so it may be tried until it works.
            answer = await self._transport.send_with_retries(
                "POST", self._execute_route, params=self._params(), body=self._body(code, 60), retry_for_s=retry_for_s
            )
            if not _is_other_version(answer):
                break
        if not answer.is_ok:
            raise refused(answer)

    async def identity(self) -> str:
        """Return what tells this session from a later one under the same identifier; empty where there is none."""
        if self.is_old:
            return await self._read_mark()
        answer = await self._transport.send_with_retries("GET", "/session", params=self._params())
        if answer.status == 404:
            return ""
        match answer.content() if answer.is_ok else None:
            # The etag stands for the container behind the session (Azure's description of its API).
            case {"etag": str(text)} | {"createdAt": str(text)} if text:
                return text[:500]
            case _:
                raise refused(answer)

    async def _read_mark(self) -> str:
        """Return the mark that `open` left in the session, if it is still there; empty if it is not."""
        answer = await self._transport.send_with_retries(
            "POST", self._execute_route, params=self._params(), body=self._body(_MARK, 60)
        )
        if not answer.is_ok:
            raise refused(answer)
        found = read_execution(answer)
        text = found.output.result if found.output is not None else ""
        return self._mark if isinstance(text, str) and text.strip("'\"") == self._mark else ""

    async def delete(self, retry_for_s: float) -> None:
        """End the session and whatever runs in it."""
        if self.is_old:
            raise PoolUnavailable("this version of the pool cannot end a session before its time")
        answer = await self._transport.send_with_retries(
            "DELETE", "/session", params=self._params(), retry_for_s=retry_for_s
        )
        if not answer.is_ok and answer.status != 404:
            raise refused(answer)

    # Executions

    @property
    def _execute_route(self) -> str:
        return "/code/execute" if self.is_old else "/executions"

    async def submit(self, operation_id: str, code: str, timeout_s: float) -> PoolAnswer:
        """Send a cell once."""
        return await self._transport.send(
            "POST",
            self._execute_route,
            params=self._params(),
            body=self._body(code, timeout_s, is_asynchronous=True),
            headers={"operation-id": operation_id},
        )

    async def execution(self, operation_id: str, retry_for_s: float) -> PoolExecution | None:
        """Return an execution; None where the pool does not know it."""
        backoff = Backoff(retry_for_s)
        while True:
            least_s = 0.0
            try:
                answer = await self._transport.send("GET", f"/executions/{operation_id}", params=self._params())
            except Unanswered as failure:
                if backoff.is_over():
                    raise unreachable(self._transport.endpoint, failure.reason) from failure
            else:
                if answer.status == 404:
                    return None
                if answer.is_ok:
                    return read_execution(answer)
                if not answer.is_transient or backoff.is_over():
                    raise refused(answer)
                least_s = answer.retry_after_s
            await backoff.pause(least_s)

    def _body(self, code: str, timeout_s: float, *, is_asynchronous: bool = False) -> dict[str, Any]:
        longest_s = _AZURE_LONGEST_S if self._is_azure else _LONGEST_S
        seconds = max(1, min(math.ceil(timeout_s), longest_s))
        if self.is_old:
            kinds = {"codeInputType": "inline", "executionType": "synchronous"}
            return {"properties": {**kinds, "code": code, "timeoutInSeconds": seconds}}
        kind = "Asynchronous" if is_asynchronous else "Synchronous"
        body = {"codeInputType": "Inline", "executionType": kind, "code": code, "timeoutInSeconds": seconds}
        return {**body, "outputStreamsMaxLength": MAX_STREAM_CHARS} if self._version == NEWER_VERSIONS[0] else body

    def _params(self, **more: str) -> dict[str, str]:
        return {"api-version": self._version, "identifier": self._identifier, **more}

    # Files

    async def files(self) -> list[RemoteFile]:
        """Return all files below `/mnt/data`; raises where there are too many to be kept alike."""
        if self.is_old:
            answer = await self._send_checked("GET", "/files", params=self._params())
            entries = [_properties(entry) for entry in _values(answer)]
            return [
                RemoteFile(_relative(file.name, ""), file.size, file.modified)
                for file in (_parse(_OldFile, entry) for entry in entries)
                if file is not None
            ]
        found: dict[str, RemoteFile] = {}
        pending, seen = [""], {""}
        while pending and len(found) <= MAX_FILES:
            folder = pending.pop()
            for entry in await self._list(folder):
                name = _relative(entry.name, entry.directory or folder)
                if entry.type.lower() == "directory":
                    if name not in seen:
                        seen.add(name)
                        pending.append(name)
                else:
                    found[name] = RemoteFile(name, entry.size, entry.modified)
            # A pool that lists recursively has told of what is in its folders already.
            pending = [folder for folder in pending if not any(name.startswith(f"{folder}/") for name in found)]
        if len(found) > MAX_FILES:
            raise PoolUnavailable(f"the session holds more than {MAX_FILES:,} files in the pool")
        return [*found.values()]

    async def _list(self, folder: str) -> list[_NewFile]:
        params = self._params(recursive="true", **({"path": folder} if folder else {}))
        route, entries = "/files", list[_NewFile]()
        for _ in range(_MAX_PAGES):
            answer = await self._send_checked("GET", route, params=params)
            entries += [file for file in (_parse(_NewFile, entry) for entry in _values(answer)) if file is not None]
            match answer.content():
                case {"nextLink": str(link)} if link and len(entries) <= MAX_FILES:
                    params = {**params, **_query_of(link, self._transport.endpoint)}
                case _:
                    return entries
        return entries

    async def upload(self, name: str, file: BinaryIO) -> RemoteFile | None:
        """Write a file of the session, in place of one that has its name; return it as the pool tells of it."""
        folder, _, last = name.rpartition("/")
        if self.is_old:
            answer = await self._send_checked("POST", "/files/upload", params=self._params(), upload=(name, file))
            old = _parse(_OldFile, _properties(next(iter(_values(answer)), None)))
            return RemoteFile(name, old.size, old.modified) if old else None
        params = self._params(**({"path": folder} if folder else {}))
        answer = await self._send_checked("POST", "/files", params=params, upload=(last, file))
        new = _parse(_NewFile, answer.content())
        return RemoteFile(name, new.size, new.modified) if new else None

    async def download(self, name: str, into: BinaryIO, most_bytes: int) -> bool:
        """Read a file of the session; return False where it is gone."""
        route, params = self._file_route(name)
        route = f"/files/content/{quote(name, safe='')}" if self.is_old else f"{route}/content"
        answer = await self._transport.send_with_retries("GET", route, params=params, into=into, most_bytes=most_bytes)
        if not answer.is_ok and answer.status != 404:
            raise refused(answer)
        return answer.is_ok

    async def delete_file(self, name: str) -> None:
        """Delete a file of the session, if it is there."""
        route, params = self._file_route(name)
        answer = await self._transport.send_with_retries("DELETE", route, params=params)
        if not answer.is_ok and answer.status != 404:
            raise refused(answer)

    def _file_route(self, name: str) -> tuple[str, dict[str, str]]:
        if self.is_old:
            return f"/files/{quote(name, safe='')}", self._params()
        folder, _, last = name.rpartition("/")
        return f"/files/{quote(last, safe='')}", self._params(**({"path": folder} if folder else {}))

    async def _send_checked(self, method: str, route: str, **chosen: Any) -> PoolAnswer:
        """Send a request with retries, and raise unless it was taken."""
        answer = await self._transport.send_with_retries(method, route, **chosen)
        if not answer.is_ok:
            raise refused(answer)
        return answer


def _is_other_version(answer: PoolAnswer) -> bool:
    """Tell whether the pool does not know the version that we asked in."""
    if answer.status == 400:
        return bool(_VERSION_COMPLAINT.search(answer.problem))
    # A pool of an older version has no such route, and says so without a word of its own.
    return answer.status == 405 or (answer.status == 404 and not answer.code)


def read_execution(answer: PoolAnswer) -> PoolExecution:
    """Return the execution that an answer holds, of either shape."""
    match answer.content():
        case {"properties": {"status": str(status), **fields}}:
            value = fields.get("executionResult", "")
            output = {**fields, "executionResult": fields.get("result") if value == "" else value}
            content: object = {"status": status, "result": output}
        case found:
            content = found
    try:
        return PoolExecution.model_validate(content)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise PoolUnavailable(f"the Azure pool answered in a form that is not its own: {place or 'body'}") from None


def _values(answer: PoolAnswer) -> list[Any]:
    match answer.content():
        case {"value": [*entries]}:
            return entries
        case _:
            raise PoolUnavailable("the Azure pool answered with no list of files")


def _properties(entry: Any) -> Any:
    match entry:
        case {"properties": properties}:
            return properties
        case _:
            return entry


def _parse(kind: type[Entry], entry: object) -> Entry | None:
    try:
        return kind.model_validate(entry)
    except ValidationError:
        return None


def _relative(name: str, folder: str) -> str:
    """Return the path of a file below `/mnt/data`; what is odd about it stays for `Workspace` to refuse."""
    whole = name if name.startswith("/") or not folder else f"{folder}/{name}"
    if whole == ROOT or whole.startswith(f"{ROOT}/"):
        whole = whole[len(ROOT) :]
    parts = [part for part in whole.split("/") if part not in ("", ".")]
    return "/".join(parts)


def _query_of(link: str, endpoint: str) -> Mapping[str, str]:
    """Return the query of the link to the next page; one that leads elsewhere would get our token, and is refused."""
    parts, own = urlsplit(link), urlsplit(endpoint)
    if parts.netloc and parts.netloc != own.netloc:
        raise PoolUnavailable("the Azure pool's list of files goes on at another host")
    return dict(parse_qsl(parts.query))


async def check_pool(settings: Settings) -> list[HostCheck]:
    """Return a line for each of address, token and role; a line that fails is the last one."""
    endpoint = pool_endpoint(settings)
    host = urlsplit(endpoint).netloc
    if (complaint := await _reach(endpoint)) is not None:
        return [HostCheck("address", False, f"{host} does not answer: {complaint}", _ADDRESS_HINT)]
    address = HostCheck("address", True, f"{host} answers")
    try:
        credential = open_credential(settings)
        await credential.bearer()
    except BelljarError as error:
        return [address, HostCheck("token", False, error.message, error.hint)]
    kind = "a key" if settings.azure_key.get_secret_value() else f"a token for {settings.azure_scope}"
    token = HostCheck("token", True, kind)
    return [address, token, await _check_role(endpoint, credential)]


async def _reach(endpoint: str) -> str | None:
    """Return why the endpoint cannot be reached; None if it answers anything at all."""
    transport = PoolTransport(endpoint, _Nobody(), answer_s=ANSWER_S)
    try:
        await transport.send(
            "GET", "/session", params={"api-version": NEWER_VERSIONS[0], "identifier": "belljar-doctor"}
        )
    except Unanswered as failure:
        return failure.reason
    except BelljarError as error:
        return error.message
    finally:
        await transport.aclose()
    return None


async def _check_role(endpoint: str, credential: Credential) -> HostCheck:
    transport = PoolTransport(endpoint, credential, answer_s=ANSWER_S)
    try:
        answer = PoolAnswer(0, {})
        for version in (*NEWER_VERSIONS, *OLDER_VERSIONS):
            params = {"api-version": version, "identifier": f"belljar-doctor-{secrets.token_hex(8)}"}
            # The older versions have no such route; what they say of the caller comes before that.
            answer = await transport.send_with_retries("GET", "/session", params=params, retry_for_s=ANSWER_S)
            if answer.status != 400:
                break
    except BelljarError as error:
        return HostCheck("role", False, error.message, error.hint)
    finally:
        await transport.aclose()
    if answer.is_ok or answer.status == 404 or answer.status == 400:
        return HostCheck("role", True, "sessions can be used")
    refusal = refused(answer)
    return HostCheck("role", False, refusal.message, refusal.hint)


class _Nobody:
    """A credential that is none, to ask only whether somebody answers."""

    async def bearer(self) -> str:
        return "none"

    def forget(self) -> None:
        pass
