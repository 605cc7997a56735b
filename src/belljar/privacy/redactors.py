"""The veils of a runtime: what all of them share, and a new one for each session."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from belljar.privacy.redaction import SessionRedactor
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.secrets import Secrets
from belljar.privacy.vault import TokenCounter, Vault

SECTION = "privacy"
"""The policy's table with the rules."""


class Redactors:
    """Makes them, under the policy's section; without one each lets everything through."""

    def __init__(self, sections: Mapping[str, BaseModel], secrets_file: str = "") -> None:
        rules = sections.get(SECTION)
        self._rules = rules if isinstance(rules, PrivacyRules) else None
        self._secrets = Secrets(Path(secrets_file) if secrets_file else None)
        self._secrets.check()

    @property
    def are_in_use(self) -> bool:
        """Whether there is anything that they must not forget."""
        return self._rules is not None

    def veil(self, numbers: Path | None = None) -> SessionRedactor:
        """A session's, with the numbers of its tokens in a file of the host's; without one, as long as it lasts."""
        return SessionRedactor(self._rules, self._secrets, Vault(TokenCounter(numbers)))
