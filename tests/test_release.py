"""What a release says of itself: links of the README that work on a package index, and the addresses beside it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """`hatch_build.py`, without hatchling, which only builds have."""
    source = (ROOT / "hatch_build.py").read_text("utf-8")
    source = source.replace("from hatchling.metadata.plugin.interface import MetadataHookInterface", "")
    module = ModuleType("release_metadata")
    exec(compile(source.replace("(MetadataHookInterface)", ""), "hatch_build.py", "exec"), module.__dict__)
    return module


def test_links_lead_to_the_files_of_that_version(hook: ModuleType) -> None:
    text = hook.readme((ROOT / "README.md").read_text("utf-8"), "https://example.com/belljar", "1.2")
    links = re.findall(r"\]\(([^)]+)\)", text)
    ours = [link for link in links if "example.com" in link]
    assert ours
    assert all(link.startswith(("https:", "http:", "#")) for link in links)
    for link in ours:
        path = re.sub(r"^https://example.com/belljar/(blob|raw)/v1.2/", "", link).partition("#")[0]
        assert (ROOT / path).exists(), link


def test_pictures_are_the_files_of_that_version_and_are_left_out_without_an_address(hook: ModuleType) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    shown = hook.readme(text, "https://example.com/belljar", "1.2")
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", shown) + re.findall(r'\bsrc(?:set)?="([^"]+)"', shown)
    assert len(pictures) >= 3
    for picture in pictures:
        path = ROOT / picture.removeprefix("https://example.com/belljar/raw/v1.2/")
        assert path.is_file(), picture
        assert path.stat().st_size <= 150_000, picture
    assert not re.search(r"!\[|<picture|<img|!An agent", hook.readme(text, "", "1.2"))


def test_without_an_address_there_are_no_dead_links(hook: ModuleType) -> None:
    assert hook.readme("[a](docs/a.md) [b](https://b) [c](#c)", "", "1") == "a [b](https://b) [c](#c)"
    assert hook.urls("", "1") == {}
    assert hook.urls("https://x", "1")["Changelog"] == "https://x/blob/v1/CHANGELOG.md"


def test_the_sdist_has_what_the_tests_and_the_scripts_need() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {f"/{name}" for name in ("src", "tests", "docs", "scripts", "examples", "bench", "deploy")} <= {*included}
    assert all((ROOT / name.lstrip("/")).exists() for name in included)
    assert f"Programming Language :: Python :: 3.{sys.version_info[1]}" in table["project"]["classifiers"]


NAMESPACES = {"azure": "azure-identity"}
"""Packages that several distributions share, and the one of them that is imported."""
INSTALLED_WITH_EXTRAS = {"microsandbox", "rattler", "pynvml", "ipykernel"}
"""Of extras, which the tests may lack."""


def third_party_imports(source: Path) -> set[str]:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").partition(".")[0])
    return imported - sys.stdlib_module_names - {"belljar", "_typeshed"}


def test_whatever_the_server_imports_is_declared() -> None:
    """Not `inside/`, which runs on the packages of sessions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    declared = {canonicalize_name(Requirement(each).name) for each in listed}
    distributions = packages_distributions()
    undeclared: set[tuple[str, str]] = set()
    for source in (ROOT / "src" / "belljar").rglob("*.py"):
        if "inside" in source.relative_to(ROOT / "src" / "belljar").parts:
            continue
        for name in third_party_imports(source):
            found = {NAMESPACES[name]} if name in NAMESPACES else {*distributions.get(name, [name])}
            if not declared & {*map(canonicalize_name, found)} and name not in INSTALLED_WITH_EXTRAS:
                undeclared.add((name, source.name))
    assert undeclared == set()
