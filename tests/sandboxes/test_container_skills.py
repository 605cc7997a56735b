"""Skills in sessions that are containers: the operator's are imported, and what is saved is tried in a container."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from imported_image import import_image
from mcp import Client
from trials import usable

from belljar.environments import Environment
from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.settings import Settings
from belljar.skills.format import write_main

pytestmark = pytest.mark.anyio
REPORT = '"""Reports."""\ndef monthly(rows):\n    return sorted(row["month"] for row in rows)\n'
USE = "from skills.sales_report import monthly\nmonthly([{'month': 'may'}, {'month': 'april'}])"


@pytest.fixture
async def client(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Client]:
    usable("container")
    skills = tmp_path / "operator"
    script = skills / "pdf-pages" / "scripts" / "pages.py"
    script.parent.mkdir(parents=True)
    script.write_text("def turn():\n    return 3\n")
    (skills / "pdf-pages" / "SKILL.md").write_text(write_main("pdf-pages", "Turns pages.", "# How\n"))
    for place in (tmp_path, skills, *skills.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    settings = Settings(
        data_directory=tmp_path / "data",
        environment=str(default_environment.python),
        sandbox="container",
        container_image=import_image(),
        skills="on",
        skills_directory=str(skills),
    )
    async with open_runtime(settings) as runtime, Client(build_server(runtime, ["interpreter"])) as client:
        yield client


async def called(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments, meta={"belljar/structured": "always"})
    return answer.structured_content or {"refusal": str(answer.content)}


async def test_skills_are_imported_saved_tried_and_closed_to_sessions_that_are_containers(client: Client) -> None:
    first = await called(client, "execute_code", code="from skills.pdf_pages import pages\npages.turn()")
    assert (first["status"], first["result"]) == ("ok", "3"), first
    wrong = await called(
        client, "save_skill", name="sales-report", description="Reports.", code=REPORT, example=f"{USE}\nassert False"
    )
    assert "AssertionError" in str(wrong), wrong
    saved = await called(
        client, "save_skill", name="sales-report", description="Reports.", code=REPORT, example=f"{USE}\nassert monthly"
    )
    assert saved.get("state") == "approved", saved
    for session_id in (first["session_id"], ""):  # one that is there, and a new one
        used = await called(client, "execute_code", code=USE, session_id=session_id)
        assert used["result"] == "['april', 'may']", used
        refused = await called(
            client,
            "execute_code",
            code="open('skills/sales-report/scripts/sales_report.py', 'w')",
            session_id=used["session_id"],
        )
        assert refused["status"] == "error", refused
        assert "Read-only file system" in str(refused["error"]) or "Permission denied" in str(refused["error"])
