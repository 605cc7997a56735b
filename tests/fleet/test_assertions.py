"""What one machine of a fleet believes of another."""

import pytest

from belljar.fleet import assertions
from belljar.fleet.assertions import ASSERTION, ClocksApart, FleetKey, UnprovedRequest

KEY = FleetKey("k" * 32)
TARGET = b"/mcp?x=1"
SAID = [(b"host", b"belljar"), (b"belljar-caller", b"ada"), (b"belljar-hops", b"1")]


def signed(key: FleetKey = KEY) -> list[tuple[bytes, bytes]]:
    return [*SAID, (ASSERTION, key.assertion("abc", b"POST", TARGET, SAID))]


def refused(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], tag: str = "abc") -> None:
    with pytest.raises(UnprovedRequest):
        KEY.check(tag, method, target, headers)


def test_an_assertion_is_for_one_request_to_one_server() -> None:
    headers = signed()
    assert KEY.check("abc", b"POST", TARGET, headers) == headers[-1][1]
    assert KEY.check("abc", b"POST", TARGET, [*headers, (b"accept", b"*/*")])
    refused(b"GET", TARGET, headers)
    refused(b"POST", b"/mcp?x=2", headers)
    refused(b"POST", TARGET, headers, "abd")
    refused(b"POST", TARGET, [*headers[1:], (b"belljar-caller", b"bob")])
    refused(b"POST", TARGET, [(b"belljar-caller", b"bob"), *headers[2:]])
    refused(b"POST", TARGET, [*headers, (b"belljar-principal", b"bob")])
    refused(b"POST", TARGET, [headers[0], *headers[2:]])
    refused(b"POST", TARGET, signed(FleetKey("j" * 32)))


@pytest.mark.parametrize(
    "value", [b"", b" ", b"1 2 3", b"\xff" * 200, b"9" * 100_000, b"1 " + b"0" * 32 + b" " + b"0" * 64]
)
def test_what_is_no_assertion_is_refused(value: bytes) -> None:
    refused(b"POST", TARGET, [*SAID, (ASSERTION, value)])
    refused(b"POST", TARGET, [*SAID, (ASSERTION, value), *signed()[-1:]])
    refused(b"POST", TARGET, SAID)


@pytest.mark.parametrize("apart", [-600.0, 600.0, 31.0, -31.0])
def test_an_assertion_of_another_time_says_how_far_the_clocks_are_apart(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    headers = signed()
    now = assertions.time.time()
    monkeypatch.setattr(assertions.time, "time", lambda: now + apart)
    with pytest.raises(ClocksApart) as refused:
        KEY.check("abc", b"POST", TARGET, headers)
    assert abs(refused.value.seconds + apart) <= 2
    assert "s apart" in refused.value.message


def test_parts_cannot_be_moved_from_one_header_to_the_next() -> None:
    value = KEY.assertion("abc", b"POST", TARGET, [(b"belljar-caller", b"a"), (b"belljar-hops", b"b")])
    refused(b"POST", TARGET, [(b"belljar-caller", b"ab"), (b"belljar-hops", b""), (ASSERTION, value)])


def test_an_answer_is_proved_for_its_request_alone() -> None:
    proof = KEY.proof(b"assertion", b"content")
    assert KEY.is_proved(proof, b"assertion", b"content")
    assert not KEY.is_proved(proof, b"another", b"content")
    assert not KEY.is_proved(proof, b"assertion", b"contents")
    assert not KEY.is_proved(b"", b"assertion", b"content")
    assert not KEY.is_proved(b"\xff", b"assertion", b"content")
