"""What Trainer writes: the checkpoints that it can resume from, and the final model."""

import logging
import os
import shutil
from pathlib import Path
from zipfile import ZipFile

import torch.distributed as dist
import transformers  # only this line at the top: see lesson08.py
from safetensors import safe_open

from ddp_course.files import tensors_of

NEEDED = ["trainer_state.json", "optimizer.pt", "scheduler.pt", "*.safetensors"]


def newest_usable(folder):
    """The newest checkpoint in a folder from which a run can resume, or None.

    Newer ones that are damaged are renamed, with a warning in the log. Trainer itself
    takes the newest folder, whatever is in it.
    """
    log = logging.getLogger("ddp_course")
    while newest := transformers.trainer_utils.get_last_checkpoint(folder):
        newest = Path(newest)
        problem = damage(newest)
        if problem is None:
            for name in random_states():
                if not (newest / name).is_file():
                    log.warning(f"without {name}, this is not the run that was stopped")
            return newest
        aside = newest.with_name(f"damaged-{newest.name}")
        log.warning(f"{newest.name} is now {aside.name}, since {problem}")
        shutil.rmtree(aside, ignore_errors=True)
        newest.rename(aside)


def random_states():
    """The files with the random states of all ranks, by name. Without its own, Trainer
    goes on with other random numbers, silently.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ["rng_state.pth"]
    return [f"rng_state_{rank}.pth" for rank in range(dist.get_world_size())]


def damage(checkpoint):
    """What is wrong with the files of a checkpoint, in words; None where they are whole.

    Without optimizer.pt, Trainer would even go on, with an optimizer that is new.
    """
    for pattern in NEEDED:
        if not any(path.is_file() for path in checkpoint.glob(pattern)):
            return f"{pattern} is missing"
    for path in sorted(checkpoint.iterdir()):
        try:
            check(path)
        except Exception:  # a file may hold anything
            return f"{path.name} is damaged"


def check(path):
    """Raise an exception of some kind where a file is not as it was written."""
    if path.suffix and not path.is_file():  # a pipe, or a folder in its place
        raise ValueError
    if path.name == "trainer_state.json":
        state = transformers.TrainerState.load_from_json(path)
        if type(state.global_step) is not int or state.global_step < 0:
            raise ValueError
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt"):
            pass
    elif path.suffix in (".pt", ".pth"):  # a zip file, with a checksum for each part
        with ZipFile(path) as file:
            if file.testzip():
                raise ValueError
        with transformers.trainer_pt_utils.safe_globals():  # as Trainer will do it
            tensors_of(path)


def save(trainer, folder):
    """Write the model or its adapter. All ranks call it."""
    temporary = folder.with_name(f".{folder.name}")
    trainer.save_model(temporary)  # rank 0 writes
    if trainer.args.process_index == 0:
        replace(folder, temporary)


def replace(folder, temporary):
    """Put a folder in another's place, so that none is ever half written."""
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
