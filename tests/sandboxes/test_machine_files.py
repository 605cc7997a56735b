"""What other people's programs look for in a Linux is there, and agrees with the limits."""

import json
import os

import pytest
from trials import Opener, run

from belljar.sandboxes.base import Limits, Provider
from belljar.sandboxes.machine_files import machine_files

pytestmark = pytest.mark.anyio

LOOK = """
import grp, json, os, pwd, shutil, socket, subprocess
words = ['lscpu', '--parse=core']
cores = subprocess.run(words, stdout=subprocess.PIPE).stdout.decode() if shutil.which('lscpu') else ''
root = pwd.getpwuid(0)
print(json.dumps({
    'root': [pwd.getpwnam('root').pw_uid, grp.getgrnam('root').gr_gid, grp.getgrgid(0).gr_gid, root.pw_uid],
    'own': pwd.getpwuid(os.getuid()).pw_name,
    'web': socket.getaddrinfo('127.0.0.1', 'http', type=socket.SOCK_STREAM)[0][4],
    'tcp': socket.getprotobyname('tcp'),
    'https': socket.getservbyport(443),
    'processors': os.cpu_count(),
    'cores': len({line for line in cores.splitlines() if not line.startswith('#')}) if cores else None,
    'sys': sorted({os.path.join(folder, name) for folder, _, names in os.walk('/sys/devices') for name in names}),
}))
"""


async def test_an_ordinary_linux_is_inside(isolating: Provider, open_sandbox: Opener) -> None:
    sandbox, spec = await open_sandbox(isolating)
    told = json.loads((await run(sandbox, LOOK)).output)
    assert told["root"] == [0, 0, 0, 0]
    assert told["own"] in ("belljar", "root")
    assert (told["web"], told["tcp"], told["https"]) == (["127.0.0.1", 80], 6, "https")
    if isolating.name != "gvisor":  # its kernel has a /sys of its own
        assert told["sys"] == sorted(path for path in machine_files(spec.limits) if path.startswith("/sys/"))
        assert told["cores"] in (None, *range(1, told["processors"] + 1))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be limited to fewer")
def test_a_limit_shows_in_every_file_alike() -> None:
    files = machine_files(Limits(cpus=1))
    folder = "/sys/devices/system/cpu"
    assert {name: files[f"{folder}/{name}"] for name in ("online", "possible", "present")} == {
        "online": "0\n",
        "possible": "0\n",
        "present": "0\n",
    }
    assert files[f"{folder}/cpu0/topology/core_siblings"] == "00000001\n"
    assert not [path for path in files if "/cpu1/" in path]
    assert files["/proc/cpuinfo"].count("processor\t:") == 1
