"""What a model is told of a server before its first call is so: isolation, and tools that do what they say."""

from pathlib import Path
from typing import Any

import pytest
from calls import connected, opened_runtime

from belljar.environments import Environment
from belljar.mcp.server import build_server

pytestmark = pytest.mark.anyio

SURFACES = ("interpreter", "executor", "toolbox")


async def offered(environment: Environment, folder: Path, **chosen: Any) -> set[str]:
    """Return the names of the tools that a model is told of."""
    folder.mkdir(exist_ok=True)
    async with opened_runtime(environment, folder, **chosen) as runtime, connected(runtime) as caller:
        return {tool.name for tool in (await caller.client.list_tools()).tools}


async def test_no_text_says_that_sessions_are_sealed_off_where_nothing_seals_them(
    default_environment: Environment, tmp_path: Path
):
    async with opened_runtime(default_environment, tmp_path, sandbox="process") as runtime:
        for surface in SURFACES:
            server = build_server(runtime, [surface])
            tools = [tool.model_dump_json() for tool in await server.list_tools()]
            texts = "\n".join([server.instructions or "", *tools])
            assert "sealed" not in texts, surface
            assert "No network" not in texts


async def test_instructions_say_that_sessions_are_sealed_off_where_they_are(
    default_environment: Environment, tmp_path: Path
):
    async with opened_runtime(default_environment, tmp_path) as runtime:
        assert (build_server(runtime, ["interpreter"]).instructions or "").startswith("Runs Python in sealed, stateful")


async def test_a_fork_is_not_offered_where_it_would_always_be_refused(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "fork_session" in await offered(default_environment, tmp_path / "a", fork_start=True)
    assert "fork_session" not in await offered(default_environment, tmp_path / "b", fork_start=False)
    async with (
        opened_runtime(default_environment, tmp_path, sandbox="process", fork_start=True) as runtime,
        connected(runtime) as caller,
    ):
        names = {tool.name for tool in (await caller.client.list_tools()).tools}
        # Rewinding needs no second sandbox.
        assert ("fork_session" in names, "rewind_session" in names) == (False, True)
        # Who calls it all the same learns why not.
        session_id = await caller.new_session()
        assert "cannot be forked" in await caller.refusal("fork_session", session_id=session_id)
    monkeypatch.setattr("belljar.sandboxes.namespace.provider.gap_of_host", lambda: "nsenter is not installed")
    assert "fork_session" not in await offered(default_environment, tmp_path / "d", fork_start=True)


async def test_a_rewind_is_not_offered_where_no_earlier_states_are_kept(
    default_environment: Environment, tmp_path: Path
):
    assert "rewind_session" in await offered(default_environment, tmp_path / "a", checkpoints=2)
    assert "rewind_session" not in await offered(default_environment, tmp_path / "b", checkpoints=0)
