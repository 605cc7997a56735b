import pytest

from belljar.privacy.signed_urls import HIDDEN, MAX_KEPT, KnownSignatures, signatures_in, without_signatures

AZURE = "https://a.blob.core.windows.net/c/x.csv?sv=2024-11-04&sr=b&sig=abc%2Bdef%2Fghi%3D&se=2026"
AMAZON = "https://b.s3.amazonaws.com/k?X-Amz-Credential=me&X-Amz-Signature=0123456789abcdef&X-Amz-Expires=60"
GOOGLE = "https://storage.googleapis.com/b/o?X-Goog-Signature=00ff00ff00ff&x=1"


@pytest.mark.parametrize(
    ("url", "signature"),
    [(AZURE, "abc%2Bdef%2Fghi%3D"), (AMAZON, "0123456789abcdef"), (GOOGLE, "00ff00ff00ff")],
)
def test_signatures_of_signed_urls_are_found_and_hidden(url: str, signature: str) -> None:
    code = f"import pandas\ntable = pandas.read_csv('{url}')\n"
    assert signature in signatures_in(code)
    hidden = without_signatures(code)
    assert signature not in hidden
    assert f"={HIDDEN}" in hidden
    assert hidden.startswith("import pandas\ntable = pandas.read_csv('https://")
    assert hidden.endswith("')\n")
    assert without_signatures(hidden) == hidden


def test_every_spelling_of_a_signature_is_known() -> None:
    assert set(signatures_in(AZURE)) == {"abc%2Bdef%2Fghi%3D", "abc+def/ghi="}


@pytest.mark.parametrize(
    "code", ["sig = 1", "f(sig=value)", "design=2; x?y", "https://example.org/?q=sig", "x = a&sig"]
)
def test_code_without_signed_urls_is_left_as_it_is(code: str) -> None:
    assert without_signatures(code) == code
    assert signatures_in(code) == []


def test_only_the_latest_signatures_are_remembered_the_longest_first() -> None:
    known = KnownSignatures()
    known.learn(f"signature-{number:04}" for number in range(MAX_KEPT + 10))
    known.learn(["a-longer-signature"])
    assert len(known.all()) == MAX_KEPT
    assert known.all()[0] == "a-longer-signature"
    assert "signature-0000" not in known.all()
