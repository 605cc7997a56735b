"""Ways out of a sandbox. Each is Python that calls `breach` when it got through; an OSError means the glass held.

`unsealed` says who gets through where there is no glass: run by them against the `process` provider, an attempt must
breach, which shows that it can. None: it depends on the host, or would harm it. The environment holds the facts of
the host that an attacker might guess: see `hostile_host` in test_escapes.py.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Attempt:
    name: str
    code: str
    unsealed: Literal["everyone", "root"] | None
    needs: str = ""
    """What the host must have for the attempt to mean something."""


DEVICES = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"

ATTEMPTS = [
    # Files of the host
    Attempt("read the password hashes", "breach(open('/etc/shadow').read())", "root", "/etc/shadow"),
    Attempt("read a file in the host's /tmp", "breach(open(E['SECRET']).read())", "everyone"),
    Attempt("read it through a link", "os.symlink(E['SECRET'], 'link'); breach(open('link').read())", "everyone"),
    Attempt("read it through the first process's root", "breach(open('/proc/1/root' + E['SECRET']).read())", None),
    Attempt("read another session's folder", "breach(os.listdir(E['OTHER']))", "everyone"),
    Attempt("list the folder above", "if 'other' in os.listdir('..'): breach('sibling')", "everyone"),
    Attempt("read the host's private keys", "breach(os.listdir('/etc/ssl/private'))", "root", "/etc/ssl/private"),
    Attempt(
        "list the host's users",
        "import pwd; n = {u.pw_name for u in pwd.getpwall()} - {'belljar', 'nobody'}\nif n: breach(n)",
        "everyone",
    ),
    Attempt("read kernel tables that are root's", "breach(open('/proc/slabinfo').read())", "root", "/proc/slabinfo"),
    Attempt("read the kernel's keys", "breach(open('/proc/keys').read())", None),
    # Processes of the host
    Attempt(
        "read the server's environment",
        """
import base64, glob
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        if base64.b64decode(E['SERVER_VARIABLE']) in open(path, 'rb').read(): breach(path)
    except OSError:
        pass
""",
        "everyone",
    ),
    Attempt(
        "see other processes",
        "n = {p for p in os.listdir('/proc') if p.isdigit()} - {'1', str(os.getpid())}\nif n: breach(n)",
        "everyone",
    ),
    Attempt("signal the server", "os.kill(int(E['SERVER']), 0); breach('signalled')", "everyone"),
    Attempt(
        "trace the server",
        "if ctypes.CDLL(None).ptrace(0x4206, int(E['SERVER']), 0, 0) == 0: breach('seized')",
        None,
    ),
    # Network and sockets
    Attempt(
        "connect to the host's loopback",
        "socket.create_connection(('127.0.0.1', int(E['PORT']))); breach(1)",
        "everyone",
    ),
    Attempt("connect to an abstract socket", "unix('\\0' + E['ABSTRACT']); breach(1)", "everyone"),
    Attempt("connect to a socket in the host's folders", "unix(E['SOCKET']); breach(1)", "everyone"),
    Attempt("send a datagram out", "socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 53)); breach(1)", None),
    Attempt("find an interface", "n = {n for _, n in socket.if_nameindex()} - {'lo'}\nif n: breach(n)", None),
    Attempt("open a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); breach(1)", "root"),
    # The system
    *(
        Attempt(
            f"write to {path}", f"if not os.statvfs({path!r}).f_flag & os.ST_RDONLY: breach('writable')", "everyone"
        )
        for path in ("/", "/usr", "/etc", "/proc")
    ),
    Attempt(
        "change the interpreter", "if os.access(os.path.dirname(os.__file__), os.W_OK): breach('writable')", "root"
    ),
    Attempt(
        "set a kernel setting",
        "os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)); breach('opened')",
        "root",
    ),
    Attempt(
        "find a device of the host",
        f"n = set(os.listdir('/dev')) - set({DEVICES!r}.split())\nif n: breach(n)",
        "everyone",
    ),
    Attempt("make a device", "os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0)); breach('made')", "root"),
    Attempt(
        "change a device's mode", "os.chmod('/dev/full', stat.S_IMODE(os.stat('/dev/full').st_mode)); breach(1)", "root"
    ),
    Attempt(
        "change a device's mode through standard input",
        "s = os.fstat(0)\nif stat.S_ISCHR(s.st_mode): os.fchmod(0, stat.S_IMODE(s.st_mode)); breach('changed')",
        "root",
    ),
    Attempt("open the server's terminal", "os.open('/dev/tty', os.O_RDWR); breach('opened')", None),
    # Privileges
    Attempt(
        "hold a capability",
        "n = [l for l in open('/proc/self/status') if l.startswith('Cap') and int(l.split()[1], 16)]\nif n: breach(n)",
        "everyone",
    ),
    Attempt("gain privileges by exec", "if 'NoNewPrivs:\\t1' not in open('/proc/self/status').read(): breach(1)", None),
    Attempt("become root", "os.setuid(0); breach(os.getuid())", "root"),
    Attempt("change root", "os.chroot('.'); breach('changed')", "root"),
    Attempt("make a user namespace", "call('unshare', 0x10000000); breach('made')", None),
    Attempt("make a mount namespace", "call('unshare', 0x00020000); breach('made')", "root"),
    Attempt("make a user namespace by clone", "breach(subprocess.check_output(['unshare', '--user', 'id']))", None),
    Attempt("mount", "call('mount', b'none', b'/tmp', b'tmpfs', 0, None); breach('mounted')", None),
    Attempt("make the system writable", "call('mount', None, b'/usr', None, 0x1000 | 0x20, None); breach(1)", None),
    Attempt("unmount", "call('umount2', b'/proc', 2); breach('unmounted')", None),
    Attempt("keep the host's name", "if socket.gethostname() != 'belljar': breach(socket.gethostname())", "everyone"),
    Attempt("change the host's name", "socket.sethostname('owned'); breach('changed')", None),
]

PRELUDE = """
import ctypes, os, socket, stat, subprocess
E = os.environ
def breach(what):
    print("BREACH:", what)
def call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
def unix(address):
    socket.socket(socket.AF_UNIX).connect(address)
try:
{attempt}
except (OSError, subprocess.CalledProcessError) as error:
    print("held:", error)
"""
