import pytest

from belljar.egress.rules import Rule, parse_rule, plain_host, rule_of_url
from belljar.errors import SettingsError
from belljar.settings import load_settings


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("api.example.com:443", Rule("api.example.com", 443)),
        ("API.Example.COM.:443", Rule("api.example.com", 443)),
        ("*.bbc.co.uk:443", Rule("bbc.co.uk", 443, covers_below=True)),
        ("*.t.co:443", Rule("t.co", 443, covers_below=True)),
        ("*.example.org:8443", Rule("example.org", 8443, covers_below=True)),
        ("localhost:80", Rule("localhost", 80)),
        ("bücher.example:443", Rule("xn--bcher-kva.example", 443)),
        ("10.1.2.3:80", Rule("10.1.2.3", 80)),
        ("[2001:DB8:0::1]:443", Rule("2001:db8::1", 443)),
    ],
)
def test_a_rule_is_read_and_spelled_in_one_way(text: str, rule: Rule):
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["*", "*:443", "*.*:443", "*.com:443", "*.:443", "**:443", "*.com.:443", "*.co.uk:443", "*.COM.au:443"]
)
def test_a_rule_that_matches_everything_is_refused(text: str):
    with pytest.raises(ValueError):
        parse_rule(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":443", "example.com", "example.com:", "example.com:0", "example.com:65536", "example.com:*"),
        *("example.com:https", "example.com:+443", "example.com:٤٤٣", "example.com:443:443", "::1:443"),
        *(
            "https://example.com:443",
            "example.com:443/path",
            "user@example.com:443",
            "0.0.0.0/0:443",
            "exa mple.com:443",
        ),
        *(
            "a*b.example.com:443",
            "www.*.example.com:443",
            "example.*:443",
            "*.10.0.0.1:443",
            "*.1.2:443",
            "*.a.*.b:443",
        ),
        *("127.1:80", "0x7f000001:80", "2130706433:80", "[fe80::1%eth0]:443", "[10.0.0.1]:443", "-a.example:443"),
        *("a..b:443", f"{'a' * 64}.example:443", f"{'a.' * 127}example:443", "exam\nple.com:443", "exam\0ple.com:443"),
    ],
)
def test_what_is_no_rule_is_refused(text: str):
    with pytest.raises(ValueError):
        parse_rule(text)


@pytest.mark.parametrize(
    ("rule", "host", "port", "is_allowed"),
    [
        ("api.example.com:443", "api.example.com", 443, True),
        ("api.example.com:443", "api.example.com", 80, False),
        ("api.example.com:443", "x.api.example.com", 443, False),
        ("api.example.com:443", "api.example.com.evil.test", 443, False),
        ("api.example.com:443", "evilapi.example.com", 443, False),
        ("*.example.org:443", "a.example.org", 443, True),
        ("*.example.org:443", "a.b.example.org", 443, True),
        ("*.example.org:443", "example.org", 443, False),
        ("*.example.org:443", "evilexample.org", 443, False),
        ("*.example.org:443", "a.example.org.evil.test", 443, False),
    ],
)
def test_a_rule_covers_its_host_and_no_other(rule: str, host: str, port: int, is_allowed: bool):
    assert parse_rule(rule).allows(plain_host(host), port) is is_allowed


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("EXAMPLE.com", "example.com"),
        ("example.com.", "example.com"),
        ("example.com..", ""),
        ("ｅxample.com", "example.com"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", ""),
        ("0177.0.0.1", ""),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("[::1", ""),
        ("[example.com]", ""),
        ("user@example.com", ""),
        ("exam%70le.com", ""),
        ("example.com#", ""),
        (".", ""),
        ("", ""),
    ],
)
def test_a_host_has_one_plain_form_or_none(text: str, plain: str):
    assert plain_host(text) == plain


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("https://user:pass@mirror.example/simple", Rule("mirror.example", 443)),
        ("http://mirror.example:8080/", Rule("mirror.example", 8080)),
        ("file:///somewhere", None),
        ("/somewhere", None),
        ("https://mirror.example:99999/", None),
    ],
)
def test_a_url_gives_the_rule_for_its_host(url: str, rule: Rule | None):
    assert rule_of_url(url) == rule


def test_the_setting_takes_rules_and_the_alias():
    assert load_settings({"egress": ["packages", "A.example:443"]}).egress == ["packages", "a.example:443"]
    assert load_settings().egress == []


def test_the_setting_refuses_a_rule_that_matches_everything():
    with pytest.raises(SettingsError) as caught:
        load_settings({"egress": ["a.example:443", "*:443"]})

    assert "matches everything" in caught.value.message
    assert "HOST:PORT" in caught.value.hint


def test_the_setting_is_read_from_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BELLJAR_EGRESS", "packages, *.example.org:443")
    monkeypatch.setenv("BELLJAR_EGRESS_ALLOW_PRIVATE", "true")

    settings = load_settings()

    assert settings.egress == ["packages", "*.example.org:443"]
    assert settings.egress_allow_private is True
