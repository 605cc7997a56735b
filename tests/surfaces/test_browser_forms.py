"""A form in a real browser: `forms` drives the host's Chromium through `@playwright/mcp`, a server of the toolbox."""

import json
import shutil
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from calls import connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime
from registry_packages import Unreachable, node, npm_folder
from shared_environment import shared_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "inside"))
import form_pages
from form_pages import Site

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site() -> Generator[Site]:
    with form_pages.served() as site:
        yield site


def browser(folder: Path) -> dict[str, Any]:
    chromium = shutil.which("chromium") or pytest.skip("there is no chromium here")
    try:
        packages = npm_folder(shared_settings().data_directory / "mcp-servers" / "playwright", "@playwright/mcp")
        program = str(node()[0])
    except Unreachable as error:
        pytest.skip(f"@playwright/mcp: {error}")
    script = str(packages / "node_modules/@playwright/mcp/cli.js")
    flags = ["--headless", "--isolated", "--no-sandbox", "--executable-path", chromium, "--output-dir", str(folder)]
    return {"command": program, "args": [script, *flags]}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    servers = {"playwright": browser(folder / "pages")}
    async with opened_runtime(default_environment, folder, mcp_servers=servers) as runtime:
        assert runtime.toolbox is not None
        await runtime.toolbox.wait_until_ready()
        yield runtime


async def test_a_form_is_read_filled_in_and_sent_in_a_real_browser(runtime: Runtime, site: Site) -> None:
    values = {
        "name": "Ada",
        "mail": "ada@example.com",
        "age": 36,
        "country": "Italy",
        "langs": ["no", "it"],
        "plan": "pro",
        "news": ["weekly"],
        "terms": True,
        "about": "a\nb",
        "cv": "cv.txt",
    }
    code = f"""
import forms, json
from pathlib import Path
Path('cv.txt').write_text('my life')
form = forms.open({site.url + "/signup"!r}, browser='playwright', form='signup')
schema = form.schema
form.fill({values!r})
dry = form.submit(dry_run=True)['outcome']
print(json.dumps([schema, dry, form.submit(button='Send')]))
"""
    async with connected(runtime) as caller:
        result = await caller.execute(code, timeout_s=120)
    assert result.status == "ok", "\n".join(result.traceback)
    schema, dry, receipt = json.loads(result.stdout)
    assert schema["required"] == ["name", "mail", "country", "terms"]
    assert schema["properties"]["age"] == {"type": "integer", "title": "Age", "minimum": 18, "maximum": 120}
    assert [each["title"] for each in schema["properties"]["plan"]["oneOf"]] == ["Basic", "Pro"]
    assert dry == "dry run"
    assert receipt["outcome"] == "sent"
    assert receipt["answer"] == {
        "url": f"{site.url}/done",
        "title": "Done",
        "text": "Thank you\n\nNumber 17",
        "alerts": ["1"],
    }
    (entries,) = site.sent
    sent = dict(entries)
    assert sent["token"]
    assert tuple(sent[name] for name in ("name", "country", "plan", "news", "do")) == (
        "Ada",
        "IT",
        "pro",
        "weekly",
        "send",
    )
    assert [value for name, value in entries if name == "langs"] == ["no", "it"]
    assert sent["about"] == "a\r\nb"
    assert sent["cv"] == ["cv.txt", "my life"]


async def test_a_page_that_refuses_a_value_or_has_changed_gets_nothing(runtime: Runtime, site: Site) -> None:
    before = len(site.sent)
    values = {"name": "Ada", "mail": "ada@example.com", "country": "NO", "terms": True}
    start = f"import forms\nform = forms.open({site.url + '/signup'!r}, browser='playwright', form='signup')\n"
    script = "() => { document.querySelector('[name=salary]') || document.forms[1].append("
    script += "Object.assign(document.createElement('input'), {name: 'salary', required: true})) }"
    changed = f"toolbox.get('playwright', 'browser_evaluate')(function={script!r})"
    async with connected(runtime) as caller:
        code = f"{start}import toolbox\nform.fill({values!r})\n{changed}\nform.submit()"
        result = await caller.execute(code, timeout_s=120)
        other = await caller.execute("forms.open('http://x.test/', browser='nothing')", result.session_id)
        away = await caller.execute("forms.open('http://127.0.0.1:9/', browser='playwright')", result.session_id)
    assert result.error is not None
    assert "has changed since it was read (new: salary); nothing was sent" in result.error
    assert len(site.sent) == before
    assert other.error is not None
    assert "nothing is no browser server that is known here" in other.error
    assert away.error is not None
    assert "playwright cannot open http://127.0.0.1:9/" in away.error
