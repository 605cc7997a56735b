"""The `[privacy]` section of the policy: what is hidden, where, and which tools may have it back. Knows no values."""

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

FORMS = ("email", "phone", "card", "iban", "national_id")
TOKENS = {"email": "EMAIL", "phone": "PHONE", "card": "CARD", "iban": "IBAN", "id": "ID", "field": "FIELD"}
"""The word in the token of each kind; `field` is for values that are hidden because of their field's name."""

_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _known_form(form: str) -> str:
    if form not in FORMS and form not in ID_NAMES:
        raise ValueError(f"{form!r} is none of {', '.join(FORMS)} or an id such as us.ssn ({', '.join(ID_NAMES)})")
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
        named = [form for form in self.hide if form in ID_NAMES]
        return tuple(dict.fromkeys((*named, *(COMMON_IDS if "national_id" in self.hide else ()))))

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


# The national ids of people, by python-stdnum's names: the shape in which each is written. `detectors.py` looks for
# them and has python-stdnum check their digits and dates.

_ID_GAP = r"[ \u00a0\u202f]?"
# By python-stdnum's names. A bare number with one check digit is valid by chance in one case of ten, so such ids are
# searched for only if the rules name them; the others are in COMMON_IDS.
SHAPES = {
    "at.vnr": rf"\d{{4}}{_ID_GAP}\d{{6}}",
    "au.tfn": rf"\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{2,3}}",
    "be.nn": r"\d{2}[. ]?\d{2}[. ]?\d{2}[- ]?\d{3}[. ]?\d{2}",
    "bg.egn": r"\d{10}",
    "br.cpf": r"\d{3}\.?\d{3}\.?\d{3}-?\d{2}",
    "ca.sin": r"\d{3}[- ]?\d{3}[- ]?\d{3}",
    "ch.ssn": r"756[. ]?\d{4}[. ]?\d{4}[. ]?\d{2}",
    "cl.rut": r"\d{1,2}\.?\d{3}\.?\d{3}-[\dK]",
    "cn.ric": r"\d{17}[\dX]",
    "cz.rc": r"\d{6}/?\d{3,4}",
    "de.idnr": rf"\d{{2}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}",
    "dk.cpr": r"\d{6}[- ]\d{4}",
    "ee.ik": r"[1-6]\d{10}",
    "es.dni": r"\d{8}[- ]?[A-Z]",
    "es.nie": r"[XYZ][- ]?\d{7}[- ]?[A-Z]",
    "fi.hetu": r"\d{6}[-+A-FU-Y]\d{3}[0-9A-Y]",
    "fr.nir": rf"[1-478]{_ID_GAP}\d{{2}}{_ID_GAP}\d{{2}}{_ID_GAP}[0-9][0-9AB]"
    rf"{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{2}}",
    "gb.nhs": r"\d{3}[- ]?\d{3}[- ]?\d{4}",
    "gr.amka": r"\d{11}",
    "hr.oib": r"\d{11}",
    "ie.pps": r"\d{7}[A-W][A-IW]?",
    "il.idnr": r"\d{7,8}-?\d",
    "in_.aadhaar": r"[2-9]\d{3}[- ]?\d{4}[- ]?\d{4}",
    "in_.pan": r"[A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]",
    "is_.kennitala": r"\d{6}-?\d{4}",
    "it.codicefiscale": r"[A-Z]{6}[\dL-V]{2}[A-EHLMPRST][\dL-V]{2}[A-Z][\dL-V]{3}[A-Z]",
    "kr.rrn": r"\d{6}-?\d{7}",
    "lt.asmens": r"[3-6]\d{10}",
    "mx.curp": r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z0-9]\d",
    "nl.bsn": r"\d{4}[. ]\d{2}[. ]\d{3}|\d{9}",
    "no.fodselsnummer": r"\d{6}[- ]?\d{5}",
    "pl.pesel": r"\d{11}",
    "pt.cc": r"\d{8} ?\d ?[A-Z0-9]{2}\d",
    "ro.cnp": r"[1-9]\d{12}",
    "se.personnummer": r"(?:\d{2})?\d{6}[-+]?\d{4}",
    "sk.rc": r"\d{6}/?\d{3,4}",
    "tr.tckimlik": r"[1-9]\d{10}",
    "us.itin": r"9\d{2}-\d{2}-\d{4}",
    "us.ssn": r"\d{3}-\d{2}-\d{4}|\d{3} \d{2} \d{4}",
    "za.idnr": r"\d{6} ?\d{4} ?\d{2} ?\d|\d{13}",
}
ID_NAMES = tuple(SHAPES)
COMMON_IDS = (
    *("be.nn", "br.cpf", "ch.ssn", "cn.ric", "de.idnr", "es.dni", "es.nie", "fi.hetu", "fr.nir"),
    *("it.codicefiscale", "kr.rrn", "mx.curp", "no.fodselsnummer", "pl.pesel", "se.personnummer", "us.itin", "us.ssn"),
)
"""Ids whose shape is hardly ever that of something else."""
