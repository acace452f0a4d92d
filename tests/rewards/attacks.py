"""Programs that attack the sandbox or the verifier. An attack that succeeds calls ``won()`` and so earns the reward.

The expected output of each of `PROGRAMS` is a secret, which it also gets as input; ``won()`` prints it. The secret is
also in a file of the host, whose name is ``HOST``.
"""

PRELUDE = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
TOKEN = open(0, closefd=False).read()
HOST, PARENT = {host!r}, {parent}
libc = ctypes.CDLL(None, use_errno=True)
def won():
    os.write(1, TOKEN.encode())
    os._exit(0)
def tried(*calls):  # won if one of them raises nothing and returns what is true: not None, nor -1 + 1
    for call in calls:
        try:
            if call():
                won()
        except (OSError, MemoryError, RuntimeError, subprocess.SubprocessError, ValueError):
            pass
"""

# name -> program, which is run after `PRELUDE`
PROGRAMS = {
    # processes
    "processes": (
        "tried(lambda: os.fork() + 1, lambda: subprocess.run(['/bin/true']).returncode + 1,\n"
        "      lambda: os.posix_spawn('/bin/true', ['true'], {{}}), lambda: os.system('true') == 0,\n"
        "      lambda: libc.syscall(435, (ctypes.c_char * 64)(), 64) + 1)"
    ),
    "daemon": "tried(lambda: os.fork() or os.setsid() or 1)\nos.close(0); os.close(1); os.close(2); time.sleep(99)",
    "threads": (
        "count = 0\nthreading.stack_size(1 << 15)\n"
        "try:\n    while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); count += 1\n"
        "except RuntimeError: pass\nif count > 64: won()\nos._exit(1)"
    ),
    "exec chain": "os.execv(sys.executable, [sys.executable, '/box/main.py'])",
    # memory, disk, output
    "memory": "blocks = [bytearray(1 << 24) for _ in range(20)]\nwon()",
    "memory of the kernel": (
        "tried(lambda: libc.mlockall(3) + 1, lambda: os.memfd_create('x') + 1,\n"
        "      lambda: libc.shmget(1, 1 << 20, 0o1666) + 1, lambda: libc.msgget(1, 0o1666) + 1,\n"
        "      lambda: libc.mq_open(b'/x', os.O_RDWR | os.O_CREAT, 0o666, None) + 1)"
    ),
    "raised limits": (
        "inf = resource.RLIM_INFINITY\nfor kind in range(16):\n"
        "    old = resource.getrlimit(kind)\n    try: resource.setrlimit(kind, (inf, inf))\n"
        "    except (OSError, ValueError): continue\n    if old[1] != inf: won()"
    ),
    "disk": (
        "for number in range(9):\n    with open(f'/tmp/{{number}}', 'wb') as file: file.write(bytes(1 << 24))\nwon()"
    ),
    "sparse file": "os.truncate(os.open('/tmp/a', os.O_CREAT | os.O_RDWR), 1 << 40); won()",
    "many files": "for number in range(5000): open(f'/tmp/{{number}}', 'w').close()\nwon()",
    "open files": "files = [open('/dev/null') for _ in range(500)]\nwon()",
    "core dump": "os.chdir('/tmp'); os.abort()",
    "output flood": "while True: os.write(1, b'x' * (1 << 16))",
    "error flood": "while True: os.write(2, b'x' * (1 << 16))",
    # time
    "naps": "while True: time.sleep(0.01)",
    "deaf spin": (
        "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    # files of the host
    "host file": (
        "os.symlink(HOST, '/tmp/x')\n"
        "for name in (HOST, '/tmp/x', '/tmp' + '/..' * 9 + HOST, f'/proc/1/root{{HOST}}'):\n"
        "    tried(lambda: os.write(1, open(name, 'rb').read()))"
    ),
    "folders of the host": (
        "for name in ('/proc', '/sys', '/old', '/.old', '/oldroot', '/root', '/home', '/mnt'):\n"
        "    tried(lambda: os.listdir(name))\n"
        "for name in ('/proc/self/maps', '/etc/passwd', '/etc/shadow'): tried(lambda: open(name).read())"
    ),
    "read-only": (
        "for name in ('/x', '/usr/x', '/usr/bin/x', '/box/x', '/etc/x', '/dev/x', '/lib/x', '/python/x',\n"
        "             '/python/lib/x', os.__file__, sys.executable):\n    tried(lambda: open(name, 'a'))"
    ),
    "mounts": (
        "tried(*[lambda f=f: libc.mount(None, b'/', None, f, None) + 1 for f in (32, 4128)],\n"
        "      lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) + 1, lambda: libc.umount2(b'/tmp', 2) + 1,\n"
        "      *[lambda n=n: libc.syscall(n, b'tmpfs', 0, 0) + 1 for n in (428, 429, 430, 431, 432, 442)],\n"
        "      lambda: os.mknod('/tmp/x', 0o060666, os.makedev(254, 0)) or 1,\n"
        "      lambda: libc.name_to_handle_at(-100, b'/usr', (ctypes.c_char * 256)(), None, 0) + 1)"
    ),
    "chroot": "tried(lambda: os.chroot('/tmp') or 1)\nif os.path.exists(HOST): won()",
    "devices": (
        "for name in ('kmsg', 'mem', 'sda', 'vda', 'fuse', 'kvm', 'tty', 'ptmx', 'shm/x', 'nvidia0', 'console'):\n"
        "    tried(lambda: open(f'/dev/{{name}}', 'r+b', buffering=0))"
    ),
    "other descriptors": "for end in range(3, 256):\n    tried(lambda: os.fstat(end))",
    # files that are changed after they were checked, or left for the next program
    "changed program": (
        "tried(lambda: open('/box/main.py', 'w'), lambda: os.replace('/box/main.py', '/box/x') or 1,\n"
        "      lambda: os.unlink('/box/main.py') or 1)"
    ),
    "left behind": "if os.listdir('/tmp'): won()\nopen('/tmp/left', 'w').close()",
    "own input": "tried(lambda: os.write(0, b'x'), lambda: os.truncate(0, 0) or 1)",
    # users and privileges
    "users and namespaces": (
        "tried(lambda: os.setuid(0) or 1, lambda: os.setresuid(0, 0, 0) or 1, lambda: os.setgid(0) or 1,\n"
        "      lambda: libc.capset((ctypes.c_int * 2)(0x20080522, 0), (ctypes.c_int * 6)(*[-1] * 6)) + 1,\n"
        "      lambda: libc.setns(os.open('/', os.O_RDONLY), 0) + 1,\n"
        "      *[lambda f=f: libc.unshare(f) + 1 for f in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000)])\n"
        "if 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()): won()"
    ),
    "setuid file": (
        "open('/tmp/x', 'w').close(); os.chmod('/tmp/x', 0o6755)\n"
        "os.execv('/usr/bin/env', ['env', 'su', '-c', 'true'])"
    ),
    "modules": "tried(lambda: libc.syscall(313, 0, b'', 0) + 1, lambda: libc.reboot(0x1234567) + 1)",
    "kernel interfaces": (
        "area = (ctypes.c_char * 256)()\n"
        "tried(*[lambda n=n: libc.syscall(n, area, 64, 0) + 1 for n in (425, 426, 427, 434, 435, 438, 440, 441)])\n"
        "if os.uname().machine == 'x86_64':\n"
        "    tried(*[lambda n=n: libc.syscall(n, area, 64, 0) + 1 for n in (321, 323, 298, 248, 250, 300, 175)])"
    ),
    "other instruction set": (
        "import mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3' if os.uname().machine == 'x86_64' else b'\\0' * 8)\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "if call() > 0: won()"
    ),
    # other processes
    "kill others": (
        "tried(lambda: os.kill(os.getppid(), 9), lambda: os.kill(PARENT, 9) or 1, lambda: os.kill(-1, 9),\n"
        "      lambda: os.kill(1, 19), lambda: os.kill(1, 11))\ntime.sleep(99)"
    ),
    "limits of others": (
        "tried(lambda: os.nice(-20) + 21, lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),\n"
        "      lambda: libc.ptrace(0, 0, 0, 0) + 1, lambda: libc.ptrace(16, 1, 0, 0) + 1)"
    ),
    "memory of others": (
        "class Vector(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "area = ctypes.create_string_buffer(8); ours = Vector(ctypes.addressof(area), 8)\n"
        "tried(lambda: libc.process_vm_readv(1, ctypes.byref(ours), 1, ctypes.byref(ours), 1, 0) + 1)"
    ),
    # network
    "any socket": (
        "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, 17, 38, 40):\n"
        "    for kind in (1, 2, 3):\n        tried(lambda: socket.socket(family, kind))"
    ),
    "abstract socket": (
        "a, b = socket.socketpair()\n"
        "tried(lambda: a.connect('\\0' + HOST) or 1, lambda: a.bind('\\0x') or 1, lambda: a.sendto(b'x', '\\0' + HOST))"
    ),
    "descriptors by message": (
        "a, b = socket.socketpair()\ntried(lambda: socket.send_fds(a, [b'x'], [0]), lambda: a.listen() or 1)"
    ),
    # ways to end
    "stack": "sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "right, then crash": "os.write(1, TOKEN.encode()); os.abort()",
    "right, then fail": "print(TOKEN); sys.exit(1)",
    "right, then hang": "print(TOKEN, flush=True); time.sleep(99)",
}  # fmt: skip

# Attacks on `ASSERTIONS`, tests that demand `answer(7) == SECRET`.
SECRET = 918_273_645
ASSERTIONS = f"""
assert answer(7) == {SECRET}
assert all(answer(n) != 0 for n in (7, 7))
assert isinstance(answer(7), int) and abs(answer(7)) == {SECRET}
assert math.isclose(float(answer(7)), {SECRET}.0)
"""
FORGED = {
    "exit": "import os; os._exit(0)",
    "every exit status": "import os\ndef answer(n): os._exit(100 + n)",
    "SystemExit": "def answer(n): raise SystemExit(0)",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef answer(n): raise KeyboardInterrupt",
    "equal number": (
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def answer(n): return Equal(1)"
    ),
    "argument's comparison": "def answer(n): return type('X', (float,), {'__eq__': lambda a, b: True})('nan')",
    "names of the tests": (
        "def all(x): return True\ndef isinstance(a, b): return True\ndef abs(x): return answer(x)\n"
        "class math: isclose = staticmethod(lambda a, b: True)\ndef answer(n): return 1"
    ),
    "forged replies": (
        "import os\nfor end in range(3, 64):\n    try: os.write(end, b'{\"value\": true}\\n' * 20)\n"
        "    except OSError: pass\ndef answer(n): return 1"
    ),
    "forged exceptions": (
        "import os\nfor name in ('SystemExit', 'KeyboardInterrupt', 'GeneratorExit', 'AssertionError', 'open'):\n"
        "    for end in range(3, 64):\n"
        "        try: os.write(end, b'{\"raise\": \"%s\", \"text\": \"0\"}\\n' % name.encode())\n"
        "        except OSError: pass"
    ),
    "deep reply": (
        "import os\nfor end in range(3, 64):\n"
        "    try: os.write(end, b'{\"value\":' + b'{\"list\":[' * 9999 + b'\\n')\n    except OSError: pass"
    ),
    "endless reply": (
        "import os\ndef answer(n):\n    for end in range(3, 64):\n"
        "        try:\n            while True: os.write(end, b'9' * 65536)\n        except OSError: pass"
    ),
    "long number": "def answer(n): return 16 ** 6_000_000",
    "closed wires": "import os\nos.closerange(0, 64)\ndef answer(n): return 1",
    "files": (
        "import os\ndef answer(n):\n    digits = ('918' + '273' + '645').encode()\n"
        "    for folder in ('/box', '/tmp', '/proc/1', '/dev/fd'):\n"
        "        for name in os.listdir(folder) if os.path.isdir(folder) else ():\n"
        "            if name != 'program.py' and digits in open(f'{folder}/{name}', 'rb').read(): return int(digits)\n"
        "    return 1"
    ),
    "swallowed request": (
        "import os\nfor end in range(3, 64):\n    try: os.set_blocking(end, False); os.read(end, 9999)\n"
        "    except OSError: pass\ndef answer(n): return 1"
    ),
    "spin": "def answer(n):\n    while True: pass",
}  # fmt: skip

# C++ programs, which can attack the compiler too
CPP = {
    "include of a host file": '#include "{host}"\nint main() {{}}',
    "host file in the binary": (
        'asm("data: .incbin \\"{host}\\"\\nend:"); extern char data[], end[];\n#include <unistd.h>\n'
        "int main() {{ write(1, data, end - data); }}"
    ),
    "endless include": '#include "/dev/zero"\nint main() {{}}',
    "template bomb": "template <long n> struct S {{ S<n + 1> a; S<n + 2> b; }};\nint main() {{ S<0> s; }}\n",
    "large binary": "int a[1 << 28] = {{1}};\nint main() {{}}",
    "large array": "#include <stdio.h>\nstatic char a[1l << 40]; int main() {{ a[1l << 39] = 1; puts(a); }}",
    "strange interpreter": (
        '__attribute__((section(".interp"))) extern const char interpreter[] = "/nowhere";\nint main() {{}}'
    ),
}
