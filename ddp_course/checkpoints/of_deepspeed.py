"""DeepSpeed's checkpoints: how a run resumes from one, and whether its files are data,
before DeepSpeed reads them.

DeepSpeed loads them with `weights_only=False`, which runs code that is in a file.
"""

import os
import re
from pathlib import Path

import torch.distributed as dist

from ddp_course import UsageError
from ddp_course.checkpoints.deepspeed_configurations import ACCUMULATE, MICRO
from ddp_course.checkpoints.whole import check_settings
from ddp_course.files import Unusable, check_alike, content_of, json_of, tensors_of
from ddp_course.ranks.endings import SYMPTOMS

PROGRESS = ["epoch", "losses", "seconds"]


def resume(engine, folder, settings, universal):
    """Load the newest checkpoint; return (finished epochs, their losses and seconds).

    A universal one may be of another number of ranks. Raises UsageError where there is
    none, and where it was made with other settings.
    """
    made_with = settings_in(folder, universal)
    if universal:
        free = dict.fromkeys(["ranks", MICRO, ACCUMULATE])
        made_with, settings = made_with | free, settings | free
    check_settings(made_with, settings, folder)
    try:
        _, progress = engine.load_checkpoint(str(folder))
        check_alike([progress.get(name) for name in PROGRESS], [0, [0.0], 0.0])
        if progress["epoch"] < 0 or progress["seconds"] < 0:
            raise Unusable("it counts below 0")
    except Exception as error:  # DeepSpeed has errors of many kinds
        if any(words in str(error) for words in SYMPTOMS):  # of another rank
            raise
        reason = Unusable.because(error)
        raise UsageError(f"{folder} cannot be used: {reason}") from None
    return [progress[name] for name in PROGRESS]


def settings_in(folder, universal):
    """What the newest checkpoint in a folder was made with, a dict, after a look at all
    of its files. All ranks call it together.

    universal: whether it is a universal one. Raises UsageError on all ranks where there
    is none, or where a file is damaged or holds code.
    """
    found, problem = None, None
    try:
        found = checked(folder, "latest_universal" if universal else "latest")
    except Unusable as reason:
        problem = f"{folder} cannot be used: {reason}"
    except FileNotFoundError:
        problem = f"there is no checkpoint in {folder} to --resume from"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if problem := next(filter(None, problems), None):
        raise UsageError(problem)
    return found


def checked(folder, latest):
    """The same on this rank. Raises Unusable, and FileNotFoundError where there is none.

    latest: the name of the file that names the newest one.
    """
    if not os.path.lexists(folder / latest):
        raise FileNotFoundError
    name = content_of(folder / latest).decode(errors="replace")
    # DeepSpeed takes it for a pattern, and reads it in its own way: so it must be plain
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or not (folder / name).is_dir():
        raise Unusable(f"{latest} names {name[:80]!r}, which is no folder there")
    settings = json_of(folder / "settings.json")
    if not isinstance(settings, dict):
        raise Unusable("settings.json is none of ours")
    for path in files_below(folder / name):
        if path.suffix == ".pt":
            tensors_of(path, classes_of_deepspeed())
    return settings


def files_below(folder):
    """All files in a folder and in those within it. Raises Unusable where there is
    something else, a link for one: another program may follow it.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                found += files_below(entry.path)
            elif entry.is_file(follow_symlinks=False):
                found.append(Path(entry.path))
            else:
                raise Unusable(f"{entry.name} is no file and no folder")
    return found


def classes_of_deepspeed():
    """Those of which there are instances in its files; and what is called for getattr,
    with which Python 3.11.0 to 3.11.3 writes a stage: it finds stages and nothing else.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind, name):
        if kind is not ZeroStageEnum:
            raise Unusable("looks up more than a stage")
        return kind[name]

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    return [*classes, (stage, "builtins.getattr")]
