"""The files of a checkpoint: which are there, which are whole, and what is in them.

A checkpoint is a folder, `step-00000012`, with files and a manifest: JSON that names
each file and its SHA-256. The manifest is written last and deleted first.
"""

import hashlib
import logging
import reprlib
import shutil
from contextlib import suppress

import torch
import torch.distributed as dist

from ddp_course import UsageError
from ddp_course.files import Unusable, check_alike, json_of, open_file, tensors_of

# ---- which are there ----


def checkpoints(folder):
    """The checkpoints in a folder, finished or not, in the order of their steps."""
    return sorted(path for path in folder.glob("step-" + 8 * "[0-9]") if path.is_dir())


def finished(folder):
    """The checkpoints that have a manifest, in the order of their steps."""
    return [path for path in checkpoints(folder) if (path / "manifest.json").is_file()]


def remove(checkpoint):
    """Delete a checkpoint. Killed on the way, it leaves one that is not finished."""
    with suppress(OSError):
        (checkpoint / "manifest.json").unlink()
    shutil.rmtree(checkpoint, ignore_errors=True)


def remove_all(folder):
    """Delete the checkpoints in a folder, finished or not."""
    for checkpoint in checkpoints(folder):
        remove(checkpoint)


def remove_older(latest, keep):
    """Delete unfinished checkpoints, and all but the last `keep` up to `latest`."""
    there = finished(latest.parent)
    older = [checkpoint for checkpoint in there if checkpoint <= latest][:-keep]
    for checkpoint in [*older, *set(checkpoints(latest.parent)).difference(there)]:
        remove(checkpoint)


# ---- which are whole ----


def newest(folder, older_than=None):
    """The newest whole checkpoint in a folder, or None; with older_than, before that.

    Rank 0 looks for all ranks, so that no two of them choose different ones.
    """
    found = [None]
    if dist.get_rank() == 0:
        there = [c for c in finished(folder) if older_than is None or c < older_than]
        found = [next(filter(is_whole, reversed(there)), None)]
    dist.broadcast_object_list(found)
    return found[0]


def is_whole(checkpoint):
    """Whether all files are there that the manifest names, as they were written.

    Warns in the log where they are not.
    """
    try:
        if "shared.pt" not in names_of_checked_files(checkpoint):
            raise Unusable("its manifest does not name shared.pt")
    except Unusable as reason:
        warn(checkpoint, reason)
        return False
    return True


def names_of_checked_files(checkpoint):
    """What the manifest names. Raises Unusable where a file is not as it says."""
    try:
        manifest = dict(json_of(checkpoint / "manifest.json"))
        for name in manifest:
            if not (checkpoint / name).is_file():  # or it is a pipe, and would block
                raise FileNotFoundError(name)
    except FileNotFoundError as missing:
        raise Unusable(f"{missing} is missing") from None
    except (Unusable, OSError, TypeError, ValueError):
        raise Unusable("its manifest cannot be read") from None
    for name, checksum in manifest.items():
        with open_file(checkpoint / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                raise Unusable(f"{name} is damaged: its checksum is another one")
    return set(manifest)


def warn(checkpoint, reason):
    log = logging.getLogger("ddp_course")
    log.warning(f"checkpoint {checkpoint.name} cannot be used because {reason}")


# ---- what is in them ----


def load_checkpoint(checkpoint, settings):
    """A checkpoint's (shared, own) for this rank, with tensors on the CPU.

    Raises UsageError if a run with other settings made it, and Unusable if another
    program did.
    """
    shared = tensors_of(checkpoint / "shared.pt")
    made_with = shared.get("settings") if isinstance(shared, dict) else None
    if not isinstance(made_with, dict) or made_with.keys() != settings.keys():
        raise Unusable("another program made it")
    check_settings(made_with, settings, checkpoint)
    own = f"rank{dist.get_rank()}.pt"
    if own not in json_of(checkpoint / "manifest.json"):
        raise Unusable(f"its manifest does not name {own}")
    return shared, tensors_of(checkpoint / own)


def load_state(part, state):
    """Load a part of a run, such as its optimizer. Raises Unusable if the state that was
    read is not like the one that the part has now.
    """
    if not isinstance(part, torch.nn.Module):  # which compares by itself
        own = part.state_dict()
        if "param_groups" in own:  # an optimizer has no averages before its first step
            own = own | {"state": {}}
        check_alike(state, own, "the state")
        for then, now in zip(
            state.get("param_groups", ()), own.get("param_groups", ())
        ):
            if any(then[name] != now[name] for name in now if name != "lr"):
                raise Unusable("the optimizer's settings were others")
    part.load_state_dict(state)


AVERAGES = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}  # Adam's, Muon's


def check_numbers(model, *optimizers):
    """Raise Unusable if a weight, or an average of an optimizer's, cannot be right."""
    for name, parameter in model.named_parameters():
        averages = {}
        for optimizer in optimizers:
            averages |= optimizer.state.get(parameter, {})
        if averages and averages.keys() not in AVERAGES:
            raise Unusable(f"what it has for {name} are no averages of its optimizer's")
        for value in (parameter, *averages.values()):
            if not value.is_floating_point():
                raise Unusable(f"{name}, or an average for it, is of another kind")
            if value.dim() and value.shape != parameter.shape:
                raise Unusable(f"the averages for {name} have another shape")
            if not value.isfinite().all():
                raise Unusable(f"{name}, or an average for it, is NaN or infinite")


_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxstring, _short.maxother = 3, 20, 80, 80


def shortened(setting):
    """A setting for a message: some of it, where it is long or without end."""
    return setting[:80] if isinstance(setting, str) else _short.repr(setting)


def check_settings(made_with, settings, checkpoint):
    """Raise UsageError, which names the first setting that differs, if one does."""
    for name in made_with | settings:
        then, now = made_with.get(name), settings.get(name)
        if then != now:
            problem = f"{checkpoint} was made with {name} {shortened(then)}, not {shortened(now)}"
            fix = "use that, or start anew, without --resume or with another --out"
            raise UsageError(f"{problem}: {fix}")
