"""Ways out of a sandbox. Each is Python that calls `breach` when it got through; an OSError means the glass held.

`system` makes a system call by its name; `reach` takes it for a breach when the kernel looked at the arguments at all.
What runs against `process` changes nothing of the host: arguments are no-ops, harmless, or refused after the check.

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


DEVICES = "core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"

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
        "import pwd; n = {u.pw_name for u in pwd.getpwall()} - {'belljar', 'root', 'nobody'}\nif n: breach(n)",
        "everyone",
    ),
    Attempt("read kernel tables that are root's", "breach(open('/proc/slabinfo').read())", "root", "/proc/slabinfo"),
    Attempt("read the kernel's keys", "n = open('/proc/keys').read()\nif n: breach(n)", None),
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
        "write to a file of /proc that is no process's",
        """
for folder, folders, files in os.walk('/proc'):
    # Linux lets everyone ask to be told of pressure, by writing.
    folders[:] = [name for name in folders if not (folder == '/proc' and (name.isdigit() or name == 'pressure'))]
    for path in (folder + '/' + name for name in files):
        try:
            os.close(os.open(path, os.O_WRONLY))
            if stat.S_ISREG(os.stat(path).st_mode): breach(path)  # what is masked is /dev/null
        except OSError: pass
""",
        None,
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
        None,
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
    # More files of the host
    Attempt("climb out by dots", "breach(open('/'.join(['..'] * 40) + E['SECRET']).read())", "everyone"),
    Attempt("link a file of the host here", "os.link(E['SECRET'], 'link'); breach(open('link').read())", "everyone"),
    Attempt("link the interpreter here", "os.link(os.__file__, 'link'); breach('linked')", None),
    Attempt("look at the hardware", "breach(os.listdir('/sys/class'))", "everyone", "/sys"),
    Attempt(
        "see more of /sys than processors",
        # Engines of containers show the group of the container itself.
        "seen = ('/sys/devices/system/cpu', '/sys/fs/cgroup')\n"
        "n = [f for f, _, names in os.walk('/sys') if names and not f.startswith(seen)]\n"
        "if n: breach(n[:3])",
        "everyone",
        "/sys/class",
    ),
    Attempt(
        "see control groups of others",
        """
for folder, folders, files in os.walk('/sys/fs/cgroup'):
    if 'cgroup.procs' not in files: continue  # what holds the controllers' own trees
    strangers = [pid for pid in open(folder + '/cgroup.procs').read().split() if pid == '0']
    if folders or strangers: breach((folder, folders, strangers))
""",
        None,
    ),
    Attempt(
        "learn how the host's processors are doing",
        "breach(open('/sys/devices/system/cpu/vulnerabilities/meltdown').read())",
        "everyone",
        "/sys/devices/system/cpu/vulnerabilities/meltdown",
    ),
    Attempt("read the kernel's log", "os.close(os.open('/proc/kmsg', os.O_RDONLY)); breach(1)", "root", "/proc/kmsg"),
    Attempt("ask for the kernel's log", "reach('syslog', 10, 0, 0)", "root"),
    Attempt(
        "learn the kernel's addresses",
        "n = [l for l in open('/proc/kallsyms').readlines()[:5000] if int(l.split()[0], 16)]\nif n: breach(n[0])",
        "root",
        "/proc/kallsyms",
    ),
    Attempt("name a file by handle", "handle('/dev/shm'); breach('named')", "everyone", "/dev/shm"),
    Attempt(
        "open a file by handle",
        "breach(system('open_by_handle_at', os.open('/dev/shm', 0), handle('/dev/shm'), 0))",
        "root",
        "/dev/shm",
    ),
    Attempt("watch the whole file system", "breach(system('fanotify_init', 0, 0))", "root"),
    # More processes of the host
    Attempt("read the server's memory map", "breach(open('/proc/' + E['SERVER'] + '/maps').read(99))", "everyone"),
    Attempt("open the server's memory", "open('/proc/' + E['SERVER'] + '/mem', 'rb'); breach('opened')", "root"),
    Attempt("list the server's descriptors", "breach(os.listdir('/proc/' + E['SERVER'] + '/fd'))", "everyone"),
    Attempt("signal everybody", "os.kill(-1, 0); breach('signalled')", None),
    Attempt("hold the server by a descriptor", "breach(os.pidfd_open(int(E['SERVER'])))", "everyone"),
    Attempt(
        "trace a child",
        """
child = os.fork()
if not child: signal.pause()
try:
    system('ptrace', 0x4206, child, 0, 0); breach('seized')
finally:
    os.kill(child, 9); os.waitpid(child, 0)
""",
        "everyone",
    ),
    Attempt("be traced", "reach('ptrace', 0, 0, 0, 0)", "everyone"),
    Attempt("read memory of a process", "reach('process_vm_readv', os.getpid(), 0, 0, 0, 0, 0)", "everyone"),
    Attempt("write memory of a process", "reach('process_vm_writev', os.getpid(), 0, 0, 0, 0, 0)", "everyone"),
    Attempt("take a descriptor", "breach(system('pidfd_getfd', os.pidfd_open(os.getpid()), 0, 0))", "everyone"),
    Attempt("compare processes", "reach('kcmp', os.getpid(), os.getpid(), 2, 0, 0)", "everyone"),
    # The sandbox's first process
    Attempt(
        "find a capability in the first process",
        "n = [l for l in open('/proc/1/status') if l[:6] in ('CapPrm', 'CapEff', 'CapInh', 'CapAmb') "
        "and int(l.split()[1], 16)]\nif n: breach(n)",
        None,
    ),
    Attempt("read the first process's variables", "n = open('/proc/1/environ').read()\nif n: breach(n)", None),
    Attempt("open the first process's memory", "open('/proc/1/mem', 'r+b'); breach('opened')", None),
    Attempt(
        "find its open files",
        """
for number in set(os.listdir('/proc/1/fd')) - set('012'):
    # bubblewrap's own, to hear of its child's end
    if (link := os.readlink('/proc/1/fd/' + number)) != 'anon_inode:[eventfd]': breach(link)
""",
        None,
    ),
    Attempt("enter its namespaces", "call('setns', os.open('/proc/1/ns/mnt', 0), 0); breach('entered')", None),
    Attempt("enter its namespaces by a pidfd", "call('setns', os.pidfd_open(1), 0x7e020000); breach('entered')", None),
    Attempt("enter its mounts by a pidfd", "call('setns', os.pidfd_open(1), 0x00020000); breach('entered')", None),
    Attempt("enter all, upper bits", "breach(system('setns', os.pidfd_open(1), 1 << 32 | 0x7e020000))", None),
    Attempt("trace it", "system('ptrace', 0x4206, 1, 0, 0); breach('seized')", None),
    # More network and sockets
    Attempt("find a socket's name", "if E['ABSTRACT'] in open('/proc/net/unix').read(): breach(1)", "everyone"),
    Attempt("find a port", "if '%04X' % int(E['PORT']) in open('/proc/net/tcp').read(): breach(1)", "everyone"),
    Attempt("open a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); breach(1)", "root"),
    Attempt(
        "hear of the kernel's devices", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15); breach(1)", "everyone"
    ),
    Attempt("talk to the hypervisor", "socket.socket(40, socket.SOCK_STREAM); breach(1)", "everyone", "/dev/vsock"),
    Attempt("talk to the hypervisor, upper bits", "breach(system('socket', 1 << 32 | 40, 1, 0))", None),
    Attempt("open the kernel's cryptography", "socket.socket(38, socket.SOCK_SEQPACKET); breach(1)", None),
    Attempt(
        "open a socket of an odd family",
        """
for family in {*range(60)} - {1, 2, 10, 16}:
    for kind in range(1, 6):
        try: socket.socket(family, kind); breach(family)
        except OSError: pass
""",
        None,
    ),
    # Privileges and namespaces
    Attempt("become another user", "os.setuid(12345); breach(os.getuid())", "root"),
    Attempt("join root's group", "os.setgid(0); os.setgroups([0]); breach(os.getgroups())", "root"),
    Attempt(
        "take a capability", "system('capset', header(), struct.pack('6I', 128, 128, 0, 0, 0, 0)); breach(1)", "root"
    ),
    Attempt("be more important than others", "os.setpriority(os.PRIO_PROCESS, 0, -5); breach('raised')", "root"),
    Attempt(
        "be spared when memory runs out", "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-999'); breach(1)", None
    ),
    Attempt("enter a namespace", "call('setns', os.open('/proc/self/ns/uts', 0), 0); breach('entered')", "root"),
    *(
        Attempt(f"make a {name} namespace by the call {call}", f"namespace({call!r}, {flag:#x})", None)
        for name, flag in (("user", 0x10000000), ("network", 0x40000000), ("pid", 0x20000000))
        for call in ("clone", "clone3")
    ),
    Attempt(
        "see where its groups are",
        "n = [l for l in open('/proc/self/cgroup') if l.strip()[-2:] != ':/']\nif n: breach(n)",
        None,
    ),
    Attempt("honour set-user-ID files", "if not os.statvfs('.').f_flag & os.ST_NOSUID: breach('honoured')", None),
    Attempt("honour devices", "if not os.statvfs('.').f_flag & os.ST_NODEV: breach('honoured')", None),
    # Mounts, the other way
    Attempt("make a file system", "breach(system('fsopen', b'tmpfs', 0))", "root"),
    Attempt("copy a mount", "breach(system('open_tree', -100, b'/', 1))", "root"),
    Attempt("move a mount", "reach('move_mount', -1, b'', -1, b'', 0)", "root"),
    Attempt("change a mount", "reach('mount_setattr', -100, b'/', 0, bytes(32), 32)", "root"),
    Attempt("change the root", "reach('pivot_root', b'.', b'.')", None),
    # Terminals
    Attempt("type into a terminal", "fcntl.ioctl(pty.openpty()[1], 0x5412, b'x'); breach('typed')", "root"),
    Attempt("type into a terminal, upper bits", "reach('ioctl', pty.openpty()[1], 1 << 32 | 0x5412, b'x')", "root"),
    Attempt("speak to the console", "reach('ioctl', pty.openpty()[1], 0x541c, b'\\0')", "everyone"),
    Attempt("load a line discipline", "reach('ioctl', pty.openpty()[1], 0x5423, bytes(4))", "everyone"),
    # Devices
    Attempt(
        "change a device's owner",
        "s = os.stat('/dev/full'); os.chown('/dev/full', s.st_uid, s.st_gid); breach(1)",
        "root",
    ),
    Attempt("write through a device of the disk", "os.open('/dev/vda', os.O_RDONLY); breach('opened')", None),
    # Corners of the kernel
    Attempt("ask for a keyring", "breach(system('keyctl', 0, -3, 0))", "everyone", "/proc/keys"),
    Attempt("keep a key", "breach(system('add_key', b'user', b'belljar', b'x', 1, -1))", "everyone", "/proc/keys"),
    Attempt("find a key", "reach('request_key', b'user', b'belljar-none', 0, 0)", "everyone", "/proc/keys"),
    Attempt("load a program into the kernel", "breach(system('bpf', 0, struct.pack('4I', 2, 4, 4, 1), 16))", "root"),
    Attempt(
        "count events",
        "breach(system('perf_event_open', struct.pack('IIQ', 1, 64, 0) + bytes(48), 0, -1, -1, 0))",
        "root",
    ),
    Attempt(
        "handle page faults", "breach(system('userfaultfd', 1))", "everyone", "/proc/sys/vm/unprivileged_userfaultfd"
    ),
    Attempt(
        "queue system calls",
        "breach(system('io_uring_setup', 1, bytes(120)))",
        "everyone",
        "/proc/sys/kernel/io_uring_disabled",
    ),
    Attempt("switch randomisation off", "breach(system('personality', 0x0040000))", "everyone"),
    Attempt("switch it off, upper bits", "breach(system('personality', 1 << 32 | 0x0040000))", None),
    Attempt("switch it off, beside the top bit", "breach(system('personality', 0x80040000))", None),
    Attempt("map pages into a pipe", "reach('vmsplice', os.pipe()[1], 0, 0, 0)", "everyone"),
    Attempt("ask for the clock's correction", "breach(system('adjtimex', bytes(208)))", "everyone"),
    Attempt("place memory", "reach('set_mempolicy', 0, 0, 0)", None),
    Attempt("load a module", "reach('finit_module', -1, b'', 0)", None),
    Attempt("load a kernel", "reach('kexec_load', 0, 0, 0, 0xffff)", None),
    Attempt("swap to a file", "reach('swapon', b'/nowhere', 0)", "root"),
    Attempt("keep accounts", "reach('acct', b'/nowhere/file')", "root"),
    Attempt("press the magic key", "os.close(os.open('/proc/sysrq-trigger', os.O_WRONLY)); breach('opened')", None),
    Attempt("forward packets", "os.close(os.open('/proc/sys/net/ipv4/ip_forward', os.O_WRONLY)); breach(1)", None),
    # Other numbers for the same calls
    Attempt(
        "make a call as a 32-bit program",
        """
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex('b814000000 cd80 c3'))  # mov eax, getpid; int 0x80; ret
enter = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
child = os.fork()  # without such calls in the kernel, it dies of the try
if not child: os._exit(7 if enter() > 0 else 0)
if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7: breach('answered')
""",
        None,
    ),
    Attempt("make a call as an x32 program", "breach(system(0x40000000 + 39))", None),
]

# In a kernel: the runner is an object in the same process, with the number of the request and the socket.
FORGER = """
import gc, json, os, struct
(runner,) = [one for one in gc.get_objects() if type(one).__name__ == 'Runner']
def forge(**message):
    body = json.dumps({'id': runner._execution, **message}).encode()
    os.write(runner.channel.fileno(), struct.pack('!I', len(body)) + body)
"""
SPIN = "\nwhile True: pass"
_END = "forge(type='finished', is_ok=True, execution_count=1, cpu_s=0)"


@dataclass(frozen=True)
class Forgery:
    name: str
    cells: tuple[str, ...]
    """The last one is refused, the others are ordinary cells to the host."""
    refusal: str


FORGERIES = [
    Forgery(
        "ask where nobody may",
        (f"{FORGER}forge(type='input', prompt='?', is_password=False){SPIN}",),
        "asked for input, which this execution does not allow",
    ),
    Forgery("end twice", (f"{FORGER}{_END}", "1"), "'finished', which nobody had asked for"),
    Forgery("end twice at once", (f"{FORGER}{_END}; {_END}{SPIN}", "1"), "'finished', which nobody had asked for"),
]

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, platform, pty, signal, socket, stat, struct, subprocess
E = os.environ
NAMES = dict(
    acct=(163, 89), add_key=(248, 217), adjtimex=(159, 171), bpf=(321, 280), capset=(126, 91), clone=(56, 220),
    clone3=(435, 435), fanotify_init=(300, 262), finit_module=(313, 273), fsopen=(430, 430), io_uring_setup=(425, 425),
    ioctl=(16, 29), kcmp=(312, 272), kexec_load=(246, 104), keyctl=(250, 219), mount_setattr=(442, 442),
    move_mount=(429, 429), name_to_handle_at=(303, 264), open_by_handle_at=(304, 265), open_tree=(428, 428),
    perf_event_open=(298, 241), personality=(135, 92), pidfd_getfd=(438, 438), pivot_root=(155, 41),
    setns=(308, 268),
    process_vm_readv=(310, 270), process_vm_writev=(311, 271), ptrace=(101, 117), request_key=(249, 218),
    set_mempolicy=(238, 237), socket=(41, 198), swapon=(167, 224), syslog=(103, 116), userfaultfd=(323, 282),
    vmsplice=(278, 75),
)
def system(call, *arguments):
    number = call if isinstance(call, int) else NAMES[call][['x86_64', 'aarch64'].index(platform.machine())]
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    words = [a if not isinstance(a, (int, bytes)) else ctypes.c_ulong(a % 2**64) if isinstance(a, int)
             else ctypes.create_string_buffer(a, len(a) + 1) for a in arguments]
    answer = library.syscall(ctypes.c_long(number), *words)
    if answer < 0:
        raise OSError(ctypes.get_errno(), f'{{call}}: {{os.strerror(ctypes.get_errno())}}')
    return answer
def reach(call, *arguments):
    try:
        breach(system(call, *arguments))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS): breach(error)
        raise
def handle(path):
    found = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136)
    system('name_to_handle_at', -100, path.encode(), found, bytes(8), 0)
    return found
def header():
    return struct.pack('Ii', 0x20080522, 0)
def namespace(call, flag):
    arguments = [flag | 17, 0, 0, 0, 0] if call == 'clone' else [struct.pack('11Q', flag, 0, 0, 0, 17, *[0] * 6), 88]
    if not system(call, *arguments): os._exit(0)
    breach('made')
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
