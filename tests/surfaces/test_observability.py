"""Health, readiness and numbers, from servers over HTTP."""

import asyncio
import contextlib
import sqlite3
import timeit
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from calls import Caller, connected, opened_runtime
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_metrics
from pydantic import SecretStr

from belljar import metrics
from belljar.egress.proxy import open_proxy
from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.http.app import build_app, serve_http
from belljar.http.forwarded import ProxyNotice
from belljar.journal.journal import open_journal
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime
from belljar.sandboxes.base import HostCheck
from belljar.sandboxes.process import ProcessProvider
from belljar.settings import load_settings
from waiting import until

pytestmark = pytest.mark.anyio

KEY = "k" * 40
KEYS = [SecretStr(f"ada:{KEY}")]
FAR_AWAY = ("203.0.113.9", 40_000)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@asynccontextmanager
async def served(runtime: Runtime) -> AsyncGenerator[str]:
    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as tasks:
        serve = serve_http(build_http_app(runtime), "127.0.0.1", 0, on_ready=on_ready, log_level="WARNING")
        tasks.start_soon(lambda: serve)
        await ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def http_caller(url: str) -> AsyncGenerator[Caller]:
    async with Client(streamable_http_client(f"{url}/mcp"), mode="2026-07-28") as client:
        yield Caller(client)


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in plain_metrics(text)
        for sample in family.samples
    }


async def scrape(url: str) -> Samples:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/metrics")
    assert answer.status_code == 200, answer.text
    return samples(answer.text)


def of(found: Samples, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """How much a number has grown: those of a process are of all its engines."""
    return of(after, name, **labels) - of(before, name, **labels)


def app_client(runtime: Runtime, peer: tuple[str, int] = ("127.0.0.1", 40_000), **chosen: Any) -> httpx.AsyncClient:
    """A client of the runtime's app that comes from `peer`, as the server is told."""
    app = build_http_app(replace(runtime, settings=runtime.settings.model_copy(update=chosen)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=peer), base_url="http://127.0.0.1:8000")


async def until_warm(runtime: Runtime) -> None:
    if not await runtime.starter.wait_until_warm(runtime.settings.environment):
        pytest.skip("sessions cannot be forked here")


# Readiness


async def test_a_server_is_ready_when_its_environment_and_its_zygote_are(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with opened_runtime(default_environment, tmp_path, fork_start=True) as runtime, app_client(runtime) as client:
        first = await client.get("/ready")

        async def ready() -> httpx.Response | None:
            answer = await client.get("/ready")
            if answer.status_code != 503:
                return answer
            assert set(answer.json()["reasons"]) <= {"environment: being prepared", "zygote: warming up"}
            return None

        last = await until(ready)
    assert first.status_code == 503
    assert first.json()["status"] == "not ready"
    assert last.json() == {
        "status": "ready",
        "checks": {"environment": "ok", "sandbox": "ok", "journal": "ok", "zygote": "ok"},
        "reasons": [],
    }


async def test_an_environment_that_cannot_be_had_is_a_reason_without_its_path(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.runtime.RETRY_S", 0.01)
    absent = replace(default_environment, python=tmp_path / "absent" / "bin" / "python")
    async with opened_runtime(absent, tmp_path) as runtime:
        await until(lambda: runtime.preparation.environment != "pending")
        async with app_client(runtime) as client:
            broken = await client.get("/ready")
        absent.python.parent.parent.symlink_to(default_environment.python.parent.parent)
        await until(lambda: runtime.preparation.environment == "ready")  # tried again without anyone asking
    assert broken.status_code == 503
    assert "environment: cannot be prepared, see the log" in broken.json()["reasons"]
    assert "absent" not in broken.text


async def test_a_journal_that_is_locked_and_a_sandbox_that_does_not_work_are_reasons(runtime: Runtime) -> None:
    class Broken(ProcessProvider):
        def check(self) -> list[HostCheck]:
            return [HostCheck("glass", is_ok=False, detail="cracked at /private/place")]

    await runtime.starter.wait_until_warm(runtime.settings.environment)
    journal = runtime.settings.data_directory / "journal.sqlite"
    runtime.sessions.journal.commit()
    with closing(sqlite3.connect(journal, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with app_client(replace(runtime, provider=Broken())) as client:
            answer = await client.get("/ready")
        other.execute("ROLLBACK")
    assert answer.status_code == 503
    reasons = answer.json()["reasons"]
    assert "sandbox: glass does not work" in reasons
    assert any(reason.startswith("journal: cannot be written: ") for reason in reasons)
    assert "/private/place" not in answer.text
    assert runtime.sessions.journal.fault() == ""


async def test_readiness_is_looked_up_once_a_second_however_many_ask(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(type(runtime.sessions.journal), "fault", lambda _: looks.append("look") or "")
    async with app_client(runtime) as client:
        await asyncio.gather(*(client.get("/ready") for _ in range(30)))
    assert len(looks) == 1


async def test_health_and_readiness_ask_for_no_key_and_no_host(runtime: Runtime) -> None:
    async with app_client(runtime, FAR_AWAY, api_keys=KEYS) as client:
        for path in ("/health", "/ready"):
            answer = await client.get(path, headers={"host": "10.1.2.3:8000"})
            assert answer.status_code in (200, 503)


# Numbers


async def test_sessions_executions_and_calls_are_counted(runtime: Runtime) -> None:
    async with served(runtime) as url, http_caller(url) as caller:
        before = await scrape(url)
        session = (await caller.execute("1 + 1")).session_id
        await caller.execute("1 / 0", session)
        await caller.execute("while True: pass", session, timeout_s=0.2)
        await caller.execute("import os; os._exit(3)", session)
        held = await caller.execute("import time\nwhile True: time.sleep(0.01)", session, wait_s=0)
        queued = await caller.execute("2", session, wait_s=0)

        async def scraped() -> Samples | None:
            found = await scrape(url)
            return found if of(found, "belljar_sessions_memory_bytes") else None

        during = await until(scraped)  # the kernel is a new one, which is not there at once
        assert during is not None
        for execution in (queued, held):
            await caller.fields("interrupt_execution", execution_id=execution.execution_id)
        await caller.refusal("execute_code_not", code="")
        after = await scrape(url)
        await caller.fields("clear_session", session_id=session)
    statuses = ("ok", "error", "timeout", "died", "interrupted", "out_of_memory", "rejected")
    ended = {status: grown(before, after, "belljar_executions_total", status=status) for status in statuses}
    assert ended == {
        "ok": 1, "error": 1, "timeout": 1, "died": 1, "interrupted": 2, "out_of_memory": 0, "rejected": 0
    }  # fmt: skip
    assert grown(before, after, "belljar_execution_wall_seconds_count") == 6
    assert grown(before, after, "belljar_execution_queue_seconds_count") == 6
    assert 0.2 <= grown(before, after, "belljar_execution_wall_seconds_sum") < 60
    calls = "belljar_tool_call_seconds_count"
    assert grown(before, after, calls, tool="execute_code", outcome="ok") == 3
    assert grown(before, after, calls, tool="execute_code", outcome="error") == 3
    assert grown(before, after, calls, tool="unknown", outcome="error") == 1
    assert of(during, "belljar_sessions", state="running") == 1
    assert of(during, "belljar_executions_unfinished", state="running") == 1
    assert of(during, "belljar_executions_unfinished", state="waiting") == 1
    assert of(during, "belljar_sessions_memory_bytes") > 10_000_000
    assert of(during, "belljar_sessions_memory_bytes") >= of(during, "belljar_session_memory_max_bytes")
    assert grown(before, after, "belljar_sessions_opened_total", origin="new") == 1
    assert of(after, "process_resident_memory_bytes") > 10_000_000


async def test_histograms_are_cumulative_and_end_with_everything(runtime: Runtime) -> None:
    metrics.tool_calls.observe(0.0, "execute_code", "ok")
    metrics.tool_calls.observe(1e6, "execute_code", "ok")
    async with served(runtime) as url:
        found = await scrape(url)
    name, labels = "belljar_tool_call_seconds", {"tool": "execute_code", "outcome": "ok"}
    bounds = [*(f"{bound:g}" for bound in metrics.CALL_BOUNDS), "+Inf"]
    counts = [of(found, f"{name}_bucket", le=bound, **labels) for bound in bounds]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] > counts[-2]
    assert counts[-1] == of(found, f"{name}_count", **labels)


async def test_kernels_are_counted_by_how_they_came(default_environment: Environment, tmp_path: Path) -> None:
    kinds = ("cold", "forked", "pool", "refill", "jupyter")

    def counts() -> dict[str, int]:
        return {kind: sum(metrics.kernel_starts.series[kind,].counts) for kind in kinds}

    before = counts()
    plain = opened_runtime(default_environment, tmp_path, pool_size=0)
    async with plain as runtime, connected(runtime) as caller:
        await caller.new_session()
    cold = counts()
    async with opened_runtime(default_environment, tmp_path, fork_start=True, pool_size=0) as runtime:
        await until_warm(runtime)
        async with connected(runtime) as caller:
            await caller.new_session()
    forked = counts()
    async with opened_runtime(default_environment, tmp_path, fork_start=True, pool_size=1) as runtime:
        await until(lambda: len(runtime.sessions.pool))
        async with app_client(runtime) as client:
            ready = samples((await client.get("/metrics")).text)
        async with connected(runtime) as caller:
            await caller.new_session()
        pooled = counts()
    assert (cold["cold"] - before["cold"], forked["forked"] - cold["forked"]) == (1, 1)
    assert (of(ready, "belljar_pool_ready"), of(ready, "belljar_pool_target")) == (1, 1)
    assert pooled["refill"] - forked["refill"] >= 1
    assert pooled["pool"] - forked["pool"] == 1
    assert pooled["forked"] == forked["forked"]


async def test_checkpoints_rewinds_sleep_and_waking_are_counted(
    default_environment: Environment, tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {"fork_start": True, "hibernate": True, "session_idle_s": 3600}
    taken, rewound = metrics.checkpoints.values[()], metrics.rewinds.values[()]
    slept, woken = metrics.hibernations.values["all",], metrics.sessions_opened.values["woken",]
    forks = metrics.sessions_opened.values["fork",]
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        await until_warm(runtime)
        first = await caller.execute("x = 1")
        await caller.fields("rewind_session", session_id=first.session_id, to=1)
        await caller.fields("fork_session", session_id=first.session_id)
        await caller.execute("y = 2", first.session_id)
        async with app_client(runtime) as client:
            kept = of(samples((await client.get("/metrics")).text), "belljar_checkpoints")
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        async with app_client(runtime) as client:
            asleep = of(samples((await client.get("/metrics")).text), "belljar_sessions_asleep")
        assert (await caller.execute("y", first.session_id)).result == "2"
    assert metrics.checkpoints.values[()] > taken
    assert metrics.rewinds.values[()] == rewound + 1
    assert kept >= 1
    assert asleep >= 1
    assert metrics.hibernations.values["all",] > slept
    assert metrics.sessions_opened.values["woken",] == woken + 1
    assert metrics.sessions_opened.values["fork",] == forks + 1


async def test_refusals_are_counted_by_their_kind(default_environment: Environment, tmp_path: Path) -> None:
    counts = metrics.refusals.values
    before = dict(counts)
    async with opened_runtime(default_environment, tmp_path, max_sessions=1) as runtime:
        async with connected(runtime) as caller:
            await caller.new_session()
            assert "busy" in await caller.refusal("new_session")
            assert "busy" in await caller.refusal("execute_code", code="1")
        async with app_client(runtime, api_keys=KEYS) as client:
            assert (await client.post("/mcp")).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
            keyed = {"authorization": f"Bearer {KEY}"}
            for foreign, status in (({"host": "evil.example"}, 421), ({"origin": "https://evil.example"}, 403)):
                assert (await client.get("/metrics", headers={**keyed, **foreign})).status_code == status
    async with open_proxy(tmp_path, "way", session_id="s", rules=[], judge=lambda _: ""):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "way"))
        with contextlib.closing(writer):
            writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
            assert b" 403 " in await reader.readline()
    assert {kind: counts[kind,] - before[kind,] for kind in ("egress", "admission", "auth", "host")} == {
        "egress": 1,
        "admission": 2,
        "auth": 2,
        "host": 2,
    }


async def test_a_journal_that_fails_is_counted(tmp_path: Path) -> None:
    before = metrics.journal_failures.values[()]
    with open_journal(tmp_path / "journal.sqlite") as journal:
        journal.undo(["1"])
        assert metrics.journal_failures.values[()] == before
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
            other.execute("DROP TABLE executions")
        journal.undo(["1"])
    assert metrics.journal_failures.values[()] == before + 1


async def test_no_number_names_a_session_a_caller_or_what_a_caller_sent(runtime: Runtime) -> None:
    async with served(runtime) as url, http_caller(url) as caller, httpx.AsyncClient() as client:
        result = await caller.execute("secret_name = 'hush-hush'")
        await caller.call("no-such-tool-hush-hush")
        text = (await client.get(f"{url}/metrics")).text
        pooled = [path.name for path in (runtime.settings.data_directory / "sessions").iterdir()]
    assert "hush" not in text
    assert "secret_name" not in text
    assert not any(identifier in text for identifier in (result.session_id, result.execution_id, "local", *pooled))
    labels = {name for family in plain_metrics(text) for sample in family.samples for name in sample.labels}
    assert labels <= {"version", "state", "status", "tool", "outcome", "kind", "origin", "kept", "le", "where", "to"}


async def test_the_newer_format_is_spoken_too(runtime: Runtime) -> None:
    async with app_client(runtime) as client:
        answer = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in open_metrics(answer.text)}
    assert {"belljar_executions", "belljar_tool_call_seconds", "belljar_sessions"} <= names


# Who may read them


async def test_a_request_through_a_proxy_to_a_server_without_keys_is_warned_of_once(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    async with app_client(runtime) as client:
        await client.get("/")
        assert "proxy" not in caplog.text
        for _ in range(2):
            await client.get("/", headers={"x-forwarded-for": "203.0.113.9"})
    (warning,) = [record for record in caplog.records if "came through a proxy" in record.getMessage()]
    assert "BELLJAR_API_KEYS" in warning.getMessage()
    keyed = runtime.settings.model_copy(update={"api_keys": [SecretStr("ann:sha256:" + "0" * 64)]})
    assert ProxyNotice not in [middleware.cls for middleware in build_app({}, keyed).user_middleware]


async def test_metrics_are_for_this_machine_by_default(runtime: Runtime) -> None:
    assert runtime.settings.metrics == "local"
    async with app_client(runtime, FAR_AWAY) as client:
        refused = await client.get("/metrics")
    async with app_client(runtime) as client:
        forwarded = await client.get("/metrics", headers={"x-forwarded-for": "203.0.113.9"})
        near = await client.get("/metrics")
        foreign = await client.get("/metrics", headers={"host": "evil.example"})
    assert (refused.status_code, forwarded.status_code) == (403, 403)
    assert 'metrics = "open"' in refused.json()["hint"]
    assert near.status_code == 200
    assert foreign.status_code == 421


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        ("127.0.0.1", 200),
        ("127.8.9.10", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("::ffff:203.0.113.9", 403),
        ("192.168.0.7", 403),
        ("2001:db8::7", 403),
        ("", 403),
    ],
)
async def test_local_is_every_form_of_this_machine_and_no_other(runtime: Runtime, peer: str, status: int) -> None:
    async with app_client(runtime, (peer, 40_000)) as client:
        assert (await client.get("/metrics")).status_code == status


async def test_where_there_are_keys_local_metrics_ask_for_one(runtime: Runtime) -> None:
    keyed = {"authorization": f"Bearer {KEY}"}
    async with app_client(runtime, api_keys=KEYS) as client:
        without, with_key = await client.get("/metrics"), await client.get("/metrics", headers=keyed)
    async with app_client(runtime, FAR_AWAY, api_keys=KEYS) as client:
        far = await client.get("/metrics", headers=keyed)
    assert (without.status_code, with_key.status_code, far.status_code) == (401, 200, 403)


async def test_open_metrics_ask_for_nothing_but_the_right_host(runtime: Runtime) -> None:
    async with app_client(runtime, FAR_AWAY, api_keys=KEYS, metrics="open") as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics", headers={"host": "evil.example"})).status_code == 421


async def test_metrics_can_be_off(runtime: Runtime) -> None:
    async with app_client(runtime, metrics="off") as client:
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.get("/health")).status_code == 200


def test_another_choice_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="metrics"):
        load_settings({"metrics": "everyone"})


# Cost


def test_counting_costs_less_than_two_microseconds() -> None:
    counter = metrics.Counter("x", "", ("a",))
    histogram = metrics.Histogram("y", "", ("a",), bounds=metrics.CALL_BOUNDS)
    for count in (lambda: counter.add("b"), lambda: histogram.observe(0.02, "b")):
        assert min(timeit.repeat(count, number=2_000, repeat=10)) / 2_000 < 2e-6
