"""The list of a fleet's machines, and settings that make a server one of them or cannot."""

from pathlib import Path

import pytest
from calls import settings_for
from hosts import SECRET

from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.fleet.addresses import Addresses, Listed, UnreadableList, check_fleet, parse_list
from belljar.settings import load_settings

pytestmark = pytest.mark.anyio


def test_a_list_has_a_machine_a_line_and_marks_those_that_are_gone() -> None:
    content = (
        b"# ours\nhttps://one.example:8100\n\n https://10.0.0.5:8100/ gone\nhttp://[::1]:9\nhttps://one.example:8100\n"
    )
    assert parse_list(content, trusts_network=False) == [
        Listed("https://one.example:8100"),
        Listed("https://10.0.0.5:8100", is_gone=True),
        Listed("http://[::1]:9"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nonsense", "line 1 has 'nonsense', which is no address like https://10.0.0.5:8100"),
        (b"https://a.example:1\nhttps://b.example", "line 2 has"),
        (b"https://a.example:1 dead", "and not a URL with nothing or gone behind"),
        (b"https://a.example:1 gone gone", "and not a URL"),
        (b"https://user@a.example:1", "which is no address"),
        (b"https://a.example:1/path", "which is no address"),
        (b"https://a.example:99999", "which is no address"),
        (b"https://[::1:1", "which is no address"),
        (b"ftp://a.example:1", "which is no address"),
        (b"http://a.example:1", "off loopback machines speak https, or trust_network is on"),
        (b"\xff\xfe", "it is no text"),
        (b"\n".join(b"https://h%d.example:1" % number for number in range(10_000)), "more than 128 machines"),
        (b"x" * 60_000, "which is no address"),
    ],
)
def test_a_list_that_is_none_is_refused_whole_with_the_line(content: bytes, said: str) -> None:
    with pytest.raises(UnreadableList) as refused:
        parse_list(content, trusts_network=False)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300


def test_plain_addresses_are_for_networks_that_are_trusted() -> None:
    assert parse_list(b"http://a.example:1", trusts_network=True) == [Listed("http://a.example:1")]


async def test_a_file_is_read_again_when_it_changes_and_what_cannot_be_read_changes_nothing(
    default_environment: Environment, tmp_path: Path
) -> None:
    file = tmp_path / "peers"
    addresses = Addresses(settings_for(default_environment, tmp_path, fleet_peers=f"file:{file}"))
    assert await addresses.read() == []
    assert addresses.problem == "it cannot be read: No such file or directory"
    file.write_text("http://127.0.0.1:1\n")
    assert await addresses.read() == [Listed("http://127.0.0.1:1")]
    assert addresses.problem == ""
    for broken in ("half a l", "x" * 100_000):
        file.write_text(broken)
        assert await addresses.read() == [Listed("http://127.0.0.1:1")]
        assert addresses.problem
    file.write_text("http://127.0.0.1:1 gone\nhttp://127.0.0.1:2\n")
    assert await addresses.read() == [Listed("http://127.0.0.1:1", is_gone=True), Listed("http://127.0.0.1:2")]
    file.write_text("")
    assert await addresses.read() == []


async def test_a_name_has_a_machine_for_each_address(default_environment: Environment, tmp_path: Path) -> None:
    addresses = Addresses(settings_for(default_environment, tmp_path, fleet_peers="dns:localhost:8100"))
    assert {one.url for one in await addresses.read()} & {"http://127.0.0.1:8100", "http://[::1]:8100"}
    nowhere = Addresses(settings_for(default_environment, tmp_path, fleet_peers="dns:nowhere.invalid:8100"))
    assert await nowhere.read() == []
    assert nowhere.problem.startswith("the name has no address")


IN_A_FLEET = {
    "fleet_peers": "file:/run/peers",
    "fleet_address": "127.0.0.1:8100",
    "fleet_key": SECRET,
    "http": "127.0.0.1:0",
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fleet_key": ""}, "a fleet is set up in part, without fleet_key"),
        ({"fleet_peers": "", "fleet_key": ""}, "without fleet_peers and fleet_key"),
        ({"fleet_address": ""}, "without fleet_address"),
        ({"fleet_address": "127.0.0.1:0"}, "has port 0"),
        ({"fleet_address": "0.0.0.0:8100"}, "without TLS"),
        ({"http": ""}, "over stdio"),
        ({"sandbox": "process"}, 'sandbox = "process" cannot be used in a fleet'),
    ],
)
def test_settings_that_make_no_fleet_are_refused(
    default_environment: Environment, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    assert check_fleet(settings_for(default_environment, tmp_path, **IN_A_FLEET))
    with pytest.raises(SettingsError) as refused:
        check_fleet(settings_for(default_environment, tmp_path, **(IN_A_FLEET | changed)))
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fleet_key", "x" * 31),
        ("fleet_peers", "dns:name"),
        ("fleet_peers", "dns::8100"),
        ("fleet_peers", "dns:name:0"),
        ("fleet_peers", "file:"),
        ("fleet_peers", "http://a:1"),
        ("fleet_address", "a"),
    ],
)
def test_values_of_another_form_are_refused_and_the_key_is_not_shown(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({name: value})
    assert name in refused.value.message
    assert "x" * 31 not in str(refused.value)


def test_the_key_of_a_fleet_is_not_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "belljar.toml"
    file.write_text(f'fleet_key = "{SECRET}"\n')
    monkeypatch.setenv("BELLJAR_CONFIG", str(file))
    with pytest.raises(SettingsError, match="is a key in plain text"):
        load_settings()
