"""What is taken for personal data, and what is not."""

import pytest
from personal_data import IDS

from belljar.privacy.detectors import Detector, Span, disjoint
from belljar.privacy.rules import COMMON_IDS, ID_NAMES, PrivacyRules

EVERYTHING = ("email", "phone", "card", "iban", "national_id")


def found(text: str, *hide: str, regions: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    detector = Detector(PrivacyRules(hide=hide or EVERYTHING, phone_regions=regions))
    return [(span.kind, text[span.start : span.end]) for span in detector.find(text)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("mail ann@example.com.", ["ann@example.com"]),
        ("<o'brien+x@sub.example.co.uk>", ["o'brien+x@sub.example.co.uk"]),
        ("{'to': 'ann@example.com'}", ["ann@example.com"]),
        ("mailto:jörg@bücher.example?subject=x", ["jörg@bücher.example"]),
        ("a@b.example,c@d.example", ["a@b.example", "c@d.example"]),
        ("\x1b[31mann@example.com\x1b[0m", ["ann@example.com"]),
    ],
)
def test_addresses_are_found_without_what_stands_around_them(text: str, values: list[str]) -> None:
    assert found(text) == [("email", value) for value in values]


@pytest.mark.parametrize("text", ["@decorator\ndef f(): a @ b.T", "user@localhost", "x = a@b", "@ann", "a@@b.example"])
def test_other_uses_of_the_sign_are_not_addresses(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    "number", ["4111111111111111", "4111 1111 1111 1111", "4111-1111-1111-1111", "3782 822463 10005", "378282246310005"]
)
def test_cards_are_found_in_one_piece_and_in_groups_next_to_other_numbers(number: str) -> None:
    assert found(f"7 {number} 12\ncard{number}x") == [("card", number), ("card", number)]


@pytest.mark.parametrize(
    "text",
    [
        "4111111111111112",  # check digit
        "1731661234567",  # a time in milliseconds
        "0.4111111111111111",  # decimals
        "94111111111111111111",  # more digits than a card has
        "1.25 3.75 4.50 10.0 2.25 3.5",
        "2026-11-15 10:20:30.123456",
        "192.168.100.200:8080",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ],
)
def test_other_numbers_are_left_alone(text: str) -> None:
    assert found(text) == []


def test_accounts_are_found_whatever_follows_them() -> None:
    account = "DE89 3704 0044 0532 0130 00"
    assert found(f"{account} and 12 GB29NWBK60161331926819 gb29 nwbk 6016 1331 9268 19.") == [
        ("iban", account),
        ("iban", "GB29NWBK60161331926819"),
        ("iban", "gb29 nwbk 6016 1331 9268 19"),
    ]
    assert found("DE88 3704 0044 0532 0130 00") == []


def test_telephone_numbers_need_a_plus_or_a_country() -> None:
    text = "+49 30 901820, (212) 555-0123, +1 201-555-0123 7, tel:+4930901820x"
    international = [("phone", "+49 30 901820"), ("phone", "+1 201-555-0123"), ("phone", "+4930901820")]
    assert found(text) == international
    assert ("phone", "(212) 555-0123") in found(text, regions=("US",))


@pytest.mark.parametrize("number", IDS)
def test_common_national_ids_are_found(number: str) -> None:
    assert [value for _, value in found(f"id {number}, x")] == [number]


def test_ids_that_are_named_are_looked_for_and_others_are_not() -> None:
    assert found("111222333", "nl.bsn") == [("id", "111222333")]
    assert found("111222333") == []
    assert set(COMMON_IDS) < set(ID_NAMES)


def test_of_what_overlaps_nothing_stays_in_the_open() -> None:
    spans = [Span(0, 4, "a"), Span(2, 10, "b"), Span(9, 11, "c"), Span(11, 12, "d")]
    assert disjoint(spans) == [Span(0, 11, "b"), Span(11, 12, "d")]
    text = "+1 201 555 0123@example.com"
    assert found(text) == [("phone", text)] or found(text) == [("email", text)]
