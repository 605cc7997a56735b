"""The `[privacy]` section of the policy: what is hidden, where, and which tools may have it back. Knows no values."""

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from belljar.privacy import national_ids

FORMS = ("email", "phone", "card", "iban", "national_id")
TOKENS = {"email": "EMAIL", "phone": "PHONE", "card": "CARD", "iban": "IBAN", "id": "ID", "field": "FIELD"}
"""The word in the token of each kind; `field` is for values that are hidden because of their field's name."""

_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _known_form(form: str) -> str:
    if form not in FORMS and form not in national_ids.NAMES:
        raise ValueError(
            f"{form!r} is none of {', '.join(FORMS)} or an id such as us.ssn ({', '.join(national_ids.NAMES)})"
        )
    return form


def _known_kind(kind: str) -> str:
    if kind not in TOKENS:
        raise ValueError(f"{kind!r} is none of {', '.join(TOKENS)}")
    return kind


def _known_region(region: str) -> str:
    import phonenumbers  # takes 0.1 s, which a server without rules need not pay

    if region not in phonenumbers.SUPPORTED_REGIONS:
        raise ValueError(f"{region!r} is no country that has telephone numbers, like US or DE")
    return region


def _tool_pattern(pattern: str) -> str:
    server, dot, tool = pattern.partition(".")
    if not (server and dot and tool):
        raise ValueError(f"{pattern!r} is not SERVER.TOOL, like crm.* or mail.send_*")
    return pattern


def _secret_name(name: str) -> str:
    if not _SECRET.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a secret, like GITHUB_TOKEN")
    return name


ToolPattern = Annotated[str, AfterValidator(_tool_pattern)]
Kinds = Annotated[str, AfterValidator(_known_kind)]


class _Rules(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Reveal(_Rules):
    """Tools that get the values back in place of their tokens."""

    tools: tuple[ToolPattern, ...] = Field(min_length=1)
    kinds: tuple[Kinds, ...] = tuple(TOKENS)

    def covers(self, kind: str, server: str, tool: str) -> bool:
        """Return whether that tool may have values of that kind."""
        return kind in self.kinds and matches(self.tools, server, tool)


class PrivacyRules(_Rules):
    """What is hidden, where, and who may have it back."""

    hide: tuple[Annotated[str, AfterValidator(_known_form)], ...] = ()
    fields: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    phone_regions: tuple[Annotated[str, AfterValidator(_known_region)], ...] = ()
    where: tuple[Literal["tools", "outputs"], ...] = ("tools", "outputs")
    reveal: tuple[Reveal, ...] = ()
    secrets: dict[Annotated[str, AfterValidator(_secret_name)], tuple[ToolPattern, ...]] = {}

    def joined(self, other: "PrivacyRules") -> "PrivacyRules":
        """Return rules that hide, in every place, what either hides; who gets it back stays as it is here."""
        hidden = {name: (*getattr(self, name), *getattr(other, name)) for name in ("hide", "fields", "phone_regions")}
        where = ("tools", "outputs")
        unique = {name: tuple(dict.fromkeys(values)) for name, values in hidden.items()}
        return self.model_copy(update={**unique, "where": where})

    @property
    def id_names(self) -> tuple[str, ...]:
        """The national ids that are looked for."""
        named = [form for form in self.hide if form in national_ids.NAMES]
        return tuple(dict.fromkeys((*named, *(national_ids.COMMON if "national_id" in self.hide else ()))))

    def hides_field(self, name: str) -> bool:
        """Return whether a field's name says that its value is personal."""
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in self.fields)

    def may_have(self, kind: str, server: str, tool: str) -> bool:
        """Return whether a tool gets values of that kind back."""
        return any(rule.covers(kind, server, tool) for rule in self.reveal)

    def may_use(self, secret: str, server: str, tool: str) -> bool:
        """Return whether a tool may be given that secret."""
        return matches(self.secrets.get(secret, ()), server, tool)


def matches(patterns: tuple[str, ...], server: str, tool: str) -> bool:
    """Return whether a tool matches. Servers and tools may have dots in their names, so any dot may part the two."""
    return any(
        fnmatchcase(server, pattern[:dot]) and fnmatchcase(tool, pattern[dot + 1 :])
        for pattern in patterns
        for dot, character in enumerate(pattern)
        if character == "."
    )
