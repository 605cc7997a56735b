"""Commands as people type them, run in the test's own process, in a folder where nothing is set."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from belljar.cli import main
from belljar.settings.sources import ALIASES


@dataclass
class Outcome:
    """What a command gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory inside an empty home, and nothing set."""
    for name in os.environ:
        if name.startswith("BELLJAR_") or name in ("CLAUDE_CONFIG_DIR", *ALIASES.values()):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / ".local" / "share"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def belljar(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command as the console script does."""

    def run(*arguments: str) -> Outcome:
        code = _exit_code(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def _exit_code(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)
