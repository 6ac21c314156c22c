"""The parts that all lessons' programs share: flags, folder, log, result, and how they
end.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course import UsageError, project_folder
from ddp_course.files import cannot_write as cannot_write
from ddp_course.files import empty_folder as empty_folder
from ddp_course.files import remove_unfinished
from ddp_course.files import write_atomically as write_atomically
from ddp_course.flags import count, folder_path, whole
from ddp_course.flags import megabytes as megabytes
from ddp_course.flags import number as number
from ddp_course.flags import share as share
from ddp_course.ranks import absent
from ddp_course.ranks.environment import port_of, torchrun_environment

# ---- flags ----

DATA = {  # per kind of training data: the default of --data, and its help
    "images": (
        "auto",
        "auto is mnist where it is on the disk or can be had, else digits",
    ),
    "text": ("python", "python, for the sources of its library, or a folder of text"),
    "questions": ("questions", "questions, or a file of conversations, CSV or JSONL"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, with one line, for a wrong flag."""

    def error(self, message):
        raise UsageError(f"{message} (--help lists the flags)")


def parser(file, doc, trains="images", most=4096, per="step"):
    """The flags that all lessons have; a lesson adds its own.

    file, doc: the lesson's `__file__` and `__doc__`. trains: on 'images', 'text',
    'questions', or None. most, per: for the help of --train-samples and --batch-size.
    """
    lesson = Path(file).stem
    layout = argparse.RawDescriptionHelpFormatter
    flags = Parser(prog=f"{lesson}.py", description=doc, formatter_class=layout)
    flags.set_defaults(lesson=lesson.removeprefix("lesson"))
    flag = flags.add_argument
    devices, auto = ["auto", "cpu", "cuda", "mps"], "auto is a GPU if there is one"
    flag("--device", choices=devices, default="auto", help=f"{auto} (auto)")
    out = project_folder() / "runs" / lesson
    flag("--out", type=folder_path, default=out, help="where the result and the log go")
    flag("--seed", type=whole, default=0, help="of all random numbers (0)")
    flag("--timeout", type=count, default=60, help="seconds to wait for a rank (60)")
    appended = "appended by some launchers; the environment says it, too"
    flag("--local-rank", "--local_rank", type=own_local_rank, help=appended)
    if trains:
        bits_help = "a GPU, too, repeats the same bits; slower"
        flag("--deterministic", action="store_true", help=bits_help)
        data, data_help = DATA[trains]
        choices = ["auto", "digits", "mnist"] if trains == "images" else None
        flag("--data", choices=choices, default=data, help=data_help)
        epochs_help = "passes over the samples (%(default)s)"
        flag("--epochs", type=count, default=3, help=epochs_help)
        batch_help = f"samples per {per}, on each rank (%(default)s)"
        flag("--batch-size", type=count, default=64, help=batch_help)
        samples_help = f"how many to train on (all on a GPU, at most {most} elsewhere)"
        flag("--train-samples", type=count, help=samples_help)
    if trains == "images":
        no_dropout_help = "for runs that are compared number by number"
        flag("--no-dropout", action="store_true", help=no_dropout_help)
    return flags


def port(text):
    """The type of a flag that is a port of TCP."""
    return port_of("--master-port", text)


def own_local_rank(text):
    """The type of --local-rank: this process's local rank, as LOCAL_RANK has it.

    DeepSpeed's launcher and torch.distributed.launch append the flag. The programs use
    the variable, so a flag that says something else is refused.
    """
    local_rank = torchrun_environment().local_rank
    if text != str(local_rank):
        problem = f"{text!r} contradicts the environment, where it is {local_rank}"
        raise argparse.ArgumentTypeError(f"{problem}: leave this flag to the launcher")
    return local_rank


def check_batch_size(batch_size, samples, world_size):
    """Raise UsageError if a batch is larger than one rank's share of the samples."""
    if samples < world_size:
        few = f"{samples} training samples are too few"
        raise UsageError(f"{few} for {world_size} ranks")
    share = -(-samples // world_size)
    if batch_size > share:
        split = f"{share} of {samples} samples on {world_size} ranks"
        problem = f"--batch-size {batch_size} is more than a rank's share, {split}"
        raise UsageError(f"{problem}: use {share} or less")


# ---- the folder and the log ----


def open_folder(folder):
    """Make the run's folder and return the log, which writes to train.log there.

    Rank 0 logs from INFO, to the screen too; the other ranks log from WARNING, to the
    same file. Raises UsageError if the folder cannot be written to.
    """
    rank = torchrun_environment().rank
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / "train.log"
        if log_file.exists() and not log_file.is_file():  # a pipe would be waited for
            raise OSError(None, "train.log is no file")
        if rank == 0:
            remove_unfinished(folder)
        file = logging.FileHandler(log_file)
    except OSError as error:
        raise cannot_write(folder, error) from None
    line = f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    file.setFormatter(logging.Formatter(line))
    log = logging.getLogger("ddp_course")
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    for handler in list(log.handlers):  # of an earlier run in the same notebook
        log.removeHandler(handler)
        handler.close()
    log.addHandler(file)
    log.addHandler(logging.StreamHandler(sys.stdout))
    return log


# ---- the result ----


def check_finite(losses, before=0):
    """Raise UsageError, on all ranks, if a loss of any rank is NaN or infinite.

    losses: this rank's own, float (steps,); before: how many steps of the epoch came
    before them. All ranks of a group call it together.
    """
    wrong = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    steps = [wrong[0] if wrong else len(losses)]
    if dist.is_initialized():
        steps = [None] * dist.get_world_size()
        dist.all_gather_object(steps, wrong[0] if wrong else len(losses))
    if min(steps) < len(losses):
        step, rank = before + min(steps) + 1, steps.index(min(steps))
        where = f"in step {step} of the epoch, on rank {rank}"
        fix = "look at that batch, or lower the learning rate"
        raise UsageError(f"the loss is not a number {where}: {fix}")


RESULT = """
    lesson world_size backend device method model data data_sha256 sharding
    tokens_per_rank stage
    train_samples test_samples epochs batch_size updates samples_per_update parameters
    trained_parameters weight_bytes gradient_bytes optimizer_bytes learning_rate
    test_accuracy train_loss validation_loss bits_per_byte loss_before loss_after tokens seconds
    samples_per_second tokens_per_second params_sha256
""".split()  # the order of its values; each lesson has some of them


def finish(
    args, device, model, train_set, losses, seconds,
    test_accuracy=None, test_samples=None, more=(), metrics=None,
):  # fmt: skip
    """End a training run; return its result, a dict, on every rank.

    losses: of each step. seconds: of training. more: a dict of what else the lesson
    reports, or counts in another way; the value None leaves a name out. metrics: rows
    for metrics.jsonl, where they hold more than the losses. Rank 0 prints the result as
    a table, and writes result.json and metrics.jsonl.
    """
    last_epoch = losses[-max(1, len(losses) // args.epochs) :]
    values = {
        "lesson": args.lesson,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "device": device.type,
        # images have a name, since --data auto does not say which they are
        "data": getattr(train_set, "name", str(args.data)),
        "train_samples": len(train_set),
        "test_samples": test_samples,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "test_accuracy": None if test_accuracy is None else round(test_accuracy, 4),
        "train_loss": round(sum(last_epoch) / len(last_epoch), 4),
        "seconds": round(seconds, 2),
        "samples_per_second": round(args.epochs * len(train_set) / seconds),
        "params_sha256": params_sha256(model),
    }
    values |= more
    names = [name for name in values if values[name] is not None]
    result = {name: values[name] for name in sorted(names, key=RESULT.index)}
    if torchrun_environment().rank == 0:
        write_result(args.out, result, metrics or by_step(losses))
    return result


def by_step(losses):
    """Losses as rows of metrics.jsonl."""
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses)]


def write_result(folder, result, metrics):
    """Print the result as a table; write it and the metrics into the run's folder.

    result: a dict, for result.json. metrics: a list of dicts, for metrics.jsonl.
    """
    width = max(map(len, result)) + 2
    print("\n".join(f"{name:<{width}}{value}" for name, value in result.items()))
    lines = "".join(json.dumps(row) + "\n" for row in metrics)
    write_atomically(folder / "metrics.jsonl", lines)
    write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")


def params_sha256(model):
    """A fingerprint of the parameters: the SHA-256 of their bytes.

    They come in the order of the state_dict, as float32, little-endian. Those of a
    module that is sharded over ranks (DTensors) are gathered: all ranks call this.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name in names:
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            numbers = value.detach().to("cpu", torch.float32).contiguous().numpy()
            digest.update(numbers.astype("<f4").tobytes())
    return digest.hexdigest()


# ---- how a program ends ----


def start(main):
    """Run a lesson's main as a program, with the flags of its command line.

    A UsageError ends it with one line and exit code 2, and so does an operation that
    --deterministic forbids; Ctrl-C ends it quietly. One line for all ranks: also where
    several have the same error, or lose the one that had it.
    """
    reported = error_file()
    if reported:
        # a KeyboardInterrupt may come up in Python code that C++ has called, as DDP
        # does: C++ then aborts
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    absent.count_steps()
    try:
        main(sys.argv[1:])
    except UsageError as error:
        leave(error, reported)
    except RuntimeError as error:
        if "does not have a deterministic implementation" in str(error):
            operation = str(error).split()[0]
            leave(
                f"{operation} cannot repeat its bits: leave out --deterministic",
                reported,
            )
        # from a collective, perhaps: another rank has just left
        patience = time.monotonic() + 0.5
        while reported and not reported.exists() and time.monotonic() < patience:
            time.sleep(0.02)
        if reported and reported.exists():
            sys.exit(2)
        line = absent.line_about(error)
        if line is None:
            raise
        if line:
            print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def leave(problem, reported):
    """End this process with exit code 2 and one line, if no other rank has printed it."""
    try:
        reported and reported.touch(exist_ok=False)
        line = "".join(c if c.isprintable() else " " for c in str(problem))[:2000]
        print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr, flush=True)
    except FileExistsError:
        pass
    sys.exit(2)


def error_file():
    """A file that exists after a rank has printed a UsageError; None without torchrun.

    It is in the folder in which torchrun makes one folder per rank.
    """
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(own_file).parents[1] / "usage-error" if own_file else None
