"""Which network addresses the host may connect to on a caller's behalf.

The networks are written out, because the answers of `ipaddress.is_global` differ between Python releases and count some
metadata services as public. This module knows addresses only, not names.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

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


def refusal(address: Address, *, allow_private: bool) -> str:
    """Return why the host must not connect to an address, or empty if it may. Metadata services are always refused."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        # Hosts without IPv4 see the whole IPv4 internet behind this prefix.
        return refusal(IPv4Address(int(address) & 0xFFFFFFFF), allow_private=allow_private)
    if _is_in(address, _METADATA):
        return "a metadata service"
    if _is_in(address, _PRIVATE):
        return "" if allow_private else "a private address"
    is_odd = isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST
    return "an address that is not public" if is_odd or _is_in(address, _NEVER) else ""


def refusal_of_chosen(address: Address) -> str:
    """Return the same for a host that the operator named: private addresses are allowed, metadata services not."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        return refusal_of_chosen(IPv4Address(int(address) & 0xFFFFFFFF))
    if _is_in(address, _METADATA):
        return "a metadata service"
    is_unusable = address.is_link_local or address.is_multicast or address.is_unspecified
    return "an address that is never reached" if is_unusable else ""


def _is_in(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address in network for network in networks)
