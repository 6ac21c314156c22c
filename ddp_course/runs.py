"""What every lesson's program shares: its flags, its folder, its log, its result, and
how it ends.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course import UsageError, project_folder
from ddp_course.ranks.environment import torchrun_environment


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong with a flag in one line, as a
    UsageError.
    """

    def error(self, message):
        raise UsageError(f"{message} (--help lists the flags)")


def parser(file, doc, trains="images"):
    """The flags that all lessons have, and those that all that train have; a lesson
    adds its own.

    file, doc: the lesson's `__file__` and `__doc__`. trains: on 'images', 'text',
    'questions', or None.
    """
    lesson = Path(file).stem
    flags = Parser(
        prog=f"{lesson}.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.set_defaults(lesson=lesson.removeprefix("lesson"))
    flags.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto"
    )
    flags.add_argument(
        "--out",
        type=Path,
        default=project_folder() / "runs" / lesson,
        help="where the result and the log go",
    )
    flags.add_argument("--seed", type=int, default=0)
    if trains == "images":
        data_help = "auto is mnist where it is on the disk or can be had, else digits"
        flags.add_argument(
            "--data",
            choices=["auto", "digits", "mnist"],
            default="auto",
            help=data_help,
        )
    if trains == "text":
        data_help = (
            "python, for the sources of its standard library, or a folder of text files"
        )
        flags.add_argument("--data", default="python", help=data_help)
    if trains == "questions":
        data_help = "questions, which the course makes, or a CSV file with the columns user and prompt"
        flags.add_argument("--data", default="questions", help=data_help)
    if trains:
        flags.add_argument("--epochs", type=count, default=3)
        batch_help = "samples a step, on each rank (%(default)s)"
        flags.add_argument("--batch-size", type=count, default=64, help=batch_help)
        flags.add_argument(
            "--train-samples",
            type=count,
            help="how many to train on (all on a GPU, some thousands elsewhere)",
        )
    if trains == "images":
        flags.add_argument(
            "--no-dropout",
            action="store_true",
            help="for runs that are to be compared number by number",
        )
    return flags


def count(text):
    """The type of a flag that is a number of something: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def check_batch_size(batch_size, samples, world_size):
    """Raise UsageError where a batch is larger than the part of the training set that
    one rank has.
    """
    if samples < world_size:
        raise UsageError(
            f"{samples} training samples are too few for {world_size} ranks"
        )
    share = -(-samples // world_size)
    if batch_size > share:
        split = f"{share} of {samples} samples on {world_size} ranks"
        raise UsageError(
            f"--batch-size {batch_size} is more than a rank's share, {split}: use {share} or less"
        )


def open_folder(folder):
    """Make the run's folder, see that it can be written to, and return the log,
    train.log there.

    Rank 0 logs from INFO, to the screen too; the other ranks only from WARNING, to the
    same file.
    """
    rank = torchrun_environment().rank
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "train.log")
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --out"
        ) from None
    file.setFormatter(
        logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s")
    )
    log = logging.getLogger("ddp_course")
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    for handler in list(log.handlers):  # of an earlier run in the same notebook
        log.removeHandler(handler)
        handler.close()
    log.addHandler(file)
    log.addHandler(logging.StreamHandler(sys.stdout))
    return log


def finish(
    args, device, model, train_set, losses, seconds, test_accuracy, test_samples
):
    """End a training run: rank 0 prints the result as a table, then writes result.json
    and metrics.jsonl.

    losses: the loss of each step. seconds: of training. Returns the result, a dict, on
    every rank.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    steps = len(losses) // args.epochs
    result = {
        "lesson": args.lesson,
        "world_size": world_size,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "device": device.type,
        "data": train_set.name,
        "train_samples": len(train_set),
        "test_samples": test_samples,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "test_accuracy": round(test_accuracy, 4),
        "train_loss": round(sum(losses[-steps:]) / steps, 4),
        "seconds": round(seconds, 2),
        "samples_per_second": round(args.epochs * len(train_set) / seconds),
        "params_sha256": params_sha256(model),
    }
    if torchrun_environment().rank == 0:
        write_result(
            args.out,
            result,
            [{"step": step, "loss": loss} for step, loss in enumerate(losses)],
        )
    return result


def write_result(folder, result, metrics):
    """Print the result as a table; write it, and metrics, as files into the run's folder.

    result: a dict, for result.json. metrics: a list of dicts, for metrics.jsonl.
    """
    width = max(map(len, result)) + 2
    print("\n".join(f"{name:<{width}}{value}" for name, value in result.items()))
    lines = "".join(json.dumps(row) + "\n" for row in metrics)
    write_atomically(folder / "metrics.jsonl", lines)
    write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")


def write_atomically(path, content):
    """Write a file, text or bytes, whole or not at all: under another name, flushed,
    then renamed.

    Raises UsageError where that fails, a full disk for one; what stood there before
    stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        cure = "make room, or choose another folder with --out; an older file there is untouched"
        raise UsageError(f"cannot write {path}: {error.strerror}; {cure}") from None


def _flush_folder(folder):
    """Have the names in a folder reach the disk, too: a renamed file may else be gone
    after a power cut. See fsync(2).
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def empty_folder(folder):
    """Make a folder, without anything that may have been in it. Raises UsageError where
    that fails.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --out"
        ) from None


def params_sha256(model):
    """A fingerprint of the parameters: SHA-256 of their bytes, float32 little-endian,
    in the order of the state_dict.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name in names:
            digest.update(
                value.detach()
                .to("cpu", torch.float32)
                .contiguous()
                .numpy()
                .astype("<f4")
                .tobytes()
            )
    return digest.hexdigest()


def start(main):
    """Run a lesson's main as a program, with the flags of its command line.

    A UsageError ends it with one line and exit code 2, Ctrl-C quietly. One line for all
    ranks: also where several have the same UsageError, or lose the one that had it.
    """
    told = _told_file()
    if told:
        # a KeyboardInterrupt may come up in Python code that C++ has called, as DDP
        # does: C++ then aborts
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        main(sys.argv[1:])
    except UsageError as error:
        try:
            told and told.touch(exist_ok=False)
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        except FileExistsError:
            pass  # another rank was first
        sys.exit(2)
    except RuntimeError:  # from a collective, perhaps: another rank has just left
        patience = time.monotonic() + 0.5
        while told and not told.exists() and time.monotonic() < patience:
            time.sleep(0.02)
        if not (told and told.exists()):
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _told_file():
    """A file that is there once a rank of this torchrun has told of a UsageError; None
    without torchrun.
    """
    own_file = os.environ.get(
        "TORCHELASTIC_ERROR_FILE"
    )  # in a folder that torchrun makes for each rank
    return Path(own_file).parents[1] / "usage-error" if own_file else None
