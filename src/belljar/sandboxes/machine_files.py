"""Files that show a session an ordinary Linux machine with as many processors and as much memory as its limits allow.

Libraries size themselves by what they find: threads by `/sys/devices/system/cpu` and the scheduler's mask, buffers by
`/proc/meminfo`. Control groups change none of these. Accounts, services and protocols are written here too, because the
host's own files name its users. This module only makes texts; `namespace/bwrap_args.py` puts them in place.
"""

import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from belljar.sandboxes.base import Limits

_CORES = re.compile(r"^((?:siblings|cpu cores)\s*: )\d+", re.MULTILINE)
_PROCESSORS = "/sys/devices/system/cpu"
_LISTS = ("online", "possible", "present")
MAX_PROCESSORS = 64
"""Above this many processors no topology is shown, because each is two more files in every sandbox."""

_SERVICES = {
    "ftp": 21,
    "ssh": 22,
    "telnet": 23,
    "smtp": 25,
    "domain": 53,
    "tftp": 69,
    "http": 80,
    "pop3": 110,
    "ntp": 123,
    "imap2": 143,
    "snmp": 161,
    "ldap": 389,
    "https": 443,
    "submissions": 465,
    "syslog": 514,
    "submission": 587,
    "ldaps": 636,
    "domain-s": 853,
    "ftps": 990,
    "imaps": 993,
    "pop3s": 995,
    "socks": 1080,
    "openvpn": 1194,
    "mysql": 3306,
    "postgresql": 5432,
    "amqp": 5672,
    "redis": 6379,
    "http-alt": 8080,
}
_PROTOCOLS = {
    "ip": 0,
    "icmp": 1,
    "igmp": 2,
    "tcp": 6,
    "udp": 17,
    "ipv6": 41,
    "gre": 47,
    "esp": 50,
    "ah": 51,
    "ipv6-icmp": 58,
    "ospf": 89,
    "sctp": 132,
    "udplite": 136,
}
ETC = {
    # The session's user comes first, because in a user namespace with one user it may be 0 too.
    "/etc/passwd": "belljar:x:{uid}:{gid}:belljar:{home}:/bin/sh\nroot:x:0:0:root:/root:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "belljar:x:{gid}:\nroot:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost belljar\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "/etc/services": "".join(f"{name}\t{port}/{kind}\n" for name, port in _SERVICES.items() for kind in ("tcp", "udp")),
    "/etc/protocols": "".join(f"{name}\t{number}\t{name.upper()}\n" for name, number in _PROTOCOLS.items()),
}
"""Files that name no user or service of the host; the session's user and its home are to be filled in."""


def processor_count(limits: Limits) -> int:
    """Return how many processors a session shall see; 0 means as many as there are."""
    count = math.ceil(limits.cpus)
    return count if 0 < count < len(os.sched_getaffinity(0)) else 0


@lru_cache(maxsize=16)
def machine_files(limits: Limits) -> dict[str, str]:
    """Return the files to show instead of the host's, by path. Cached: a host changes its processors hardly ever."""
    count = processor_count(limits)
    numbers = f"{'0' if count == 1 else f'0-{count - 1}'}\n" if count else ""
    # Also without a limit: a sandbox has nothing of /sys but these, and `lscpu` and joblib give up without them.
    files = {f"{_PROCESSORS}/{name}": numbers or _read(f"{_PROCESSORS}/{name}") for name in _LISTS}
    present = _listed(files[f"{_PROCESSORS}/present"])
    if len(present) <= MAX_PROCESSORS:
        for number in present:
            files |= _topology(number, count)
    elif not count:
        files.clear()  # without their topology joblib would count one core
    if count:
        files["/proc/cpuinfo"] = _first_processors(_read("/proc/cpuinfo"), count)
    if limits.memory_mb and (text := _meminfo(_read("/proc/meminfo"), limits.memory_mb * 1024)):
        files["/proc/meminfo"] = text
    return {path: text for path, text in files.items() if text}


def _topology(number: int, count: int) -> dict[str, str]:
    """Return who shares a core and a socket with a processor; under a limit each is a core, all of one socket."""
    folder = f"{_PROCESSORS}/cpu{number}/topology"
    if not count:
        return {f"{folder}/{name}": _read(f"{folder}/{name}") for name in ("thread_siblings", "core_siblings")}
    return {f"{folder}/thread_siblings": _mask(1 << number), f"{folder}/core_siblings": _mask((1 << count) - 1)}


def _mask(bits: int) -> str:
    """Return processors as Linux writes them: hexadecimal, 32 in a group."""
    groups = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(bits.bit_length(), 1), 32)]
    return ",".join(reversed(groups)) + "\n"


def _listed(numbers: str) -> list[int]:
    """Return the numbers in a list like `0-3,6`."""
    found: list[int] = []
    for part in filter(None, numbers.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _first_processors(cpuinfo: str, count: int) -> str:
    blocks = [block + "\n\n" for block in cpuinfo.strip().split("\n\n")[:count] if block]
    return _CORES.sub(rf"\g<1>{count}", "".join(blocks))


def _meminfo(meminfo: str, limit_kb: int) -> str:
    """Return a meminfo in which all of the limit is free, because the host's use of its memory is not the session's."""
    lines = [line.partition(":") for line in meminfo.splitlines()]
    total = next((int(rest.split()[0]) for name, _, rest in lines if name == "MemTotal"), 0)
    return "".join(_meminfo_lines([name for name, _, _ in lines], limit_kb)) if total > limit_kb else ""


def _meminfo_lines(names: list[str], limit_kb: int) -> Iterator[str]:
    for name in names:
        kilobytes = limit_kb if name in ("MemTotal", "MemFree", "MemAvailable") else 0
        yield f"{name + ':':<16}{kilobytes:>8} kB\n"
