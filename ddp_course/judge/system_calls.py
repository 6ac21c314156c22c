"""The system calls that an answer may not make, as a filter for bwrap's --seccomp.

Through some of them it would get memory that belongs to no process (System V's shared
memory, message queues, keys, files in memory without a name), so no limit counts it;
through others it would reach into the memory of other processes. All of them fail with
EPERM. Larger buffers for sockets are promised and not given. See seccomp(2).
"""

import errno
import platform
import struct

DENIED = {  # names for the reader; numbers from the kernel's tables, per architecture
    "x86_64": {
        "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "add_key": 248,
        "request_key": 249, "keyctl": 250, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "io_uring_setup": 425, "io_setup": 206, "memfd_create": 319,
        "memfd_secret": 447, "inotify_init": 253, "inotify_init1": 294,
        "fanotify_init": 300, "vmsplice": 278,
    },
    "aarch64": {
        "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "add_key": 217,
        "request_key": 218, "keyctl": 219, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425, "io_setup": 0, "memfd_create": 279,
        "memfd_secret": 447, "inotify_init1": 26, "fanotify_init": 262, "vmsplice": 75,
    },
}  # fmt: skip
LOOKED_INTO = {  # calls of which it depends on the arguments
    "x86_64": {"mmap": 9, "setsockopt": 54},
    "aarch64": {"mmap": 222, "setsockopt": 208},
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
OTHER_NUMBERS = 0x40000000  # from here on, the calls of x86's other interface, x32
SHARED_AND_WITHOUT_A_FILE = 0x21  # mmap's flags: once it is let go, nobody owns it
OF_SOCKETS, BUFFERS = 1, (7, 8, 32, 33)  # SOL_SOCKET; SO_SNDBUF and its kin
# linux/bpf_common.h and linux/seccomp.h
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # where they are in struct seccomp_data
RESULTS = {"allow": 0x7FFF0000, "deny": 0x00050000 | errno.EPERM, "ignore": 0x00050000}


def a_filter():
    """The filter's program, bytes; None on an architecture that we do not know."""
    machine = platform.machine()
    return assembled(program(machine)) if machine in DENIED else None


def program(machine):
    """The steps, (code, number, where to go on if it is so, and if not), and names of
    places; None goes on with the next step.
    """
    calls = LOOKED_INTO[machine]
    steps = [
        (LOAD, ARCHITECTURE, None, None),
        (EQUAL, ARCHITECTURES[machine], None, "deny"),  # no other one's calls
        (LOAD, NUMBER, None, None),
        (AT_LEAST, OTHER_NUMBERS, "deny", None),
        (EQUAL, calls["mmap"], "mmap", None),
        (EQUAL, calls["setsockopt"], "setsockopt", None),
    ]
    steps += [(EQUAL, number, "deny", None) for number in DENIED[machine].values()]
    steps += [
        "allow",
        "mmap",
        (LOAD, ARGUMENTS + 3 * 8, None, None),
        (AND, SHARED_AND_WITHOUT_A_FILE, None, None),
        (EQUAL, SHARED_AND_WITHOUT_A_FILE, "deny", "allow"),
        "setsockopt",
        (LOAD, ARGUMENTS + 1 * 8, None, None),
        (EQUAL, OF_SOCKETS, None, "allow"),
        (LOAD, ARGUMENTS + 2 * 8, None, None),
    ]
    steps += [(EQUAL, option, "ignore", None) for option in BUFFERS]
    return steps + ["allow", "deny", "ignore"]


def assembled(steps):
    """The program as the kernel takes it: a jump counts the steps that it leaves out."""
    places, packed = {}, []
    for step in steps:  # the last place of a name counts: jumps go forward
        if isinstance(step, str):
            places[step] = len(packed)
        if not isinstance(step, str) or step in RESULTS:
            packed.append(step)
    content = b""
    for here, step in enumerate(packed, 1):
        if isinstance(step, str):
            content += struct.pack("HBBI", RETURN, 0, 0, RESULTS[step])
            continue
        code, number, so, otherwise = step
        jumps = [places[to] - here if to else 0 for to in (so, otherwise)]
        content += struct.pack("HBBI", code, *jumps, number)
    return content
