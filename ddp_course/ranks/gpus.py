"""The GPUs of this machine: how many a process may use, and who asks for them.

A process that has asked CUDA for its GPUs must not fork: in its children, CUDA fails
with "Cannot re-initialize CUDA in forked subprocess" or "initialization error", even in
a child that computes on the CPU. The fork server therefore never asks.
"""

import os
import sys
from contextlib import suppress

# the files by which a process reaches the drivers of NVIDIA, NVIDIA in WSL, and AMD
DRIVERS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
# environment variables for processes that are to compute on the CPU, whatever is there;
# the second one is DeepSpeed's
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def driver_is_here():
    """Whether this machine may have a GPU for torch.cuda, seen without asking it."""
    if sys.platform != "linux":
        return False  # macOS has none, and Windows has no fork server
    return any(f"/dev/{name}".startswith(DRIVERS) for name in os.listdir("/dev"))


def count():
    """How many GPUs this process may use; CUDA_VISIBLE_DEVICES may hide some or all.

    It is the one place of the course that counts them.
    """
    import torch

    return torch.cuda.device_count()


def asks(name):
    """Whether importing this module asks for a GPU.

    A forked process tries it, and ends at the first question, before CUDA hears of it.
    The caller must have a single thread, and must have imported torch.
    """
    child = os.fork()
    if child == 0:
        asked = True
        try:
            _end_at_a_question()
            with suppress(Exception):  # the importer will see the same error
                __import__(name)
            asked = _driver_is_open()
        finally:
            os._exit(asked)
    return os.waitpid(child, 0)[1] != 0


def _end_at_a_question():
    """Let this process end with code 1 as soon as it asks for a GPU in Python."""
    import torch

    def asked(*_, **__):
        os._exit(1)

    for owner, question in questions(torch):
        setattr(owner, question, asked)


def questions(torch):
    """The functions of torch through which all questions for GPUs go: (owner, name)."""
    names = [(torch._C, "_cuda_getDeviceCount"), (torch._C, "_cuda_init")]
    names += [(torch._C, "_accelerator_hooks_device_count"), (torch.cuda, "_lazy_init")]
    for kind in ("count", "uuid"):  # by the drivers' libraries
        names += [
            (torch.cuda, f"_raw_device_{kind}_{lib}") for lib in ("nvml", "amdsmi")
        ]
    return [(owner, name) for owner, name in names if hasattr(owner, name)]


def _driver_is_open():
    """Whether this process has opened a driver: libraries may ask without torch."""
    files = f"/proc/{os.getpid()}/fd"
    for number in os.listdir(files):
        with suppress(OSError):  # the folder's own number is gone already
            if os.readlink(f"{files}/{number}").startswith(DRIVERS):
                return True
    return False
