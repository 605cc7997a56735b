"""Skills that others published, as they are: listed, found, accepted by a strict client, their scripts run."""

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import ERAS, Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime
from registry_packages import Unreachable, npm_archive
from shared_environment import shared_settings
from skill_clients import accept, listed

pytestmark = pytest.mark.anyio

# Collections on npm that ship their skills, with the folder that has them.
COLLECTIONS = {
    "claude-skills@1.0.2": "skills",
    "bmad-method@6.12.0": "src/core-skills",
    "@playwright/cli@0.1.22": "",
    "openskills@1.5.0": "",
}
WITH_SCRIPTS = "import pathlib, subprocess, sys\nscripts = sorted(pathlib.Path('skills').glob('*/scripts/*.py'))\n"


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all skills of the collections."""
    folder = tmp_path_factory.mktemp("operator") / "skills"
    folder.mkdir()
    kept = shared_settings().data_directory / "published-skills"
    for package, below in COLLECTIONS.items():
        try:
            files = npm_archive(kept / package.replace("/", "-").replace("@", "-"), package)
        except Unreachable as error:
            pytest.skip(f"{package}: {error}")
        for main in sorted((files / below).rglob("SKILL.md")):
            shutil.copytree(main.parent, folder / main.parent.name, dirs_exist_ok=True)
    for place in (folder.parent, folder, *folder.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory, operator: Path
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(default_environment, folder, skills_directory=str(operator), pool_size=0) as runtime:
        yield runtime


@pytest.mark.parametrize("era", ERAS)
async def test_published_skills_are_accepted_as_they_are(runtime: Runtime, operator: Path, era: str):
    assert runtime.skills is not None
    assert runtime.skills.scan().problems == {}
    async with connected(runtime, era) as caller:
        skills = await listed(caller.client)
        assert len(skills) == len([*operator.glob("*/SKILL.md")]) >= 10
        for entry in skills:
            await accept(caller.client, entry)


async def test_they_are_found_by_what_they_do(caller: Caller):
    async def first(query: str) -> str:
        return (await caller.fields("search_skills", query=query))["skills"][0]["name"]

    assert await first("automate a browser") == "playwright-cli"
    assert await first("create a new skill") == "skill-creator"


async def test_their_scripts_run_in_a_session(caller: Caller, shared_session: str):
    made = await caller.execute(
        "!python skills/skill-creator/scripts/init_skill.py my-skill --path . && ls my-skill", shared_session
    )
    assert "SKILL.md" in made.stdout, made
    code = (
        WITH_SCRIPTS + "ran = {}\n"
        "for path in scripts:\n"
        "    ended = subprocess.run([sys.executable, path, '--help'], capture_output=True, text=True)\n"
        "    ran[str(path)] = 'usage' in (ended.stdout + ended.stderr).lower() or ended.stderr[-300:]\n"
        "len(scripts), {path: said for path, said in ran.items() if said is not True}"
    )
    result = await caller.execute(code, shared_session)
    assert result.result is not None
    count, failed = eval(result.result)
    assert count >= 8
    # One of them needs a package that the science environment lacks, and says so.
    assert all("No module named" in said for said in failed.values()), failed
