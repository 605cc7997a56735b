import subprocess
from pathlib import Path

import pytest

from belljar.environments.base import Environment
from belljar.environments.installs import InstallOutcome, install
from belljar.python.local import open_session
from belljar.sandboxes import providers
from belljar.settings import Settings


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


@pytest.mark.anyio
async def test_the_users_own_index_serves_a_session_by_every_way(
    default_environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The host's installer, pip in a cell, and the session's own pip through the proxy."""
    for check in providers(Settings())["namespace"].check():
        if not check.is_ok:
            pytest.skip(f"{check.name}: {check.detail}")
    async with open_session(
        str(default_environment.python),
        data_directory=tmp_path,
        egress=["packages"],
        egress_allow_private=True,
    ) as session:
        (outcome,) = await session.install(["humanize"])
        if outcome.error and "Failed to fetch" in outcome.error:
            pytest.skip(f"no package index in reach: {outcome.error}")
        assert outcome.imported is True
        assert (await session.execute("import humanize; humanize.intcomma(12345)")).result == "'12,345'"

        by_cell = await session.execute("%pip install tabulate==0.9.0\nimport tabulate; tabulate.__version__")
        assert by_cell.result == "'0.9.0'", by_cell.output

        direct = await session.execute("import socket; socket.create_connection(('192.0.2.1', 443), timeout=3)")
        assert "unreachable" in (direct.error or "")

        through = await session.execute("!pip install --target there --retries 0 six 2>&1", timeout_s=100)
        if "it resolves to an address that is not public" in caplog.text:
            pytest.skip("the package index has an address that no setting opens")
        assert "Successfully installed six" in through.stdout
