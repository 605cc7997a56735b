"""Personal data as people write it, for hypothesis to draw from; each with the kind it must be found as."""

import phonenumbers
from hypothesis import strategies as st
from stdnum import luhn
from stdnum.iso7064 import mod_97_10

IDS = [
    *("536-90-4399", "36 574 261 809", "2 95 10 99 126 111 93", "54362315-K", "X-2482300W", "RCCMNL83S18D969H"),
    *("85.07.30-033 28", "756.9217.0769.85", "44051401359", "880320-0016", "131052-308T", "390.533.447-05"),
    *("BOXW310820HNERXN09", "971013-9019902", "360426199101010071"),
]
# Between two values there is always something: glued together they would be another text.
GLUE = st.sampled_from(
    [
        " ",
        "\n",
        ", ",
        "; ",
        " / ",
        " (",
        ") ",
        '"',
        "' ",
        ": ",
        "\t",
        "<td>",
        " and ",
        "…",
        " [",
        "] ",
        "\x1b[31m",
        " = ",
    ]
)


def _emails() -> st.SearchStrategy[str]:
    local = st.from_regex(r"[A-Za-z0-9äéñ][A-Za-z0-9äéñ._+%-]{0,20}", fullmatch=True).map(lambda text: text.strip(".%"))
    label = st.from_regex(r"[a-z0-9ü]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
    ending = st.sampled_from(["com", "de", "co.uk", "museum", "xn--p1ai", "みんな"])
    return st.builds(lambda a, b, c: f"{a or 'x'}@{b}.{c}", local, label, ending)


def _cards() -> st.SearchStrategy[str]:
    first = st.sampled_from([("4", 16), ("51", 16), ("2221", 16), ("34", 15), ("6011", 16), ("3528", 16), ("36", 14)])

    def build(network: tuple[str, int], digits: str, separator: str) -> str:
        prefix, length = network
        body = (prefix + digits)[: length - 1]
        number = body + luhn.calc_check_digit(body)
        return separator.join(number[place : place + 4] for place in range(0, length, 4))

    return st.builds(
        build, first, st.text("0123456789", min_size=18, max_size=18), st.sampled_from(["", " ", "-", "."])
    )


def _accounts() -> st.SearchStrategy[str]:
    def build(digits: str, separator: str) -> str:
        check = mod_97_10.calc_check_digits(f"{digits}DE")
        number = f"DE{check}{digits}"
        return separator.join(number[place : place + 4] for place in range(0, len(number), 4))

    return st.builds(build, st.text("0123456789", min_size=18, max_size=18), st.sampled_from(["", " "]))


def _phones() -> st.SearchStrategy[str]:
    regions = ["US", "DE", "GB", "FR", "JP", "BR", "IN", "ZA", "AU"]
    kinds = [phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE]
    forms = [phonenumbers.PhoneNumberFormat.E164, phonenumbers.PhoneNumberFormat.INTERNATIONAL]
    numbers = [phonenumbers.example_number_for_type(region, kind) for region in regions for kind in kinds]
    return st.sampled_from(
        [phonenumbers.format_number(number, form) for number in numbers if number is not None for form in forms]
    )


VALUES = st.one_of(
    st.tuples(st.just("email"), _emails()),
    st.tuples(st.just("card"), _cards()),
    st.tuples(st.just("iban"), _accounts()),
    st.tuples(st.just("phone"), _phones()),
    st.tuples(st.just("id"), st.sampled_from(IDS)),
)
LOOKALIKES = st.sampled_from(
    [
        "[EMAIL_1]",
        "[EMAIL_2]",
        "[TEXT_1]",
        "[FIELD_1]",
        "[CARD_1",
        "EMAIL_1]",
        "[[PHONE_1]]",
        "${secret:TOKEN}",
        "[EMAIL]",
    ]
)
# Words of any script without digits or @, which would make of their neighbours something else.
WORDS = st.text(st.characters(exclude_characters="@+", exclude_categories=["Nd", "Nl", "No", "Cs", "Cc"]), max_size=12)


@st.composite
def mixed_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and the personal values in it."""
    values: list[str] = []
    parts: list[str] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["value", "word", "lookalike"]))
        if kind == "value":
            values.append(draw(VALUES)[1])
        parts.append(values[-1] if kind == "value" else draw(WORDS if kind == "word" else LOOKALIKES))
        parts.append(draw(GLUE))
    return "".join(parts), values
