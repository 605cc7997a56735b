"""The veils of a runtime: what all of them share, and a new one for each session."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from belljar.privacy.rules import PrivacyRules
from belljar.privacy.secrets import Secrets
from belljar.privacy.veil import Veil

SECTION = "privacy"
"""The policy's table with the rules."""


class Veils:
    """Makes them, under the policy's section; without one each lets everything through."""

    def __init__(self, sections: Mapping[str, BaseModel], secrets_file: str = "") -> None:
        rules = sections.get(SECTION)
        self._rules = rules if isinstance(rules, PrivacyRules) else None
        self._secrets = Secrets(Path(secrets_file) if secrets_file else None)
        self._secrets.check()

    def veil(self) -> Veil:
        """A new session's."""
        return Veil(self._rules, self._secrets)
