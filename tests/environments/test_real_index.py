import subprocess
from pathlib import Path

import pytest

from belljar.environments.base import Environment
from belljar.environments.packages import InstallOutcome, install


@pytest.mark.anyio
async def test_a_package_of_the_users_own_index_works_with_the_default_environment(
    default_environment: Environment, layer: Path
) -> None:
    (outcome,) = await install(default_environment, layer, ["tabulate==0.9.0"])

    if outcome.error and "Failed to fetch" in outcome.error:
        pytest.skip(f"no package index in reach: {outcome.error}")
    assert outcome == InstallOutcome("tabulate", "0.9.0", None)
    code = "import pandas; print(pandas.DataFrame({'a': [1]}).to_markdown())"
    command = [str(default_environment.python), "-c", code]
    result = subprocess.run(command, env={"PYTHONPATH": str(layer)}, capture_output=True, text=True)
    assert result.stdout.startswith("|"), result.stderr
    assert not list(layer.glob("pandas*"))
