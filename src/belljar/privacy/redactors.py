"""The redactors of a runtime: the rules and secrets that all of them share, and a new redactor for each session."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from belljar.privacy.redaction import SessionRedactor
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.secrets import Secrets
from belljar.privacy.vault import TokenCounter, Vault

SECTION = "privacy"
"""The policy's table with the privacy rules."""


class Redactors:
    """The maker of redactors, by the policy's section; without one each redactor lets everything through."""

    def __init__(self, sections: Mapping[str, BaseModel], secrets_file: str = "") -> None:
        rules = sections.get(SECTION)
        self._rules = rules if isinstance(rules, PrivacyRules) else None
        self._secrets = Secrets(Path(secrets_file) if secrets_file else None)
        self._secrets.check()

    @property
    def are_in_use(self) -> bool:
        """Whether redactors have anything that must outlive the server."""
        return self._rules is not None

    def new_redactor(self, numbers: Path | None = None) -> SessionRedactor:
        """Return a session's redactor; its token numbers are reserved in the file `numbers`, or only in memory."""
        return SessionRedactor(self._rules, self._secrets, Vault(TokenCounter(numbers)))
