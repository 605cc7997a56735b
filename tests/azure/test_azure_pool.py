"""Sessions that live in a pool: a second belljar that serves `foundry` in a process of its own, over a bad line too."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from mcp import Client
from pool_proxy import Fate, PoolProxy, opened_proxy

import belljar
from belljar.azure.pool.credentials import TokenCredential
from belljar.azure.pool.routes import OLDER_VERSIONS, check_pool
from belljar.environments import Environment
from belljar.errors import CopyRefused, InvalidArgument, PoolUnavailable, SettingsError
from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.settings import Settings, load_settings
from certificates import make_certificate
from live_server import live_server
from waiting import until

pytestmark = pytest.mark.anyio

KEY = "key-of-the-pool-0123456789"
FATES: tuple[Fate, ...] = ("refuse-429", "refuse-503", "cut-before", "cut-after", "fail-after", "late", "expire")
IN_THE_CLEAR = ["http://example.com", "ftp://127.0.0.1", "https://a:b@host", "https://h/?q=1", "x"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def pool(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    chosen = {"BELLJAR_SURFACES": "foundry", "BELLJAR_API_KEYS": f"engine:{KEY}", "BELLJAR_CHECKPOINTS": 0}
    # Forked, because every test has a session of its own.
    chosen |= {"BELLJAR_FORK_START": "true", "BELLJAR_PRELOAD": "json"}
    with live_server(tmp_path_factory.mktemp("pool"), default_environment.python, **chosen) as url:
        yield url.removesuffix("/mcp")


@pytest.fixture(scope="module")
async def proxy(anyio_backend: str, pool: str) -> AsyncGenerator[PoolProxy]:
    async with opened_proxy(pool) as proxy:
        yield proxy


@pytest.fixture(scope="module")
async def engine(proxy: PoolProxy, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[belljar.Engine]:
    async with opened_engine(tmp_path_factory.mktemp("engine"), proxy.url) as engine:
        yield engine


@asynccontextmanager
async def opened_engine(folder: Path, endpoint: str, **chosen: object) -> AsyncGenerator[belljar.Engine]:
    chosen = {"azure_key": KEY, "interrupt_grace_s": 4, **chosen}
    async with belljar.open_engine(
        data_directory=folder, environment="azure", azure_endpoint=endpoint, sandbox="process", **chosen
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> None:
    if "proxy" in request.fixturenames:
        proxy: PoolProxy = request.getfixturevalue("proxy")
        proxy.decide, proxy.before, proxy.versions = lambda _method, _path: "pass", None, ()
        proxy.fates.clear()
        proxy.seen.clear()


async def test_variables_output_and_errors_are_those_of_any_session(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        await session.execute("kept = 20")
        result = await session.execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\nkept + 1")
        assert (result.status, result.stdout, result.stderr, result.result) == ("ok", "out\n", "err\n", "21")
        raised = await session.execute("print('before')\n1 / 0")
        assert (raised.status, raised.error, raised.stdout) == (
            "error",
            "ZeroDivisionError: division by zero",
            "before\n",
        )
        assert any("1 / 0" in line for line in raised.traceback)
        assert raised.execution_count == 3
        wrong = await session.execute("this is no python")
        assert wrong.error is not None
        assert wrong.error.startswith("SyntaxError")
        values = await session.execute("[True, None, 1.5, 'x']")
        assert values.result == "[True, None, 1.5, 'x']"


async def test_long_output_comes_whole(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        result = await session.execute("print('x' * 100_000)")
        assert result.truncated is not None
        assert result.truncated.total_bytes == 100_001


async def test_a_figure_is_shown(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        result = await session.execute("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
        assert [display.mime for display in result.displays] == ["image/png"]


async def test_the_folder_is_the_same_on_both_sides(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        await session.upload("in/table.csv", "a,b\n1,2\n")
        result = await session.execute(
            "import pathlib\ntext = pathlib.Path('in/table.csv').read_text()\n"
            "pathlib.Path('out').mkdir(); pathlib.Path('out/copy é.txt').write_text(text * 2)"
        )
        assert [(file.name, file.change) for file in result.files] == [("out/copy é.txt", "created")]
        assert await session.download("out/copy é.txt") == b"a,b\n1,2\n" * 2
        # Changed in the pool, with the size it had.
        changed = await session.execute("pathlib.Path('in/table.csv').write_text('a,b\\n3,4\\n')")
        assert [(file.name, file.change) for file in changed.files] == [("in/table.csv", "modified")]
        assert await session.download("in/table.csv") == b"a,b\n3,4\n"
        # Changed here.
        await session.upload("in/table.csv", "a,b\n5,6\n")
        assert (await session.execute("print(pathlib.Path('in/table.csv').read_text())")).stdout == "a,b\n5,6\n\n"
        # Removed in the pool.
        await session.execute("pathlib.Path('in/table.csv').unlink()")
        assert [file.name for file in await session.files()] == ["out/copy é.txt"]


async def test_what_the_folder_has_no_room_for_stays_in_the_pool(proxy: PoolProxy, tmp_path: Path) -> None:
    async with opened_engine(tmp_path, proxy.url, disk_mb=2) as engine, engine.open_session() as session:
        result = await session.execute("open('large', 'wb').write(bytes(3_000_000)); open('small', 'w').write('x');")
        assert [file.name for file in result.files] == ["small"]
        assert "no room for it: 'large' (3,000,000 bytes)" in result.stderr
        # Told once.
        again = await session.execute("import os; os.path.getsize('large')")
        assert (again.stderr, again.result) == ("", "3000000")


async def test_a_time_out_keeps_the_variables_and_an_interrupt_does_not(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        await session.execute("kept = 1")
        slow = await session.execute("import time; time.sleep(60)", timeout_s=1)
        assert (slow.status, slow.state) == ("timeout", "kept")
        assert (await session.execute("kept")).result == "1"


async def test_an_interrupt_deletes_the_session_and_says_so(
    engine: belljar.Engine, proxy: PoolProxy, pool: str
) -> None:
    left = {*await _sessions(pool)}  # by earlier tests; the pool may not have ended them yet
    async with engine.open_session() as session:
        await session.upload("kept.txt", "kept")
        await session.execute("kept = 1")
        proxy.seen.clear()
        running = asyncio.create_task(session.execute("import time; time.sleep(60)"))
        await until(lambda: any(line.startswith("GET /executions/") for line in proxy.seen))
        await session.interrupt()
        result = await running
        assert (result.status, result.state) == ("interrupted", "lost")
        assert "the session was deleted" in (result.cause or "")
        fresh = await session.execute("print(open('kept.txt').read()); 'kept' in globals()")
        assert (fresh.stdout, fresh.result, fresh.state) == ("kept\n", "False", "lost")

        async def is_alone() -> bool:
            return len({*await _sessions(pool)} - left) == 1

        await until(is_alone)


async def test_a_request_that_reaches_the_pool_after_the_session_was_deleted_leaves_none_there(
    engine: belljar.Engine, proxy: PoolProxy, pool: str
) -> None:
    left = {*await _sessions(pool)}
    is_held, is_released = asyncio.Event(), asyncio.Event()
    deletions = 0

    async def is_made_anew() -> bool:
        return first in await _sessions(pool)

    async def delay(method: str, target: str, _headers: dict[str, str]) -> None:
        nonlocal deletions
        if method == "GET" and target.startswith("/files?") and "POST /executions" in proxy.seen:
            is_held.set()
            await is_released.wait()
        deletions += method == "DELETE"
        if method == "DELETE" and deletions > 1:
            is_released.set()
            await until(is_made_anew)

    async with engine.open_session() as session:
        await session.execute("1")
        (first,) = {*await _sessions(pool)} - left
        proxy.seen.clear()
        proxy.before = delay
        running = asyncio.create_task(session.execute("kept = 1"))
        await is_held.wait()
        await session.interrupt()
        assert (await running).state == "lost"
        await until(lambda: deletions > 1)

        async def is_gone() -> bool:
            return not await is_made_anew()

        await until(is_gone)


async def test_a_session_that_the_pool_forgot_is_told_before_the_next_cell(engine: belljar.Engine, pool: str) -> None:
    async with engine.open_session() as session:
        await session.execute("kept = 1; open('file.txt', 'w').write('here');")
        for identifier in await _sessions(pool):
            await _forget(pool, identifier)
        result = await session.execute("print(open('file.txt').read()); 'kept' in globals()")
        assert (result.status, result.state, result.stdout, result.result) == ("ok", "lost", "here\n", "False")
        assert "the pool no longer knows the session" in result.stderr + " ".join(result.output)


async def test_copies_are_refused_with_the_reason(engine: belljar.Engine) -> None:
    async with engine.open_session() as session:
        await session.execute("1")
        with pytest.raises(CopyRefused, match="lives in an Azure pool"):
            await session.fork()
        with pytest.raises(CopyRefused, match="lives in an Azure pool"):
            await session.rewind(1)
        with pytest.raises(InvalidArgument, match="are the pool's own"):
            await session.install(["house"])


async def test_a_session_that_ends_leaves_nothing_in_the_pool(engine: belljar.Engine, pool: str) -> None:
    async with engine.open_session() as session:
        await session.execute("1")
        assert await _sessions(pool)
    assert await _sessions(pool) == []


@pytest.mark.parametrize("fate", FATES)
async def test_a_cell_whose_request_goes_wrong_runs_once(engine: belljar.Engine, proxy: PoolProxy, fate: Fate) -> None:
    async with engine.open_session() as session:
        await session.execute("runs = []")
        left = [fate]

        def decide(method: str, path: str) -> Fate:
            return left.pop() if (method, path) == ("POST", "/executions") and left else "pass"

        proxy.decide = decide
        result = await session.execute("runs.append(1); len(runs)")
        await proxy.settled()
        assert (result.status, result.result) == ("ok", "1")
        assert not left
        assert (await session.execute("len(runs)")).result == "1"


async def test_on_a_bad_line_no_cell_runs_twice_and_none_is_told_wrongly(
    engine: belljar.Engine, proxy: PoolProxy, pool: str
) -> None:
    chance = random.Random(20261117)
    told: dict[int, str] = {}
    async with engine.open_session() as session:
        await session.execute("runs = []")
        proxy.decide = lambda _method, _path: chance.choice(FATES) if chance.random() < 0.25 else "pass"
        since = 0
        for number in range(30):
            if chance.random() < 0.1:
                for identifier in await _sessions(pool):
                    await _forget(pool, identifier)
            code = f"runs = globals().get('runs', []); runs.append({number}); print('ran', runs)"
            result = await session.execute(code)
            told[number] = result.status
            if result.state == "lost":
                since = number
            if result.status == "ok":
                runs = [int(text) for text in re.findall(r"\d+", result.stdout)]
                # Everything that ran since the state was last lost is in the list, once.
                assert runs[-1] == number
                assert max(Counter(runs).values()) == 1, runs
                expected = [each for each in range(since, number + 1) if told[each] == "ok"]
                assert [each for each in runs if told[each] == "ok"] == expected, (runs, told, since)
                assert all(told[each] != "rejected" for each in runs), (runs, told)
        await proxy.settled()
    assert set(told.values()) <= {"ok", "error", "died", "rejected"}
    assert sum(status == "ok" for status in told.values()) >= 18, told
    assert len(proxy.fates) == len(FATES) + 1, proxy.fates


async def test_a_pool_of_an_older_version_is_spoken_to_in_its_own_form(
    engine: belljar.Engine, proxy: PoolProxy, pool: str
) -> None:
    proxy.versions = OLDER_VERSIONS
    async with engine.open_session() as session:
        await session.upload("in/table.csv", "a,b\n1,2\n")
        await session.execute("kept = len(open('in/table.csv').read())")
        result = await session.execute("print('out'); open('made.txt', 'w').write('x'); kept + 1")
        assert (result.stdout, result.result, [file.name for file in result.files]) == ("out\n", "9", ["made.txt"])
        assert (await session.execute("1 / 0")).error == "ZeroDivisionError: division by zero"
        proxy.versions = ()
        for identifier in await _sessions(pool):
            await _forget(pool, identifier)
        proxy.versions = OLDER_VERSIONS
        fresh = await session.execute("'kept' in globals()")
        assert (fresh.result, fresh.state) == ("False", "lost")
    assert "POST /executions" in proxy.seen
    assert "POST /code/execute" in proxy.seen


async def test_sessions_of_the_azure_mcp_surface_live_in_the_pool(
    default_environment: Environment, pool: str, tmp_path: Path
) -> None:
    flags = {"data_directory": tmp_path, "environment": str(default_environment.python), "fork_start": False}
    flags |= {"azure_endpoint": pool, "azure_key": KEY, "sandbox": "process", "surfaces": ["azure-mcp"]}
    async with open_runtime(load_settings(flags)) as runtime, Client(build_server(runtime, ["azure-mcp"])) as client:
        code = "open('/mnt/data/made.txt', 'w').write('x'); print('there')"
        before = {*await _sessions(pool)}  # what earlier tests left, if the pool has not ended it yet
        assert "there" in str((await client.call_tool("exec", {"code": code})).content)
        assert len({*await _sessions(pool)} - before) == 1
        assert "made.txt" in str((await client.call_tool("list_files", {})).content)


# Settings, credentials and checks


async def test_the_doctor_has_words_for_address_token_and_role(pool: str) -> None:
    def settings(**chosen: object) -> Settings:
        return Settings(environment="azure", **{"azure_endpoint": pool, "azure_key": KEY, **chosen})

    assert [(check.name, check.is_ok) for check in await check_pool(settings())] == [
        ("address", True),
        ("token", True),
        ("role", True),
    ]
    *_, role = await check_pool(settings(azure_key="another-key-0123456789"))
    assert (role.name, role.is_ok) == ("role", False)
    assert "HTTP 401" in role.detail
    (address,) = await check_pool(settings(azure_endpoint="http://127.0.0.1:9"))
    assert (address.is_ok, "does not answer" in address.detail) == (False, True)
    *_, token = await check_pool(settings(azure_key=""))
    assert (token.name, token.is_ok) == ("token", False)
    assert "belljar-mcp[azure]" in token.hint


async def test_a_token_is_fetched_again_before_it_ends_and_when_it_is_refused() -> None:
    lives_s = [100, 3_600, 3_600]

    class Source:
        def get_token(self, scope: str) -> "Source":
            self.token, self.expires_on = f"{scope}-{len(lives_s)}", time.time() + lives_s.pop(0)
            return self

    credential = TokenCredential(Source(), "scope")
    # The first is about to end, so it is used once.
    assert [await credential.bearer() for _ in range(3)] == ["scope-3", "scope-2", "scope-2"]
    credential.forget()
    assert await credential.bearer() == "scope-1"
    with pytest.raises(PoolUnavailable, match="no token could be had"):
        await TokenCredential(object(), "scope").bearer()


async def test_a_pool_behind_tls_is_reached_where_its_authority_is_trusted(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificate(tmp_path)
    chosen = {"BELLJAR_SURFACES": "foundry", "BELLJAR_API_KEYS": f"engine:{KEY}"}
    chosen |= {"BELLJAR_TLS_CERTIFICATE": files.certificate, "BELLJAR_TLS_KEY": files.key}
    with live_server(tmp_path / "pool", default_environment.python, **chosen) as url:
        endpoint = url.removesuffix("/mcp")
        assert endpoint.startswith("https://")
        async with opened_engine(tmp_path / "engine", endpoint) as engine:
            with pytest.raises(PoolUnavailable, match="is not accepted"):
                async with engine.open_session():
                    pass
            monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))
            async with engine.open_session() as session:
                assert (await session.execute("6 * 7")).result == "42"


def test_a_pool_named_in_part_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from belljar.settings.azure import check_pool_names, pool_endpoint

    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", "0000-1111")
    monkeypatch.setenv("AZURE_REGION", "West US 2")
    settings = Settings()
    assert pool_endpoint(settings) == ""
    with pytest.raises(SettingsError, match="AZURE_RESOURCE_GROUP, AZURE_SESSION_POOL are not set"):
        check_pool_names(settings)
    monkeypatch.setenv("AZURE_RESOURCE_GROUP", "my group".replace(" ", "-"))
    monkeypatch.setenv("AZURE_SESSION_POOL", "pool")
    assert pool_endpoint(Settings()) == (
        "https://westus2.dynamicsessions.io/subscriptions/0000-1111/resourceGroups/my-group/sessionPools/pool"
    )


@pytest.mark.parametrize("endpoint", IN_THE_CLEAR)
def test_an_endpoint_that_would_get_a_token_in_the_clear_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="azure_endpoint"):
        Settings(azure_endpoint=endpoint)


async def _sessions(pool: str) -> list[str]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
        answer = await client.get(f"{pool}/listSessions", params={"api-version": "2025-10-02-preview"})
        return [session["identifier"] for session in answer.json()["sessions"]]


async def _forget(pool: str, identifier: str) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
        params = {"api-version": "2025-10-02-preview", "identifier": identifier}
        assert (await client.delete(f"{pool}/session", params=params)).status_code == 204
