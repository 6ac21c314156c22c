"""The system calls that an answer may not make, as a filter for bwrap's --seccomp.

Through some of them it would get memory that belongs to no process (System V's shared
memory, message queues, keys), so no limit counts it; through others it would reach into
the memory of other processes. All of them fail with EPERM. See seccomp(2).
"""

import errno
import platform
import struct

DENIED = {  # names for the reader; numbers from the kernel's tables, per architecture
    "x86_64": {
        "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "add_key": 248,
        "request_key": 249, "keyctl": 250, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "io_uring_setup": 425,
    },
    "aarch64": {
        "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "add_key": 217,
        "request_key": 218, "keyctl": 219, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425,
    },
}  # fmt: skip
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
OTHER_NUMBERS = 0x40000000  # from here on, the calls of x86's other interface, x32
# linux/bpf_common.h and linux/seccomp.h
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE = 0, 4  # where they are in struct seccomp_data
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM


def a_filter():
    """The filter's program, bytes; None on an architecture that we do not know."""
    machine = platform.machine()
    if machine not in DENIED:
        return None
    numbers = sorted(DENIED[machine].values())
    deny = (
        len(numbers) + 5
    )  # the place of the last step; a jump counts what it leaves out
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 0, deny - 2, ARCHITECTURES[machine]),  # no other one's calls
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, deny - 4, 0, OTHER_NUMBERS),
    ]
    steps += [
        (EQUAL, deny - place - 1, 0, number) for place, number in enumerate(numbers, 4)
    ]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
