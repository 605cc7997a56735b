"""The kit for Azure: its agent against a stand-in of the agents endpoint, its check, and its template's form."""

import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from agents_endpoint import AgentsEndpoint, served
from bicep_template import REQUIREMENTS, read_template

from belljar.environments import Environment
from live_server import clean_environment, live_server
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

KIT = Path(__file__).parents[2] / "deploy" / "azure"
KEY = "key-of-the-platform-0123456789"
CONNECTION = "/subscriptions/x/projects/test/connections/belljar-interpreter"
# In place of Azure's own: a token that the stand-in and belljar accept.
DRIVER = f"""
import asyncio, sys, time
from azure.core.credentials import AccessToken
import azure.identity

class Credential:
    def __init__(self, *_, **__): pass
    def get_token(self, *scopes, **_): return AccessToken({KEY!r}, int(time.time()) + 3600)
    def close(self): pass

azure.identity.DefaultAzureCredential = Credential
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python with what the kit asks for."""
    folder = shared_settings().data_directory / "frameworks" / "azure-kit"
    try:
        return python_environment(folder, "--requirement", str(KIT / "requirements.txt")) / "bin/python"
    except Unreachable as gap:
        pytest.skip(str(gap))


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    # The sandbox and the number of sessions are those of the template.
    chosen = {
        "BELLJAR_SURFACES": "foundry",
        "BELLJAR_API_KEYS": f"platform:{KEY}",
        "BELLJAR_SANDBOX": "process",
        "BELLJAR_MAX_SESSIONS": "1",
    }
    with live_server(tmp_path_factory.mktemp("server"), default_environment.python, **chosen) as url:
        yield f"{url}?identifier=belljar-agent"


def run(
    python: Path, program: str, endpoint: AgentsEndpoint, authority: Path, url: str
) -> "subprocess.CompletedProcess[str]":
    variables = clean_environment(
        FOUNDRY_PROJECT_ENDPOINT=endpoint.url,
        FOUNDRY_MODEL_DEPLOYMENT_NAME="scripted",
        MCP_SERVER_URL=url,
        AZURE_AI_CONNECTION_ID=CONNECTION,
        SSL_CERT_FILE=authority,
        REQUESTS_CA_BUNDLE=authority,
        PYTHONPATH=KIT,
    )
    command = [str(python), "-c", DRIVER, str(KIT / program)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)


def test_the_agent_runs_python_in_belljar_and_is_removed_again(python: Path, url: str, tmp_path: Path) -> None:
    endpoint = AgentsEndpoint(KEY, CONNECTION)
    with served(endpoint, tmp_path) as authority:
        answer = run(python, "main.py", endpoint, authority, url)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "The factorial of 10 is 3,628,800." in answer.stdout
    assert endpoint.calls == [
        "POST /agents/belljar-code-interpreter/versions",
        "POST /openai/v1/responses",
        "DELETE /agents/belljar-code-interpreter/versions/1",
    ]
    assert endpoint.agents == {}
    assert endpoint.tokens == {f"Bearer {KEY}"}
    assert "runPythonCodeInRemoteEnvironment" in endpoint.tools


def test_every_piece_of_a_deployment_is_checked(python: Path, url: str, tmp_path: Path) -> None:
    endpoint = AgentsEndpoint(KEY, CONNECTION)
    with served(endpoint, tmp_path) as authority:
        answer = run(python, "verify.py", endpoint, authority, url)
        wrong = run(python, "verify.py", endpoint, authority, url.replace("/mcp", "/mpc"))
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    assert "code: 10! = 3628800" in answer.stdout
    assert "files: /mnt/data is the session's folder" in answer.stdout
    assert "connection: belljar-interpreter" in answer.stdout
    assert wrong.returncode == 1
    assert "FAIL" in wrong.stderr


def test_what_is_not_set_is_named(python: Path) -> None:
    command = [str(python), str(KIT / "main.py")]
    variables = clean_environment(FOUNDRY_PROJECT_ENDPOINT="https://x")
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 1
    assert "FOUNDRY_MODEL_DEPLOYMENT_NAME, MCP_SERVER_URL, MCP_PROJECT_CONNECTION_ID" in answer.stderr


# The template


@pytest.fixture(scope="module")
def programs() -> Path:
    """The programs that know Bicep's grammar and its types."""
    try:
        return python_environment(shared_settings().data_directory / "frameworks" / "bicep", *REQUIREMENTS) / "bin"
    except Unreachable as gap:
        pytest.skip(str(gap))


@pytest.mark.timeout(300)
def test_the_template_is_bicep_and_agrees_with_the_published_types(programs: Path) -> None:
    assert read_template(programs, (KIT / "main.bicep").read_text()).check() == []


@pytest.mark.parametrize(
    ("text", "instead", "complaint"),
    [
        ("poolManagementType: 'Dynamic'", "poolManagementTyp: 'Dynamic'", "has no poolManagementTyp"),
        ("targetPort: 8000", "targetPort: '8000'", "targetPort is int, not '8000'"),
        ("cpu: cpu", "cpu: memory", "cpu is int, and memory is string"),
        ("principalId: userPrincipalId", "principalIds: userPrincipalId", "properties needs principalId"),
        ("status: egress", "status: egres", "egres is not declared"),
        ("pool.properties.poolManagementEndpoint", "pool.properties.endpoint", "pool has no properties.endpoint"),
        ("displayName:", "isDefault: true\n    displayName:", "isDefault is read-only"),
        ("  type: 'SystemAssigned'", "  type: 'Systematic'", "not 'Systematic'"),
        ("workloadProfiles: [", "workloadProfiles: ", "is no Bicep"),
        ("accounts/projects@2025-06-01", "accounts/projects@2025-06-31", "the version whose types are published"),
    ],
)
def test_what_the_compiler_would_refuse_in_it_is_found(programs: Path, text: str, instead: str, complaint: str) -> None:
    template = (KIT / "main.bicep").read_text()
    assert text in template
    found = read_template(programs, template.replace(text, instead)).check()
    assert any(complaint in line for line in found), found


def test_the_template_has_what_the_article_needs_and_its_outputs_are_the_variables() -> None:
    text = (KIT / "main.bicep").read_text()
    kinds = set(re.findall(r"^resource \w+ '([\w./]+)@[\d-]+(?:-preview)?'", text, re.MULTILINE))
    assert kinds == {
        "Microsoft.App/managedEnvironments",
        "Microsoft.App/sessionPools",
        "Microsoft.CognitiveServices/accounts",
        "Microsoft.CognitiveServices/accounts/projects",
        "Microsoft.CognitiveServices/accounts/deployments",
        "Microsoft.CognitiveServices/accounts/projects/connections",
        "Microsoft.Authorization/roleAssignments",
    }
    outputs = re.findall(r"^output (\w+) string", text, re.MULTILINE)
    sample = re.findall(r"^([A-Z_]+)=", (KIT / ".env.sample").read_text(), re.MULTILINE)
    assert set(sample) <= set(outputs)
    declared = set(re.findall(r"^param (\w+)", text, re.MULTILINE))
    assert {"cpu", "memory", "image", "readySessions", "maxSessions", "cooldown", "egress"} <= declared


def test_the_containers_variables_are_settings_that_belljar_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from belljar.http.app import check_bind
    from belljar.settings import load_settings, unknown_variables

    text = (KIT / "main.bicep").read_text()
    pairs = re.findall(r"name: '(BELLJAR_\w+)'\s+value: '([^']*)'", text)
    for name, value in pairs:
        monkeypatch.setenv(name, value)
    assert not set(dict(pairs)) & set(unknown_variables())
    settings = load_settings()
    assert (settings.sandbox, settings.max_sessions, settings.trust_network) == ("process", 1, True)
    check_bind(settings)


if sys.platform != "linux":
    pytest.skip("the servers that the kit is tried with run on Linux", allow_module_level=True)
