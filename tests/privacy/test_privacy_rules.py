from pathlib import Path

import pytest
from pydantic import ValidationError

from belljar.errors import SettingsError
from belljar.privacy.redaction import Redactors, Secrets
from belljar.privacy.rules import PrivacyRules, matches


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"hide": ["mail"]}, "'mail' is none of email, phone, card, iban, national_id or an id such as us.ssn"),
        ({"phone_regions": ["Germany"]}, "'Germany' is no country that has telephone numbers"),
        ({"reveal": [{"tools": ["crm"]}]}, "'crm' is not SERVER.TOOL"),
        ({"reveal": [{"tools": ["crm.*"], "kinds": ["mail"]}]}, "'mail' is none of email, phone"),
        ({"secrets": {"a b": ["x.*"]}}, "'a b' is no name for a secret"),
        ({"where": ["files"]}, "Input should be 'tools' or 'outputs'"),
        ({"hides": []}, "Extra inputs are not permitted"),
    ],
)
def test_what_does_not_fit_is_named(rules: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError) as raised:
        PrivacyRules.model_validate(rules)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "server", "tool", "expected"),
    [
        ("crm.*", "crm", "find", True),
        ("crm.*", "crm2", "find", False),
        ("mail.send_*", "mail", "read", False),
        ("*.send", "a.b", "send", True),
        ("my.crm.find", "my.crm", "find", True),
        ("crm.*", "CRM", "find", False),
    ],
)
def test_tools_are_named_by_patterns(pattern: str, server: str, tool: str, expected: bool) -> None:
    assert matches((pattern,), server, tool) is expected


def test_secrets_come_from_variables_first_and_from_a_file_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secrets.toml"
    file.write_text('TOKEN = "of the file"\nOTHER = "other"\n')
    secrets = Secrets(file)
    assert (secrets.get("TOKEN"), secrets.get("OTHER"), secrets.get("NONE")) == ("of the file", "other", None)
    monkeypatch.setenv("BELLJAR_SECRET_TOKEN", "of the variable")
    assert secrets.get("TOKEN") == "of the variable"
    file.write_text('OTHER = "a longer one"\n')
    assert secrets.get("OTHER") == "a longer one"


def test_a_file_of_secrets_that_cannot_be_read_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "secrets.toml"
    file.write_text("TOKEN = hunter2hunter2\n")
    with pytest.raises(SettingsError) as raised:
        Secrets(file).get("TOKEN")
    assert str(file) in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_server_does_not_start_with_secrets_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: FileNotFoundError"):
        Redactors({}, str(tmp_path / "none.toml"))
