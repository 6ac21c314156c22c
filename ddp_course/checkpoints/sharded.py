"""Checkpoints of which each rank writes and reads its shards: torch's DCP.

A checkpoint is a folder: `epoch-0003` after three epochs, `epoch-0003-samples-00000640`
after 640 samples more, counted over all ranks. It gets this name when all ranks have
written, so one that was interrupted is never read. Any number of ranks can resume from it,
with DDP or `fully_shard`, no matter which of them wrote it.
"""

import io
import math
import pickle
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

from ddp_course import UsageError
from ddp_course.files import (
    PlainUnpickler,
    Unusable,
    check_alike,
    content_of,
    open_file,
    tensors_in,
)

SAVED = (
    "ddp",
    "fsdp",
    "hsdp",
)  # the ways of sharding whose optimizer torch can save and load


def parts_of(optimizer):
    """What torch takes for it: an optimizer, or several that a loop uses like one."""
    return getattr(optimizer, "optimizers", optimizer)


def begin(args, model, optimizer):
    """Return whole epochs, and samples of the next one, that the newest checkpoint has
    seen: 0 and 0 without --resume.

    args: with out, resume, sharding and shape. Raises UsageError where the run cannot be
    resumed.
    """
    if args.resume:
        return resume(args, model, optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    return 0, 0


def resume(args, model, optimizer):
    """Read the newest checkpoint into a model and its optimizer; return what it has seen."""
    if args.sharding not in SAVED:
        raise UsageError("--resume needs --sharding ddp, fsdp or hsdp")
    there = found_in(args.out / "checkpoints")
    if not there:
        raise UsageError(f"no checkpoint in {args.out}: start without --resume")
    weights, averages = get_state_dict(model, parts_of(optimizer))
    progress = {"epoch": 0, "samples": 0, "shape": ""}
    state = {"weights": weights, "averages": averages, **progress}
    reader = reader_of(there[-1])
    try:  # into the tensors that are there
        dcp.load(state, storage_reader=reader, planner=Planner())
        found = {name: state[name] for name in progress}
        check_alike(found, progress, "epoch, samples and shape")
    except (CheckpointException, Unusable) as error:
        raise UsageError(f"{there[-1]} cannot be used: {cause_of(error)}") from None
    for name in ("epoch", "samples"):
        if state[name] < 0:
            problem = f"its number of {name} is {state[name]}"
            raise UsageError(f"{there[-1]} cannot be used: {problem}")
    if state["shape"] != args.shape:
        raise UsageError(f"{there[-1]} is of --shape {state['shape']}")
    weights, averages = state["weights"], state["averages"]
    try:
        own = get_state_dict(model, parts_of(optimizer))[1]["param_groups"]
        check_alike(averages["param_groups"], own, "the optimizer's state")
    except Unusable as reason:
        raise UsageError(f"{there[-1]} cannot be used: {reason}") from None
    set_state_dict(
        model,
        parts_of(optimizer),
        model_state_dict=weights,
        optim_state_dict=averages,
    )
    return state["epoch"], state["samples"]


# ---- without running what is in the files ----

# what torch writes into .metadata, which is a pickle
OF_METADATA = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((metadata.__name__, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip
KINDS = {
    ("torch", name)
    for name in dir(torch)
    if isinstance(getattr(torch, name), torch.dtype)
}


def member(kind, name):
    """In place of getattr, by which Python 3.11.2 pickles a member of an Enum: it finds
    torch's memory formats, and nothing else.
    """
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr")
    return kind[name]


class MetadataUnpickler(PlainUnpickler):
    allowed = OF_METADATA | KINDS

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return member
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint's .metadata with the classes that belong there, and nothing else;
    torch's own reader would run what the file says. Raises Unusable.
    """

    def __init__(self, folder):
        super().__init__(folder)
        packed = content_of(folder / ".metadata")
        try:
            self.found = MetadataUnpickler(io.BytesIO(packed)).load()
            names = {info.relative_path for info in self.found.storage_data.values()}
            for form in self.found.state_dict_metadata.values():
                check_chunks(form)
            for name in names:
                if Path(name).name != name:
                    raise Unusable(f"it names {name}, which is elsewhere")
                open_file(folder / name).close()
        except OSError as error:
            raise Unusable(f"{name} cannot be read: {error.strerror}") from None
        except Exception as error:  # a file may hold anything
            reason = Unusable.because(error)
            raise Unusable(f".metadata is damaged, or not torch's: {reason}") from None

    def read_metadata(self, *args, **kwargs):
        self.found.storage_meta = self.found.storage_meta or metadata.StorageMeta()
        self.found.storage_meta.load_id = self.load_id
        return self.found


def check_chunks(form):
    """Raise Unusable if the chunks of a tensor are not all of it: torch would leave the
    numbers as they are, without a word.
    """
    if isinstance(form, metadata.TensorStorageMetadata):
        if sum(math.prod(chunk.sizes) for chunk in form.chunks) != math.prod(form.size):
            raise Unusable("a part of a tensor is missing")


class Planner(dcp.DefaultLoadPlanner):
    """Takes values that are no tensors as data, too: torch's own planner unpickles them."""

    def load_bytes(self, read_item, value):
        packed = io.BytesIO()
        torch.save(tensors_in(value), packed)
        packed.seek(0)
        super().load_bytes(read_item, packed)


def reader_of(folder):
    """A Reader on each rank. Raises UsageError on all of them if one cannot read it."""
    reader, problem = None, None
    try:
        reader = Reader(folder)
    except Unusable as reason:
        problem = str(reason)
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if problem := next(filter(None, problems), None):
        raise UsageError(f"{folder} cannot be used: {problem}")
    return reader


def cause_of(error):
    """What went wrong on the first rank that failed, in a line."""
    if isinstance(error, Unusable):
        return str(error)
    [(cause, _), *_] = error.failures.values()
    first_line = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__} {first_line}".strip()


def found_in(folder):
    """The finished checkpoints, oldest first."""
    return sorted(folder.glob("epoch-*"))


def save(args, model, optimizer, epoch, samples=0):
    """Write a checkpoint after this many epochs, and samples of the next one over all
    ranks, in place of the older ones.
    """
    if args.sharding not in SAVED:
        return
    weights, averages = get_state_dict(model, parts_of(optimizer))
    state = {"weights": weights, "averages": averages}
    state |= {"epoch": epoch, "samples": samples, "shape": args.shape}
    folder = args.out / "checkpoints"
    name = f"epoch-{epoch:04}" + (f"-samples-{samples:08}" if samples else "")
    if dist.get_rank() == 0:  # what a killed run has left
        shutil.rmtree(folder / "unfinished", ignore_errors=True)
    dist.barrier()
    try:
        dcp.save(state, checkpoint_id=folder / "unfinished")
    except CheckpointException as error:
        raise UsageError(f"cannot write to {folder}: {cause_of(error)}") from None
    if dist.get_rank() == 0:  # all ranks have written
        older = found_in(folder)
        (folder / "unfinished").rename(folder / name)
        for checkpoint in older:
            shutil.rmtree(checkpoint)
    dist.barrier()
