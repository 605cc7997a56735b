"""The package is `belljar-mcp`: `belljar` on PyPI is another project, and nothing we write may install that one."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT

EXTRAS = "|".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
INSTALLERS = r"(?:pip3? install|uv add|tool install|tool run|pipx install|pipx run|uvx|--with)"
MISTAKES = re.compile(
    rf"{INSTALLERS}\s+(?:-\S+\s+)*['\"]?belljar(?![\w.-])"  # what an installer is told
    rf"|\bbelljar\[(?:{EXTRAS})\b"
    r"|dependencies = \[\s*['\"]belljar['\"\[<>=~]"
    r"|\b(?:version|distribution|requires)\(['\"]belljar['\"]\)"  # of importlib.metadata
)
FOLDERS = ("src", "docs", "examples", "deploy", "scripts", "bench", "tests", ".ci")
TEXT = {"", ".md", ".py", ".toml", ".txt", ".yaml", ".json", ".html", ".js", ".mjs", ".service", ".bicep", ".sample"}


def written() -> Iterator[tuple[str, str]]:
    files = [*ROOT.glob("*"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    for file in files:
        if file.is_file() and file.suffix in TEXT and "node_modules" not in file.parts and file != Path(__file__):
            yield str(file.relative_to(ROOT)), file.read_text("utf-8", errors="replace")


def test_nothing_that_we_write_installs_the_other_projects_package() -> None:
    found = [
        f"{path}: {text[at.start() : at.end() + 20]}" for path, text in written() for at in MISTAKES.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install belljar",
        "uv tool install belljar`",
        "uvx belljar serve",
        "belljar[azure]",
        'dependencies = ["belljar"]',
    ],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert MISTAKES.search(line)


@pytest.mark.parametrize(
    "line", ["pip install belljar-mcp", "uvx --from . belljar serve", "pip install belljar-polite"]
)
def test_the_search_lets_pass_what_is_right(line: str) -> None:
    assert not MISTAKES.search(line)
