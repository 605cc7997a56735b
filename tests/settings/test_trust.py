"""The `belljar.toml` of a working directory is anybody's: it tightens, until the user trusts what it says."""

import os
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from belljar import settings as table
from belljar.errors import SettingsError
from belljar.settings import Settings, explain, load_settings
from belljar.settings.fields import kind
from belljar.settings.sources import ALIASES
from belljar.settings.tightening_rules import FEWER, HIGHER, MORE, NEVER, OFF, ON, rule_of
from provider_packages import packages_on_path
from trusted_settings import write_trusted

HOSTILE = 'sandbox = "process"\negress = ["evil.example:443"]\n[mcp_servers.x]\ncommand = "/bin/sh"\n'


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, a home and an environment in which nothing is set."""
    for name in os.environ:
        if name.startswith("BELLJAR_") or name in ALIASES.values():
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def own_file(text: str) -> Path:
    file = table.config_files()[-1]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def ignored() -> list[str]:
    return [line.name for line in explain() if line.ignored]


def looser_values(field: FieldInfo) -> list[str]:
    """Values, as TOML, that an untrusted file must not get through with; those of another setting's among them."""
    rule, default, written = (
        rule_of(field) or NEVER,
        field.get_default(call_default_factory=True),
        kind(field.annotation),
    )
    if written in (int, float):
        if default is None:
            return []  # no limit is the loosest
        return [str(written(default / 2))] if rule is HIGHER else [str(written(default * 2 + 1))]
    if written is list:
        return [] if rule is MORE else ['["evil.example:443"]']
    if written is dict:
        return ["{x = {command = 'sh', kind = 'system'}}"]
    if written is bool:
        return [
            choice for choice, value in (("true", True), ("false", False)) if rule is NEVER or value is not STRICT[rule]
        ]
    return ['"process"', '"on"', '"open"', '"/bin/sh"']


STRICT = {ON: True, OFF: False}


SECRET = ("api_keys", "azure_key")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_decided_what_an_untrusted_file_may_do(name: str) -> None:
    field = Settings.model_fields[name]
    assert rule_of(field), f"table.py must say what a file that is not trusted may do to {name}: NEVER, LOWER, …"


def test_no_setting_is_loosened_by_an_untrusted_file() -> None:
    before = load_settings()
    looser = {name: looser_values(field) for name, field in Settings.model_fields.items() if name not in SECRET}
    # A file has one value of each setting: the settings do not depend on each other, and reading a file takes long.
    for index in range(max(map(len, looser.values()))):
        said = {name: values[index] for name, values in looser.items() if index < len(values)}
        Path("belljar.toml").write_text("".join(f"{name} = {value}\n" for name, value in said.items()))
        settings = load_settings()
        for name, value in said.items():
            then, now = getattr(before, name), getattr(settings, name)
            is_fewer = rule_of(Settings.model_fields[name]) is FEWER and set(now) < set(then)
            assert now == then or is_fewer, f"{name} = {value}"
        # What is not named as ignored is a choice of two that was so already.
        assert all(isinstance(getattr(before, name), bool) for name in said.keys() - {*ignored()})


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_in_an_untrusted_file_is_refused(name: str) -> None:
    for value in looser_values(Settings.model_fields[name]):
        Path("belljar.toml").write_text(f"{name} = {value}\n")
        with pytest.raises(SettingsError, match="plain text"):
            load_settings()


@pytest.mark.parametrize(
    ("own", "theirs", "name", "value", "is_ignored"),
    [
        ("", "max_queue = 3", "max_queue", 3, False),
        ("max_queue = 2", "max_queue = 3", "max_queue", 2, True),
        ("memory_mb = 'none'", "memory_mb = 9000", "memory_mb", 9000, False),
        ("", "memory_mb = 'none'", "memory_mb", 2048, True),
        ("", "cpus = 0.5", "cpus", 0.5, False),
        ("", "session_idle_s = nan", "session_idle_s", 1800, True),
        ("", "memory_headroom_mb = 1", "memory_headroom_mb", 256, True),
        ("sandbox = 'process'", "sandbox = 'namespace'", "sandbox", "namespace", False),
        ("", "sandbox = 'container'", "sandbox", "namespace", True),
        ("", "sandbox = 'gvisor'", "sandbox", "gvisor", False),
        ("", "sandbox = 'acme'", "sandbox", "namespace", True),
        ("sandbox = 'process'", "sandbox = 'acme'", "sandbox", "process", True),
        ("egress = ['a.example:443', 'b.example:443']", "egress = []", "egress", [], False),
        (
            "egress = ['a.example:443']",
            "egress = ['a.example:443', 'c.example:443']",
            "egress",
            ["a.example:443"],
            True,
        ),
        (
            "blocked_patterns = ['os.system']",
            "blocked_patterns = ['eval']",
            "blocked_patterns",
            ["os.system", "eval"],
            0,
        ),
        ("guardrails_strict = true", "guardrails_strict = false", "guardrails_strict", True, True),
        ("", "allow_network_access = false", "allow_network_access", False, False),
        ("metrics = 'open'", "metrics = 'off'", "metrics", "off", False),
        ("", "keep_days = 0.001", "keep_days", 7, True),
        ("", "journal_mb = 16", "journal_mb", 4096, True),
    ],
)
def test_an_untrusted_file_tightens_what_the_users_own_says_and_loosens_nothing(
    own: str, theirs: str, name: str, value: object, is_ignored: bool
) -> None:
    own_file(own)
    Path("belljar.toml").write_text(theirs)
    assert getattr(load_settings(), name) == value
    assert ignored() == ([name] if is_ignored else [])


@pytest.mark.parametrize("theirs", ["process", "namespace", "microvm", "other"])
def test_an_untrusted_file_neither_chooses_nor_leaves_a_sandbox_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    packages = packages_on_path(tmp_path / "packages", monkeypatch)
    packages.bring("acme")
    packages.bring("other")
    own_file("sandbox = 'acme'")
    Path("belljar.toml").write_text(f"sandbox = '{theirs}'")
    assert load_settings().sandbox == "acme"
    assert ignored() == ["sandbox"]


def test_what_is_ignored_is_named_once_with_the_command_that_changes_it(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (work / "belljar.toml").write_text(HOSTILE)
    assert load_settings().sandbox == "namespace"
    load_settings()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "belljar.settings"]
    assert str(work / "belljar.toml") in line
    assert "ignored sandbox, egress, mcp_servers." in line
    assert line.endswith(f"belljar trust {work}")


def test_a_trusted_file_is_obeyed_until_it_changes(work: Path) -> None:
    file = write_trusted(HOSTILE)
    assert (load_settings().sandbox, [*load_settings().mcp_servers]) == ("process", ["x"])
    file.write_text(f"{HOSTILE}args = ['-c', 'id']\n")
    assert (load_settings().sandbox, load_settings().mcp_servers) == ("namespace", {})


def test_trust_is_in_one_folder_not_in_its_copies_or_links(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_trusted(HOSTILE)
    elsewhere = work.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "belljar.toml").symlink_to(file)
    monkeypatch.chdir(elsewhere)
    assert load_settings().sandbox == "namespace"
    by_another_name = work.parent / "link"
    by_another_name.symlink_to(work)
    monkeypatch.chdir(by_another_name)
    assert load_settings().sandbox == "process"


def test_the_users_own_file_and_one_that_a_variable_names_need_no_trust(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_file(HOSTILE).parent)
    assert load_settings().sandbox == "process"
    monkeypatch.chdir(work)
    own_file("")
    (work / "mine.toml").write_text(HOSTILE)
    monkeypatch.setenv("BELLJAR_CONFIG", "mine.toml")
    assert load_settings().sandbox == "process"


def test_a_list_of_trusted_files_that_others_may_write_counts_for_nothing(work: Path) -> None:
    write_trusted(HOSTILE)
    trusted = table.config_files()[-1].with_name("trusted.json")
    assert trusted.stat().st_mode & 0o777 == 0o600
    trusted.chmod(0o666)
    assert load_settings().sandbox == "namespace"


def test_a_folder_of_settings_that_is_relative_is_not_the_working_directorys(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    (work / "config" / "belljar").mkdir(parents=True)
    (work / "config" / "belljar" / "belljar.toml").write_text(HOSTILE)
    assert load_settings().sandbox == "namespace"


def test_variables_in_a_dotenv_file_are_nobodys(work: Path) -> None:
    (work / ".env").write_text("BELLJAR_SANDBOX=process\nSANDBOX=process\n")
    assert load_settings().sandbox == "namespace"


@pytest.mark.parametrize("is_pipe", [True, False])
def test_what_is_no_file_is_refused_and_not_waited_for(work: Path, is_pipe: bool) -> None:
    if is_pipe:
        os.mkfifo(work / "belljar.toml")
    else:
        (work / "belljar.toml").symlink_to("/dev/zero")
    with pytest.raises(SettingsError, match=r"belljar\.toml cannot be read"):
        load_settings()
