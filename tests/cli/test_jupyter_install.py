import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def kernels(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's kernelspecs are."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'belljar-mcp[jupyter]'")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(place.parent / "jupyter"))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    return place.parent / "jupyter/kernels"


def test_the_kernelspec_is_the_users_where_nothing_else_is_said(belljar: Run, kernels: Path) -> None:
    outcome = belljar("jupyter", "install")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"installed {kernels / 'belljar'}\n")
    told = json.loads((kernels / "belljar/kernel.json").read_text())
    assert told["argv"] == [sys.executable, "-P", "-m", "belljar", "kernel", "-f", "{connection_file}"]
    assert told["env"] == {}
    outcome = belljar("jupyter", "remove")
    assert (outcome.code, outcome.err) == (0, f"removed {kernels / 'belljar'}\n")
    assert not (kernels / "belljar").exists()


def test_the_kernelspec_of_a_place_is_removed_there_and_nowhere_else(
    belljar: Run, kernels: Path, tmp_path: Path
) -> None:
    there = tmp_path / "share/jupyter/kernels/belljar"
    for place in ((), ("--prefix", str(tmp_path))):
        assert belljar("jupyter", "install", *place).code == 0
    outcome = belljar("jupyter", "remove", "--prefix", str(tmp_path))
    assert (outcome.code, outcome.err) == (0, f"removed {there}\n")
    assert (there.exists(), (kernels / "belljar").exists()) == (False, True)
    assert belljar("jupyter", "remove", "--prefix", str(tmp_path)).code == 2
    assert belljar("jupyter", "remove", "--user").err == f"removed {kernels / 'belljar'}\n"


def test_options_are_kept_in_the_kernelspec(belljar: Run, kernels: Path, tmp_path: Path) -> None:
    options = ("--environment", "kernel:ir", "--sandbox", "process", "--on-server", "--display-name", "R, sealed")
    assert belljar("jupyter", "install", "--prefix", str(tmp_path), "--name", "sealed", *options).code == 0
    told = json.loads((tmp_path / "share/jupyter/kernels/sealed/kernel.json").read_text())
    assert told["env"] == {"BELLJAR_ENVIRONMENT": "kernel:ir", "BELLJAR_SANDBOX": "process"}
    assert told["display_name"] == "R, sealed"
    assert "--on-server" in told["argv"]


def test_a_kernel_of_others_is_neither_replaced_nor_removed(belljar: Run, kernels: Path) -> None:
    (kernels / "belljar").mkdir(parents=True)
    (kernels / "belljar/kernel.json").write_text('{"argv": ["other"]}')
    refused = belljar("jupyter", "install")
    assert (refused.code, refused.err.splitlines()[0]) == (2, f"error: {kernels / 'belljar'} holds another kernel")
    assert belljar("jupyter", "remove").code == 2
    assert (kernels / "belljar/kernel.json").read_text() == '{"argv": ["other"]}'


def test_what_is_not_installed_cannot_be_removed(belljar: Run, kernels: Path) -> None:
    outcome = belljar("jupyter", "remove", "--name", "tulip")
    assert outcome.code == 2
    assert outcome.err.splitlines() == ["error: no Jupyter kernel is named 'tulip'", "hint: Ours are: none"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--user", "--sys-prefix"), "exclude each other"),
        (("--sandbox", "cardboard"), "cardboard"),
        (("--name", "../up"), "cannot name a kernel"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    belljar: Run, kernels: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    outcome = belljar("jupyter", "install", *arguments)
    assert (outcome.code, complaint in outcome.err) == (2, True)
    assert not kernels.exists()


def test_without_ipykernel_it_is_said_what_to_install(
    belljar: Run, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python does with a module that was marked as not to be found.
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    outcome = belljar("jupyter", "install")
    assert outcome.code == 1
    assert "pip install 'belljar-mcp[jupyter]'" in outcome.err
