from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def _sandbox(belljar: Run) -> str:
    (line,) = [line for line in belljar("config").out.splitlines() if line.startswith("sandbox ")]
    return line


def test_a_folder_is_trusted_until_its_file_changes_or_trust_is_taken_back(belljar: Run, place: Path) -> None:
    file = place / "belljar.toml"
    file.write_text('sandbox = "process"\nmax_queue = 3\n')
    told = belljar("config")
    assert f"not read, because it is not trusted: {file}; belljar trust {file}\n" in told.err
    assert f"\nread: {file}" not in told.err
    assert '"namespace"' in _sandbox(belljar)

    assert belljar("trust").err == f"trusted until it changes: {file}, which sets sandbox, max_queue\n"
    assert f"read: {file}\n" in belljar("config").err
    assert "not trusted" not in belljar("config").err
    assert _sandbox(belljar).split() == ["sandbox", '"process"', str(file)]
    assert str(file) in belljar("trust", "--list").out

    file.write_text('sandbox = "process"\n')
    assert '"namespace"' in _sandbox(belljar)
    belljar("trust", str(place))
    assert belljar("trust", "--remove").err == f"no longer trusted: {file}\n"
    assert '"namespace"' in _sandbox(belljar)
    assert belljar("trust", "--remove").err == f"was not trusted: {file}\n"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "is not there"), ("sandbox = ", "is not TOML"), ("x = 1", "unknown")]
)
def test_what_cannot_be_obeyed_is_not_trusted(belljar: Run, place: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (place / "belljar.toml").write_text(content)
    outcome = belljar("trust")
    assert (outcome.code, reason in outcome.err) == (2, True)
    assert belljar("trust", "--list").out == "{}\n"


def test_a_file_of_variables_is_trusted_by_its_path_and_no_value_is_printed(belljar: Run, place: Path) -> None:
    file = place / ".env"
    file.write_text("MADE_UP_KEY=s3cret\nOTHER=1\n")
    assert belljar("trust", ".env").err == f"trusted until it changes: {file}, which sets MADE_UP_KEY, OTHER\n"
    assert str(file) in belljar("trust", "--list").out
    assert belljar("trust", "--remove", str(file)).err == f"no longer trusted: {file}\n"
