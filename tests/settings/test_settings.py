import os
from pathlib import Path

import pytest

from belljar import settings as table
from belljar.errors import SettingsError
from belljar.sandboxes.limits.table import LIMITS
from belljar.settings import ApiKey, Settings, explain, hash_key, load_settings, parse_key
from belljar.settings.fields import allowed
from belljar.settings.sources import ALIASES
from belljar.settings.trust import trust
from trusted_settings import write_trusted

DIGEST = hash_key("hunter2")


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, a home and an environment in which nothing is set."""
    for name in os.environ:
        if name.startswith("BELLJAR_") or name in ALIASES.values():
            monkeypatch.delenv(name)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(work)
    return tmp_path


def write_user_file(place: Path, text: str) -> Path:
    path = place / "user" / "belljar" / "belljar.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def origin_of(name: str, flags: dict[str, object] | None = None) -> tuple[object, str]:
    (line,) = [line for line in explain(flags or {}) if line.name == name]
    return line.value, line.origin


def refusal(flags: dict[str, object] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags or {})
    return caught.value


def test_each_source_wins_over_the_one_below_it_and_is_named(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert origin_of("max_sessions") == (64, "default")
    user_file = write_user_file(empty_place, "max_sessions = 1")
    assert origin_of("max_sessions") == (1, str(user_file))
    write_trusted("max_sessions = 2")
    assert origin_of("max_sessions") == (2, str(empty_place / "work" / "belljar.toml"))
    monkeypatch.setenv("BELLJAR_MAX_SESSIONS", "3")
    assert origin_of("max_sessions") == (3, "BELLJAR_MAX_SESSIONS")
    assert origin_of("max_sessions", {"max_sessions": 4}) == (4, "--max-sessions")
    assert load_settings({"max_sessions": 4}).max_sessions == 4


def test_a_flag_that_is_none_was_not_given() -> None:
    assert origin_of("sandbox", {"sandbox": None}) == ("namespace", "default")


def test_the_config_variable_replaces_the_file_of_the_working_directory_only(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_user_file(empty_place, "max_queue = 7")
    write_trusted("max_sessions = 2")
    other = empty_place / "other.toml"
    other.write_text('structured = "never"')
    monkeypatch.setenv("BELLJAR_CONFIG", str(other))
    settings = load_settings()
    assert (settings.max_queue, settings.max_sessions, settings.structured) == (7, 64, "never")


def test_a_config_variable_that_names_no_file_is_refused(empty_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_CONFIG", str(empty_place / "none.toml"))
    assert str(empty_place / "none.toml") in refusal().message


def test_log_level_stands_in_for_ours_in_any_case_and_loses_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert origin_of("log_level") == ("DEBUG", "LOG_LEVEL")
    monkeypatch.setenv("BELLJAR_LOG_LEVEL", "Error")
    assert origin_of("log_level") == ("ERROR", "BELLJAR_LOG_LEVEL")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("GUARDRAILS_ENABLED", "false", "guardrails", False),
        ("GUARDRAILS_STRICT_MODE", "true", "guardrails_strict", True),
        ("BLOCKED_PATTERNS", "os.system, eval(", "blocked_patterns", ["os.system", "eval("]),
        ("ALLOW_NETWORK_ACCESS", "false", "allow_network_access", False),
        ("ALLOWED_NETWORKS", "a.example.com:443,b.example.com:80", "egress", ["a.example.com:443", "b.example.com:80"]),
        ("MAX_EXECUTION_TIME", "30", "execution_timeout_s", 30.0),
        ("MAX_MEMORY_MB", "512", "memory_mb", 512),
        ("WORKSPACE_DIR", "/srv/work", "workspace_directory", "/srv/work"),
        ("SERVERS_DIR", "/srv/servers", "servers_directory", "/srv/servers"),
        ("SKILLS_DIR", "/srv/skills", "skills_directory", "/srv/skills"),
    ],
)
def test_names_of_guardrails_elsewhere_stand_in_for_ours(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert origin_of(name) == (value, variable)
    monkeypatch.setenv(variable, "[")
    if name != "blocked_patterns" and not name.endswith("_directory"):
        assert variable in refusal({}).message


def test_log_level_wins_over_a_file_as_any_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    write_trusted('log_level = "error"')
    monkeypatch.setenv("LOG_LEVEL", "warn")
    assert origin_of("log_level") == ("WARNING", "LOG_LEVEL")


def test_lists_in_variables_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_ALLOWED_HOSTS", "one.example, two.example:8000,")
    assert load_settings().allowed_hosts == ["one.example", "two.example:8000"]


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_MAX_SESSIONS", "")
    monkeypatch.setenv("LOG_LEVEL", "")
    assert load_settings() == load_settings({"max_sessions": 64, "log_level": "INFO"})


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("max_sessions = 0", "max_sessions", "0"),
        ('max_sessions = "many"', "max_sessions", '"many"'),
        ("max_sessions = true", "max_sessions", "true"),
        ('max_queue = "3"', "max_queue", '"3"'),
        ("session_idle_s = -1", "session_idle_s", "-1"),
        ("session_idle_s = inf", "session_idle_s", "Infinity"),
        ("output_budget_chars = 199", "output_budget_chars", "199"),
        ('sandbox = "vm"', "sandbox", '"vm"'),
        ("surfaces = []", "surfaces", "[]"),
        ('surfaces = "interpreter"', "surfaces", '"interpreter"'),
        ("http = 8000", "http", "8000"),
        ('http = "8000"', "http", '"8000"'),
        ('http = "::1:8000"', "http", '"::1:8000"'),
        ('http = "localhost:65536"', "http", '"localhost:65536"'),
        ("allowed_hosts = [1]", "allowed_hosts", "[1]"),
        ("max_queue = 2026-01-01", "max_queue", "2026-01-01"),
        ('preload = ["numpy", "not a module"]', "preload", "'not a module' is no module name"),
        ('preload = ["numpy."]', "preload", "'numpy.'"),
        ('preload = ["os; import sys"]', "preload", "'os; import sys'"),
        ('preload = ["class"]', "preload", "'class'"),
        ('preload = [""]', "preload", "''"),
        ('preload = "numpy"', "preload", '"numpy"'),
        ("pool_size = 65", "pool_size", "more than max_sessions, which is 64"),
        ("pool_size = 9\nmax_sessions = 8", "pool_size", "more than max_sessions, which is 8"),
        ("pool_size = -1", "pool_size", "-1"),
        ("checkpoints = -1", "checkpoints", "-1"),
        ("checkpoint_memory_mb = 0", "checkpoint_memory_mb", "0"),
        ('on_death = "rise"', "on_death", '"rise"'),
        ('on_death = "rewind"\ncheckpoints = 0', "on_death", "because checkpoints is 0"),
    ],
)
def test_a_wrong_value_in_a_file_names_setting_value_file_and_what_is_allowed(
    empty_place: Path, line: str, name: str, value: str
) -> None:
    write_trusted(line)
    error = refusal()
    assert error.message.startswith(f"{name} = ")
    assert value in error.message
    assert str(empty_place / "work" / "belljar.toml") in error.message
    assert error.hint == f"{name} takes {allowed(Settings, name)}"


def test_a_wrong_value_elsewhere_names_its_variable_or_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--max-queue" in refusal({"max_queue": 0}).message
    assert "--surface:" in refusal({"surfaces": ["everything"]}).message
    monkeypatch.setenv("BELLJAR_MAX_QUEUE", "few")
    assert '"few" from BELLJAR_MAX_QUEUE' in refusal().message


def test_an_unknown_key_is_refused_with_the_likely_one(empty_place: Path) -> None:
    write_trusted("max_sesions = 3")
    error = refusal()
    assert error.message == f"unknown setting max_sesions from {empty_place / 'work' / 'belljar.toml'}"
    assert error.hint == "Did you mean max_sessions?"
    Path("belljar.toml").unlink()
    assert refusal({"htpp": "x:1"}).message == "unknown setting htpp from --htpp"


@pytest.mark.parametrize("content", [b"max_sessions = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_by_name(content: bytes) -> None:
    Path("belljar.toml").write_bytes(content)
    trust(Path("belljar.toml"), content)
    assert str(Path("belljar.toml").absolute()) in refusal().message


def test_what_is_allowed_is_told_in_words() -> None:
    assert allowed(Settings, "max_sessions") == "a whole number, at least 1"
    assert allowed(Settings, "session_idle_s") == "a number, above 0"
    assert allowed(Settings, "structured") == '"auto" or "always" or "never"'
    assert allowed(Settings, "oauth_scopes") == "a list of text"


@pytest.mark.parametrize("address", ["", "127.0.0.1:8000", "localhost:0", "[::1]:8000", "host.example:65535"])
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert load_settings({"http": address}).http == address


def test_folders_become_absolute_and_the_home_is_filled_in(empty_place: Path) -> None:
    settings = load_settings({"data_directory": "~/data", "download_directory": "down"})
    assert settings.data_directory == empty_place / "home" / "data"
    assert settings.download_directory == empty_place / "work" / "down"


def test_keys_come_in_three_forms_and_are_known_by_hash() -> None:
    assert parse_key("hunter2") == ApiKey(f"key-{DIGEST[:8]}", DIGEST)
    assert parse_key("alice:hunter2") == ApiKey("alice", DIGEST)
    assert parse_key(f"alice:sha256:{DIGEST.upper()}") == ApiKey("alice", DIGEST)


@pytest.mark.parametrize("entry", ["alice:", ":hunter2", "al ice:hunter2", "alice:sha256:abc", f"sha256:{DIGEST}"])
def test_a_key_that_is_malformed_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv("BELLJAR_API_KEYS", entry)
    text = str(refusal())
    assert "BELLJAR_API_KEYS" in text
    assert "hunter2" not in text
    assert DIGEST not in text


def test_a_plain_key_in_a_file_is_refused_without_showing_it() -> None:
    write_trusted(f'api_keys = ["bob:sha256:{DIGEST}", "alice:hunter2"]')
    error = refusal()
    assert "belljar key" in error.hint
    assert "hunter2" not in str(error)


def test_a_hashed_key_in_a_file_is_accepted() -> None:
    write_trusted(f'api_keys = ["alice:sha256:{DIGEST}"]')
    assert [key.get_secret_value() for key in load_settings().api_keys] == [f"alice:sha256:{DIGEST}"]


def test_keys_are_masked_wherever_settings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_API_KEYS", f"hunter2,alice:hunter2,bob:sha256:{DIGEST}")
    assert origin_of("api_keys") == (["********", "alice:********", "bob:sha256:********"], "BELLJAR_API_KEYS")
    assert "hunter2" not in repr(load_settings())


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.sandbox = "process"  # pyright: ignore[reportAttributeAccessIssue]


def test_every_setting_says_what_it_is_for_in_one_sentence() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert ". " not in field.description, name


def test_a_variable_that_is_no_setting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_MAX_SESSION", "3")
    monkeypatch.setenv("BELLJAR_MAX_SESSIONS", "3")
    monkeypatch.setenv("BELLJAR_CONFIG", "")
    assert table.unknown_variables() == ["BELLJAR_MAX_SESSION"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_mb", 0),
        ("memory_mb", "0"),
        ("memory_mb", -1),
        ("memory_mb", 8),
        ("memory_mb", 10**12),
        ("cpus", 0),
        ("cpus", 0.0),
        ("cpus", -0.5),
        ("cpus", 0.001),
        ("cpus", float("nan")),
        ("cpus", float("inf")),
        ("max_processes", 0),
        ("max_processes", 1),
        ("disk_mb", 0),
        ("disk_mb", -5),
        ("temporary_mb", 0),
        ("temporary_mb", -1),
        ("max_open_files", 0),
        ("max_open_files", 3),
    ],
)
def test_a_limit_that_nothing_could_live_with_is_refused(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f'^{name} = .* it should be .*, or "none" for no limit') as caught:
        load_settings({name: value})
    assert ("a limit of 0 leaves nothing to work with" in caught.value.message) == (float(value) == 0)
    assert '"none"' in caught.value.hint


def test_a_pool_may_be_as_large_as_there_may_be_sessions() -> None:
    settings = load_settings({"pool_size": 3, "max_sessions": 3, "preload": ["os.path", "ünïcode"], "checkpoints": 0})
    assert (settings.pool_size, settings.preload, settings.on_death) == (3, ["os.path", "ünïcode"], "fresh")


@pytest.mark.parametrize("name", [limit.setting for limit in LIMITS])
@pytest.mark.parametrize("spelling", ["none", "None", " NONE ", None])
def test_a_limit_that_is_none_is_no_limit(name: str, spelling: str | None) -> None:
    assert getattr(load_settings({name: spelling}), name) is None


@pytest.mark.parametrize("name", [limit.setting for limit in LIMITS])
def test_no_limit_can_be_written_in_a_file_and_in_a_variable(
    empty_place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trusted(f'{name} = "none"')
    assert getattr(load_settings(), name) is None
    write_trusted(f"{name} = 100")
    monkeypatch.setenv(table.variable(name), "none")
    assert getattr(load_settings(), name) is None
    assert next(each.value for each in table.explain() if each.name == name) == "none"


def test_only_limits_may_be_none(empty_place: Path) -> None:
    assert load_settings({"max_sessions": None, "http": None}) == load_settings()
    for line in ('max_sessions = "none"', 'memory_mb = "much"', 'memory_mb = "100"'):
        write_trusted(line)
        assert "it has the wrong type" in refusal().message


def test_a_limit_of_zero_in_a_file_is_refused_with_what_to_write_instead(empty_place: Path) -> None:
    write_trusted("memory_mb = 0")
    error = refusal()
    assert error.message == (
        f"memory_mb = 0 from {Path('belljar.toml').absolute()}: a limit of 0 leaves nothing to work with: "
        'it should be 64 to 16,777,216, or "none" for no limit'
    )
    assert error.hint == 'memory_mb takes a whole number of megabytes from 64, or "none" for no limit'


GEO = '[environments.geo]\nkind = "venv"\npath = "/srv/geo"\n'


def test_environments_are_tables_and_those_of_both_files_count(empty_place: Path) -> None:
    write_user_file(empty_place, GEO)
    write_trusted('[environments.net]\nkind = "managed"\nrequirements = ["networkx"]\n')

    settings = load_settings()

    assert {name: entry.kind for name, entry in settings.environments.items()} == {"geo": "venv", "net": "managed"}
    assert origin_of("environments") == (
        {"geo": {"kind": "venv", "path": "/srv/geo"}, "net": {"kind": "managed", "requirements": ["networkx"]}},
        str(empty_place / "work" / "belljar.toml"),
    )


def test_environments_in_the_variable_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_ENVIRONMENTS", '{"host": {"kind": "system"}}')
    assert load_settings().environments["host"].kind == "system"
    monkeypatch.setenv("BELLJAR_ENVIRONMENTS", "host=system")
    assert "it is not JSON" in refusal().message
    monkeypatch.setenv("BELLJAR_ENVIRONMENTS", "[]")
    assert "it is not a JSON object" in refusal().message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('environments = "geo"', "it has the wrong type"),
        ('[environments.geo]\npath = "/x"', "geo: kind: Field required"),
        ('[environments.geo]\nkind = "nix"', "geo: kind: it should be 'venv'"),
        ('[environments.geo]\nkind = "venv"', "geo: kind venv needs a path"),
        ('[environments.geo]\nkind = "conda"', "geo: kind conda needs a path or a name as its path"),
        ('[environments.geo]\nkind = "venv"\npath = "/x"\npython = "3.12"', "geo: kind venv takes path, not python"),
        ('[environments.geo]\nkind = "managed"', "geo: kind managed takes either requirements or file"),
        ('[environments.geo]\nkind = "venv"\npaht = "/x"', "geo: paht: there is no such field"),
        ('[environments.default]\nkind = "system"', "default is the name of the one that is always there"),
        ('[environments."../x"]\nkind = "system"', "'../x' is no name"),
        ('[environments."kernel:x"]\nkind = "system"', "'kernel:x' is no name"),
    ],
)
def test_an_environment_that_is_none_is_named_with_what_is_wrong(text: str, reason: str) -> None:
    write_trusted(text)
    assert reason in refusal().message


def test_gpus_are_written_as_a_word_or_a_list_and_anything_else_is_refused(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings().gpus == load_settings({"gpus": "none"}).gpus == []
    write_user_file(empty_place, 'gpus = "all"\n[environments.torch]\nkind = "system"\ngpus = ["1", "MIG-0a1b"]')
    settings = load_settings()
    assert (settings.gpus, settings.environments["torch"].gpus) == (["all"], ["1", "MIG-0a1b"])
    monkeypatch.setenv("BELLJAR_GPUS", "0, GPU-6e4e17a9-9e84")
    assert load_settings().gpus == ["0", "GPU-6e4e17a9-9e84"]
    assert '"all" stands alone' in refusal({"gpus": ["all", "0"]}).message
    assert "'first' is no GPU: give its index, like 0" in refusal({"gpus": "first"}).message
    monkeypatch.setenv("BELLJAR_GPU_CONTEXTS", "65")
    assert "it is more than max_sessions, which is 64" in refusal().message
