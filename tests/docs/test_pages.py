"""What the documentation says is there: links, commands with their flags, variables, settings, files, formats."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_pages import (
    ROOT,
    Snippet,
    anchors,
    assigned,
    commands,
    links,
    named_commands,
    of_page,
    pages,
    shell_text,
    snippets,
    text_of,
    without_assignments,
)
from typer import _click as click
from typer.core import TyperGroup

from belljar.cli import application
from belljar.policy.guardrails import parse_policy
from belljar.privacy.rules import PrivacyRules
from belljar.settings import Settings
from belljar.settings.sources import ALIASES, SECRETS, parse_config, variable
from belljar.toolbox.server_config import read_file
from belljar.workflows.definition import OWN_TYPES
from belljar.workflows.library import Library
from belljar.workflows.source_text import read_text

VARIABLES = {variable(name) for name in Settings.model_fields} | {*ALIASES.values(), "BELLJAR_CONFIG"}
KEPT_ELSEWHERE = {"BELLJAR_URL", "BELLJAR_MEMORY", "BELLJAR_LONG", "BELLJAR_SOAK", "BELLJAR_EXAMPLES"}
"""Variables of scripts and of the compose file, not of the server."""


@pytest.fixture(scope="module")
def belljar() -> TyperGroup:
    return application()


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {link}, which is not there"
        if anchor and path.suffix == ".md":
            known = anchors(str(path.resolve().relative_to(ROOT)))
            assert anchor in known, f"{page} links to {link}; the page has {sorted(known)}"


def test_every_page_is_in_the_index_and_in_the_list_for_models() -> None:
    inside = [link.partition("#")[0] for link in links("docs/README.md") if not re.match(r"[a-z]+:", link)]
    index = {str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in inside}
    for_models = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())}
    written = {page for page in pages() if page.startswith("docs/")} - {"docs/README.md"}
    assert written <= index
    assert written <= for_models
    assert all((ROOT / link).exists() for link in for_models if not re.match(r"[a-z]+:", link))


# Commands


@pytest.mark.parametrize("snippet", snippets("sh", "console"), ids=lambda snippet: snippet.place)
def test_shell_blocks_are_shell_and_call_what_there_is(snippet: Snippet, belljar: TyperGroup) -> None:
    text = shell_text(snippet)
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    for words in commands(text):
        for name in assigned(words):
            if name.startswith("BELLJAR_") and not name.startswith(SECRETS):
                assert name in VARIABLES | KEPT_ELSEWHERE, f"{snippet.place}: there is no variable {name}"
        check_command(belljar, without_assignments(words), snippet.place)


@pytest.mark.parametrize("page", [page for page in pages() if page != "CHANGELOG.md"])
def test_commands_named_in_the_text_exist(page: str, belljar: TyperGroup) -> None:
    for command in named_commands(page):
        if not re.search(r"[…|]|\.\.\.", command):
            for words in commands(command):
                check_command(belljar, words, f"{page}: `{command}`", may_lack_arguments=True)


def check_command(belljar: TyperGroup, words: list[str], place: str, *, may_lack_arguments: bool = False) -> None:
    """Check a command if it is one of ours; of `docker run … belljar WORDS`, what the container is told."""
    if not words:
        return
    program, *arguments = words
    if program in ("opentelemetry-instrument", "sudo", "exec"):
        check_command(belljar, arguments, place, may_lack_arguments=may_lack_arguments)
    elif program == "uvx" and (named := {"belljar", "belljar-mcp"}.intersection(arguments)):
        check_call(belljar, arguments[arguments.index(named.pop()) + 1 :], place, may_lack_arguments)
    elif program in ("docker", "podman") and "run" in arguments and "belljar" in arguments:
        check_call(belljar, arguments[arguments.index("belljar") + 1 :], place, may_lack_arguments=True)
    elif Path(program).name == "belljar":
        check_call(belljar, arguments, place, may_lack_arguments)
    elif re.match(r"(\./)?(scripts|bench)/", program):
        assert (ROOT / program).exists(), f"{place}: there is no {program}"
    elif program in ("python", "python3") and arguments and arguments[0].startswith("examples/"):
        assert (ROOT / arguments[0]).exists(), f"{place}: there is no {arguments[0]}"
    elif program == "pip" or words[:3] == ["uv", "tool", "install"]:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"belljar-mcp\[([a-z,]+)\]", " ".join(arguments)):
            assert {*extra.split(",")} <= {*known}, f"{place}: there is no extra {extra}"


def check_call(belljar: TyperGroup, arguments: list[str], place: str, may_lack_arguments: bool) -> None:
    command: Any = belljar
    context = command.context_class(command, info_name="belljar")
    words = [*arguments]
    while isinstance(command, TyperGroup):
        if not words or words[0].startswith("-"):
            break
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{place}: there is no command {name}"
        # Commands are imported when their arguments are parsed: this parses none, so that we get the real one.
        context = found.make_context(name, [], parent=context, resilient_parsing=True)
        command = context.command
    try:
        chosen, rest, _ = command.make_parser(context).parse_args(words)
    except click.exceptions.UsageError as error:
        pytest.fail(f"{place}: {error.format_message()}")
    assert not rest or isinstance(command, TyperGroup) or command.allow_extra_args, f"{place}: {rest} is too much"
    if not may_lack_arguments and not isinstance(command, TyperGroup) and not chosen.get("help"):
        missing = [p.name for p in command.params if p.required and not chosen.get(p.name)]
        assert not missing, f"{place}: {missing} is missing"


# Files and messages


@pytest.mark.parametrize("snippet", snippets("toml"), ids=lambda snippet: snippet.place)
def test_toml_blocks_are_settings_policies_or_packages(snippet: Snippet, tmp_path: Path) -> None:
    values = tomllib.loads(snippet.text)
    if "project" in values:
        assert values["project"]["name"]
    elif values.keys() <= Settings.model_fields.keys():
        parse_config(Settings, tmp_path / "belljar.toml", snippet.text.encode())
        Settings(**values)
    else:
        parse_policy(snippet.text, snippet.place, {"privacy": PrivacyRules})


@pytest.mark.parametrize("snippet", snippets("json"), ids=lambda snippet: snippet.place)
def test_json_blocks_are_json_and_servers_are_ones_that_can_be_started(
    snippet: Snippet, tmp_path: Path, belljar: TyperGroup
) -> None:
    value = json.loads(snippet.text)
    if "mcpServers" not in value:
        return
    (tmp_path / "servers.json").write_text(snippet.text)
    variables = dict.fromkeys(re.findall(r"\$\{(\w+)\}", snippet.text), "x")
    assert read_file(tmp_path / "servers.json", variables).keys() == value["mcpServers"].keys()
    for entry in value["mcpServers"].values():
        check_command(belljar, [entry.get("command", ""), *entry.get("args", [])], snippet.place)
        assert {name for name in entry.get("env", {}) if name.startswith("BELLJAR_")} <= VARIABLES


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=lambda snippet: snippet.place)
def test_yaml_blocks_are_workflows_or_files_of_others(snippet: Snippet) -> None:
    value = yaml.safe_load(snippet.text)
    if isinstance(value, dict) and "steps" not in value:
        assert value.keys() & {"scrape_configs", "services"}, f"{snippet.place}: what is this?"
        return
    steps = snippet.text if isinstance(value, dict) else "name: part\nsteps:\n" + indented(snippet.text)
    definition = Library(None, {kind.name: kind for kind in OWN_TYPES}).from_text(steps)
    assert definition.steps
    assert read_text(steps)


def indented(text: str) -> str:
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))


def test_the_compose_file_says_what_the_guide_says() -> None:
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["belljar"]
    assert {name for name in service["environment"] if name.startswith("BELLJAR_")} <= VARIABLES
    assert (ROOT / "deploy" / service["security_opt"][0].removeprefix("seccomp=")).exists()
    assert all(option.startswith("127.0.0.1:") for option in service["ports"])


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    first = next(snippet for snippet in of_page("README.md", "sh") if "scripts/test" in snippet.text)
    assert [words[0] for words in commands(first.text) if words] == ["scripts/serve", "scripts/test"]
    assert "\nscripts/test && exit\n" in (ROOT / ".ci/run").read_text()


def test_the_map_for_changes_names_files_that_exist_and_few_of_them() -> None:
    text = text_of("CONTRIBUTING.md").partition("\n## To change X, open Y\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 50
    missing, long = list[str](), list[str]()
    for row in rows:
        names = dict.fromkeys(re.findall(r"`([\w./-]+(?:\.py|\.md|\.js|\.html|\.txt|/))`", row))
        # A bare name lies in the folder of one before it; some lie in the package itself.
        folders = [ROOT, ROOT / "src/belljar"]
        for name in names:
            found = next((folder / name for folder in reversed(folders) if (folder / name).exists()), None)
            if found is None:
                missing.append(f"{name}: {row[:60]}")
            else:
                folders.append(found if name.endswith("/") else found.parent)
        if len(names) > 6:
            long.append(row[:60])
    assert missing == []
    assert long == [], "an idea that needs more than six files has no home"


def test_pictures_of_pages_are_whole_and_say_what_they_show() -> None:
    shown = {link for page in pages() for link in re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", text_of(page))}
    assert shown
    for link in shown:
        assert Path(link).name in {path.name for path in (ROOT / "docs/pictures").glob("*.svg")}


@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
def test_jq_finds_a_session_in_a_units_log_as_the_page_says() -> None:
    page = (ROOT / "docs/guides/deploying.md").read_text()
    (program,) = re.findall(r"journalctl -u belljar -o cat \| jq -cR '([^']+)'", page)
    wanted, other = ({"message": "session created", "session_id": name} for name in ("laor", "else"))
    # As `-o cat` prints them: systemd's own lines are there too, and the priority of ours is not.
    lines = ["Started belljar.service.", json.dumps(wanted), "42", json.dumps(other), json.dumps({"message": "no id"})]
    command = ["jq", "-cR", program.replace("…", "laor")]
    found = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert (found.returncode, [json.loads(line) for line in found.stdout.splitlines()]) == (0, [wanted]), found.stderr


def test_every_unit_for_systemd_delegates_its_control_group() -> None:
    texts = {
        path: path.read_text()
        for path in [*(ROOT / "deploy").iterdir(), *(ROOT / "docs").rglob("*.md")]
        if path.is_file()
    }
    units = {path: text for path, text in texts.items() if re.search(r"^ExecStart=.*belljar", text, re.MULTILINE)}
    assert ROOT / "deploy/belljar.service" in units
    assert [path for path, text in units.items() if not re.search(r"^Delegate=", text, re.MULTILINE)] == []
