import asyncio
from ipaddress import ip_address

import pytest

from belljar.egress.rules import refusal, refusal_of_chosen, reserve_for_fleet, reserve_for_store
from belljar.sessions.store import keep_sessions_away
from waiting import until


@pytest.mark.parametrize("address", ["8.8.8.8", "20.60.0.1", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_fine(address: str):
    assert refusal(ip_address(address), allow_private=False) == ""


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "172.31.255.255",
        "192.168.0.1",
        "127.0.0.1",
        "127.255.0.1",
        "100.64.0.1",
        "198.18.0.1",
        "::1",
        "fd12:3456::1",
        "64:ff9b::7f00:1",
    ],
)
def test_private_addresses_are_fine_only_where_the_site_says_so(address: str):
    assert refusal(ip_address(address), allow_private=False) == "a private address"
    assert refusal(ip_address(address), allow_private=True) == ""


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "169.254.169.254",
        "169.254.170.2",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "203.0.113.7",
        "::",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "fe80::1",
        "fe80::1%1",
        "fec0::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "ff02::1",
        "5f00::1",
    ],
)
def test_metadata_and_addresses_that_are_no_host_are_never_fine(address: str):
    assert refusal(ip_address(address), allow_private=False)
    assert refusal(ip_address(address), allow_private=True)


@pytest.mark.parametrize("text", ["10.1.2.3", "127.0.0.1", "::1", "203.0.113.80", "8.8.8.8", "2606:4700::1", "fd12::1"])
def test_a_host_that_the_operator_chose_may_be_anywhere(text: str) -> None:
    assert refusal_of_chosen(ip_address(text)) == ""


@pytest.mark.parametrize(
    "text",
    [
        *("169.254.169.254", "169.254.1.1", "fe80::1", "168.63.129.16", "100.100.100.200", "fd00:ec2::254"),
        *("0.0.0.0", "::", "224.0.0.1", "ff02::1", "64:ff9b::a9fe:a9fe"),
    ],
)
def test_but_no_metadata_service_and_no_other_link(text: str) -> None:
    assert refusal_of_chosen(ip_address(text))


def test_machines_of_a_fleet_are_never_reached_and_services_of_this_one_may_be():
    reserve_for_fleet([("93.184.216.34", 8100), ("127.0.0.1", 8100)])
    try:
        for port in (8100, 6379):
            assert refusal(ip_address("93.184.216.34"), port, allow_private=True) == "a machine of this server's fleet"
        assert refusal(ip_address("64:ff9b::5db8:d822"), 443, allow_private=True)
        assert refusal(ip_address("127.0.0.1"), 8100, allow_private=True)
        assert refusal(ip_address("127.0.0.1"), 3141, allow_private=True) == ""
        assert refusal_of_chosen(ip_address("93.184.216.34"), 8100)
        assert refusal_of_chosen(ip_address("93.184.216.34"), 443) == ""
    finally:
        reserve_for_fleet([])
    assert refusal(ip_address("93.184.216.34"), 8100, allow_private=True) == ""


def test_a_store_is_never_reached_and_what_else_is_at_its_address_may_be():
    reserve_for_store([("10.0.0.9", 9000), ("127.0.0.1", 9000)])
    try:
        for address in ("10.0.0.9", "127.0.0.1"):
            assert refusal(ip_address(address), 9000, allow_private=True) == "this server's store"
            assert refusal_of_chosen(ip_address(address), 9000) == "this server's store"
            assert refusal(ip_address(address), 443, allow_private=True) == ""
        assert refusal(ip_address("64:ff9b::a00:9"), 9000, allow_private=True) == "this server's store"
    finally:
        reserve_for_store([])
    assert refusal(ip_address("10.0.0.9"), 9000, allow_private=True) == ""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("url", "variable", "endpoint"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL", "http://localhost:9000"),
        ("s3://bucket/below", "AWS_ENDPOINT_URL_S3", "https://127.0.0.1:9000"),
        ("az://container", "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9000/account"),
    ],
)
async def test_the_service_that_has_the_store_is_kept_from_sessions(
    url: str, variable: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason() -> str:
        return refusal(ip_address("127.0.0.1"), 9000, allow_private=True)

    monkeypatch.setenv(variable, endpoint)
    keeping = asyncio.create_task(keep_sessions_away(url))
    await until(lambda: reason() == "this server's store")
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert reason() == ""
