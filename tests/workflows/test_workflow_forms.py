"""The `form` step with a target: a document or page is read, the person is asked for the rest, and it is sent once."""

import base64
import json
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from calls import connected, opened_runtime, text_of
from workflow_texts import code, workflow

from belljar.environments import Environment
from belljar.runtime import Runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "inside"))
import form_pages
import pdf_forms
from form_pages import Site

pytestmark = pytest.mark.anyio

# Sessions reach what is on their own loopback without the proxy; the site is on the host's.
OUT = code("out", "import os\nfor name in ('NO_PROXY', 'no_proxy'): os.environ.pop(name, None)")
PERSON = {"name": "Ada", "mail": "ada@example.com", "terms": True}


@pytest.fixture(scope="module")
def site() -> Generator[Site]:
    with form_pages.served() as site:
        yield site


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory, site: Site
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    egress = [site.url.removeprefix("http://")]
    async with opened_runtime(
        default_environment,
        folder,
        egress=egress,
        egress_allow_private=True,
        hibernate=True,
        workflows="on",
        workflow_hold_s=0.2,
    ) as runtime:
        yield runtime


def target(name: str, source: str, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "form", "config": {"values": values, "target": {"source": source, **more}}}


async def ran(caller: Any, **arguments: Any) -> dict[str, Any]:
    answer = await caller.call("run_workflow", wait_s=120, **arguments)
    assert answer.structured_content is not None, text_of(answer)
    return answer.structured_content


async def test_a_document_is_filled_in_with_variables_and_the_person_s_answers(runtime: Runtime) -> None:
    content = base64.b64encode(pdf_forms.claim()).decode()
    text = workflow(
        code("fetch", f"import base64\nopen('claim.pdf', 'wb').write(base64.b64decode({content!r}))"),
        target("claim", "claim.pdf", {"name": "{{ who }}", "country": "IT", "plan": "gold"}, save="filled.pdf"),
        code("look", "import forms\nforms.open('filled.pdf').values"),
        variables={"who": "Ada"},
    )
    async with connected(runtime) as caller:
        run = await ran(caller, definition=text)
        assert run["state"] == "waiting", run
        assert "plan: 'gold' is not one of 'basic', 'pro'" in str(run["question"])
        run = await ran(caller, run_id=run["run"], answer={"agree": True, "plan": "pro"})
    assert run["state"] == "done", run
    results = {step["step"]: step["result"] for step in run["steps"]}
    receipt = results["claim"]
    assert receipt["outcome"] == "saved"
    assert {name: field["by"] for name, field in receipt["fields"].items()} == {
        "name": "the workflow",
        "country": "the workflow",
        "agree": "the person",
        "plan": "the person",
        "address.city": "the form",
    }
    assert results["look"]["plan"] == "pro"


async def test_a_page_is_sent_once_and_a_dry_run_not_at_all(runtime: Runtime, site: Site) -> None:
    before = len(site.sent)
    values = {**PERSON, "country": "NO"}
    dry = target("dry", f"{site.url}/signup", values, form="signup", dry_run=True)
    real = target("real", f"{site.url}/signup", values, form="signup", button="Send")
    async with connected(runtime) as caller:
        run = await ran(caller, definition=workflow(OUT, dry, real))
    assert run["state"] == "done", run
    results = {step["step"]: step["result"] for step in run["steps"]}
    # Long results are shown as the beginning of their JSON.
    assert '"outcome": "dry run"' in json.dumps(results["dry"]).replace('\\"', '"')
    assert '"outcome": "sent"' in json.dumps(results["real"]).replace('\\"', '"')
    (sent,) = site.sent[before:]
    assert dict(sent)["do"] == "send"


async def test_a_page_that_changes_while_the_person_thinks_gets_nothing(runtime: Runtime, site: Site) -> None:
    before = len(site.sent)
    async with connected(runtime) as caller:
        run = await ran(caller, definition=workflow(OUT, target("sign", f"{site.url}/signup", PERSON, form="signup")))
        assert run["state"] == "waiting", run
        site.more = '<input name="salary" required>'
        run = await ran(caller, run_id=run["run"], answer={"country": "NO"})
        site.more = ""
    assert run["state"] == "failed", run
    assert "FormChanged" in str(run)
    assert len(site.sent) == before
