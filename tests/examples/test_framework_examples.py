"""Every program of `examples/` as it is, with a scripted model for a real one, in its framework's environment."""

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from belljar.environments import Environment
from live_server import clean_environment, live_server
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

pytestmark = pytest.mark.skipif(
    not os.environ.get("BELLJAR_EXAMPLES"),
    reason="installs four frameworks, 200 MB: opt in with BELLJAR_EXAMPLES=1",
)

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {
    "with_openai_agents": ("openai-agents>=0.24",),
    "with_langchain": ("langchain>=1.4", "langchain-mcp-adapters>=0.3"),
    "with_agent_framework": ("agent-framework-core>=1.23", "mcp>=2.3", "tenacity"),
    "with_pydantic_ai": ("pydantic-ai-slim[mcp]>=2.60",),
}


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with live_server(tmp_path_factory.mktemp("server"), default_environment.python) as url:
        yield url


@pytest.mark.parametrize("example", PACKAGES)
def test_an_agent_goes_on_with_its_variables(example: str, url: str) -> None:
    folder = shared_settings().data_directory / "frameworks" / example
    try:
        python_environment(folder, *PACKAGES[example])
    except Unreachable as gap:
        pytest.skip(str(gap))
    answer = subprocess.run(
        [str(folder / "bin/python"), str(Path(__file__).with_name("scripted_models.py")), example],
        env=clean_environment(
            BELLJAR_URL=url, PYTHONPATH=EXAMPLES, OPENAI_API_KEY="none", OPENAI_AGENTS_DISABLE_TRACING=1
        ),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert "90" in answer.stdout


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("with_*.py")} == set(PACKAGES)
