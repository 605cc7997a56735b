"""Which hosts a session may reach: rules as the operator writes them, and host names in the form that is compared.

Every name is brought into one form before it is compared: lower case, ASCII, no final dot. Resolves nothing. Which
addresses are public is written out here, because the answers of `ipaddress.is_global` differ between Python releases
and count some metadata services as public.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

PACKAGES = "packages"
"""Stands for the hosts of the package index that pip and uv are configured for."""

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAX_NAME = 253
_OF_FLEET = "a machine of this server's fleet"
_OF_STORE = "this server's store"
# Below a country's domain these are registries of their own: `*.co.uk` is no narrower than `*.com`.
_REGISTRIES = frozenset({"ac", "co", "com", "edu", "go", "gob", "gov", "mil", "ne", "net", "or", "org"})
_DEFAULT_PORTS = {"https": 443, "http": 80}
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_METADATA: tuple[Network, ...] = (
    IPv4Network("168.63.129.16"),  # Azure; a public address
    IPv4Network("100.100.100.200"),  # Alibaba; within the carrier range
    IPv4Network("192.0.0.0/24"),  # Oracle, and protocol assignments
    IPv6Network("fd00:ec2::/32"),  # AWS
    IPv6Network("fd20:ce::/32"),  # Google
)
_PRIVATE: tuple[Network, ...] = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv4Network("127.0.0.0/8"),
    IPv4Network("100.64.0.0/10"),
    IPv4Network("198.18.0.0/15"),
    IPv6Network("::1"),
    IPv6Network("fc00::/7"),
)
_NEVER: tuple[Network, ...] = (
    IPv4Network("0.0.0.0/8"),
    IPv4Network("169.254.0.0/16"),
    IPv4Network("192.0.2.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("198.51.100.0/24"),
    IPv4Network("203.0.113.0/24"),
    IPv4Network("224.0.0.0/3"),
    IPv6Network("2001::/23"),  # Teredo and protocol assignments
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),  # 6to4: carries any IPv4 address
    IPv6Network("3fff::/20"),
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_fleet: set[tuple[Address, int]] = set()
"""Where the servers of a fleet answer each other: no session reaches their machines, whatever is allowed."""
_store: set[tuple[Address, int]] = set()
"""Where the store of sessions that sleep answers: no session reaches it, whatever is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One host and port, or all hosts below a name."""

    host: str
    port: int
    covers_below: bool = False
    is_configured: bool = field(default=False, compare=False)
    """Whether the operator's own configuration names the host, rather than an answer from the network."""

    def allows(self, host: str, port: int) -> bool:
        """Return whether it covers this host, given in the form of `plain_host`."""
        if port != self.port:
            return False
        return host.endswith(f".{self.host}") if self.covers_below else host == self.host

    def __str__(self) -> str:
        return f"{'*.' if self.covers_below else ''}{authority(self.host, self.port)}"


def authority(host: str, port: int) -> str:
    """Return host and port as one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_rule(text: str) -> Rule:
    """Read `host:port` or `*.example.org:port`; ValueError says what is wrong with anything else."""
    if "/" in text or "@" in text:
        raise ValueError(f"{text!r} is not HOST:PORT: no scheme, path, user or address range")
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} has no port: write HOST:PORT, like api.example.com:443")
    number = parse_port(port)
    if number is None:
        raise ValueError(f"{text!r} names no port from 1 to 65535")
    if "*" not in host:
        return Rule(_checked(host, text), number)
    return Rule(_checked_below(host, text), number, covers_below=True)


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """Return the rules among the entries of the setting, without the alias `packages`."""
    return [parse_rule(text) for text in texts if text != PACKAGES]


def rule_of_url(url: str) -> Rule | None:
    """Return the rule that allows a URL to be fetched; None for what is not HTTP, such as a file."""
    try:
        split = urlsplit(url)
        port = split.port or _DEFAULT_PORTS.get(split.scheme)
        host = plain_host(split.hostname or "")
    except ValueError:
        return None
    return Rule(host, port) if host and port and split.scheme in _DEFAULT_PORTS else None


def parse_port(text: str) -> int | None:
    """Return a port written in plain digits; None for anything else."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    return int(text) if is_number and 0 < int(text) < 65536 else None


def plain_host(text: str) -> str:
    """Return a host name or address in the form that is compared and connected to; empty for what is neither."""
    if text.startswith("[") != text.endswith("]"):
        return ""
    if text.startswith("["):
        address = _address(text[1:-1])
        return address if ":" in address else ""
    if address := _address(text):
        return address
    try:
        name = text.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        return ""
    labels = name.split(".")
    is_name = len(name) <= _MAX_NAME and all(_LABEL.fullmatch(label) for label in labels)
    # 127.1, 0x7f000001 and 2130706433 are addresses to a resolver but not to `ip_address`.
    return name if is_name and not _NUMBER.fullmatch(labels[-1]) else ""


def _address(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        return ""
    is_scoped = isinstance(address, IPv6Address) and address.scope_id is not None
    return "" if is_scoped else str(address)


def _checked(host: str, text: str) -> str:
    plain = plain_host(host)
    if not plain:
        raise ValueError(f"{text!r} names no host")
    return plain


def _checked_below(host: str, text: str) -> str:
    below = host.removeprefix("*.")
    if "*" in below and below != host:
        raise ValueError(f"{text!r} has more than one *")
    if below == host and host != "*":
        raise ValueError(f"{text!r} has a * that does not stand for whole labels: write *.example.org:443")
    plain = plain_host(below) if below != host else ""
    labels = plain.split(".")
    is_registry = len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _REGISTRIES
    if len(labels) < 2 or is_registry:
        raise ValueError(f"{text!r} matches everything, or everything below a top-level domain")
    if _address(plain):
        raise ValueError(f"{text!r} names no host")
    return plain


def reserve_for_fleet(addresses: Iterable[tuple[str, int]]) -> None:
    """Keep sessions away from these addresses and ports from now on, and from no others of a fleet."""
    _fleet.clear()
    _fleet.update((ip_address(address), port) for address, port in addresses)


def reserve_for_store(addresses: Iterable[tuple[str, int]]) -> None:
    """Keep sessions away from these addresses and ports from now on, and from no others of a store.

    What else answers at such an address is not refused: it may be the one through which everything inside is reached.
    """
    _store.clear()
    _store.update((ip_address(address), port) for address, port in addresses)


def refusal(address: Address, port: int = 0, *, allow_private: bool) -> str:
    """Return why the host must not connect to an address, or empty if it may. Metadata services are always refused."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        # Hosts without IPv4 see the whole IPv4 internet behind this prefix.
        return refusal(IPv4Address(int(address) & 0xFFFFFFFF), port, allow_private=allow_private)
    # On this machine itself there are other services that an operator may allow.
    if (address, port) in _fleet or (not address.is_loopback and any(address == machine for machine, _ in _fleet)):
        return _OF_FLEET
    if (address, port) in _store:
        return _OF_STORE
    if _is_in(address, _METADATA):
        return "a metadata service"
    if _is_in(address, _PRIVATE):
        return "" if allow_private else "a private address"
    is_odd = isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST
    return "an address that is not public" if is_odd or _is_in(address, _NEVER) else ""


def refusal_of_chosen(address: Address, port: int = 0) -> str:
    """Return the same for a host that the operator named: private addresses are allowed, metadata services not."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        return refusal_of_chosen(IPv4Address(int(address) & 0xFFFFFFFF), port)
    if (address, port) in _fleet | _store:
        return _OF_FLEET if (address, port) in _fleet else _OF_STORE
    if _is_in(address, _METADATA):
        return "a metadata service"
    is_unusable = address.is_link_local or address.is_multicast or address.is_unspecified
    return "an address that is never reached" if is_unusable else ""


def _is_in(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address in network for network in networks)
