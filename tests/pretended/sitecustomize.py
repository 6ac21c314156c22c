"""A machine that seems to have GPUs: with this folder in PYTHONPATH, torch in every process
says so, and each question for them and each use of them is noted.

DDP_COURSE_PRETENDED_GPUS: how many there seem to be. DDP_COURSE_PRETENDED_COUNT: how
many `ddp_course.ranks.gpus.count` finds; without it, as many. DDP_COURSE_PRETENDED_LOG:
the file for the notes, one JSON per line: process, program, kind, stack.
DDP_COURSE_PRETENDED_TRUST: the fork server imports what it is told to. Using such a GPU
is an error.
"""

import importlib.util
import json
import os
import sys
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

GPUS = int(os.environ.get("DDP_COURSE_PRETENDED_GPUS", 1))


def note(kind):
    """Append a note to the log, with the stack of the caller."""
    frames = traceback.extract_stack()[:-2]
    stack = [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in frames
        if "importlib" not in frame.filename
    ]
    row = {"process": os.getpid(), "program": sys.orig_argv, "kind": kind}
    row["server"] = "multiprocessing.forkserver" in " ".join(sys.orig_argv) and (
        not in_a_rank()
    )
    if path := os.environ.get("DDP_COURSE_PRETENDED_LOG"):
        with open(path, "a") as file:
            file.write(json.dumps(row | {"stack": stack}) + "\n")


def in_a_rank():
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def visible():
    """How many of the GPUs CUDA_VISIBLE_DEVICES shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return GPUS
    return min(GPUS, len([number for number in shown.split(",") if number.strip()]))


def torch_cuda(cuda):
    """torch.cuda and torch._C, with GPUs."""
    import torch

    def answer(name, value):
        def answered(*_, **__):
            note(name)
            return value() if callable(value) else value

        return answered

    def used(*_, **__):
        note("use")
        raise RuntimeError("Found no NVIDIA driver: this GPU is only pretended")

    properties = SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=80 * 2**30,
        multi_processor_count=132, warp_size=32, gcnArchName="", regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    torch._C._cuda_getDeviceCount = answer("count", visible)
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    cuda._raw_device_count_nvml = answer("nvml", lambda: GPUS)
    cuda.get_device_capability = answer("capability", lambda: (9, 0))
    cuda.get_device_name = answer("name", lambda: properties.name)
    cuda.get_device_properties = answer("properties", lambda: properties)
    cuda.current_device = answer("current", lambda: 0)
    torch._C._cuda_init = used  # which torch.cuda._lazy_init calls
    # what libraries ask of every GPU, wherever they compute: Accelerate, Trainer, torch's
    # distributed checkpoint and its compiler
    for module in (cuda, cuda.random):
        module.get_rng_state_all = lambda: []
        module.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
        module.set_rng_state = lambda *_: None
    cuda.current_stream, cuda.stream = lambda *_: stream(), lambda _: nullcontext()
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False


def stream():
    """What torch.cuda.current_stream() returns."""
    import torch

    return SimpleNamespace(
        device=torch.device("cuda", 0), device_index=0, device_type=1, stream_id=0,
        synchronize=lambda: None, wait_stream=lambda other: None,
        is_capturing=lambda: False,
    )  # fmt: skip


def torch_accelerator(accelerator):
    """torch.accelerator: Adam asks it in each step, on a CPU, too."""
    accelerator.current_stream = lambda *_: stream()


def gpus(module):
    """ddp_course.ranks.gpus: there is a driver, and perhaps another number of GPUs."""
    module.driver_is_here = lambda: GPUS > 0
    if "DDP_COURSE_PRETENDED_TRUST" in os.environ:
        module.asks = lambda name: False
    if found := os.environ.get("DDP_COURSE_PRETENDED_COUNT"):
        module.count = lambda: int(found)


CHANGES = {"torch.cuda": torch_cuda, "torch.accelerator": torch_accelerator}
CHANGES |= {"ddp_course.ranks.gpus": gpus}


class Finder:
    """Finds the modules to change, and changes them as soon as they are imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
