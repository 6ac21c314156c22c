"""Question 5: an ordinary script, ported to Accelerate."""

import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, agree, hold, on_every_rank
from ddp_course.checks.ex07.networks import PRELOADED
from ddp_course.checks.ported import (
    DIGITS,
    PRIMES,
    RECORD,
    Case,
    RecordingNetwork,
    Sizes,
    as_number,
    clipped,
    data_of,
    descended,
    epochs_of,
    exact,
    first_norm,
    joined,
    modes,
    observed,
    one_file,
    sends_once,
    shuffled,
    start_of,
)
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

LEARNING_RATE, LAST_FACTOR = 0.2, 0.1  # those of the given script


def ported(script, case, sizes):
    """Run a script in a folder of this rank's own; return what it returned, saved, sent and
    made of the network. No GPU is seen here.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    from accelerate import PartialState

    network = RecordingNetwork(case.seed + int(os.environ["RANK"])).eval()
    RECORD.clear()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with CheckedWatch() as watch:
            returned = script(network, *data_of(case), *sizes)
        seen = observed(network, Path(folder, "model.pt"))
        os.chdir("/")
    counted = PartialState().num_processes
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    reduced = sum(entry["bytes"] for entry in watch.log if entry["name"].startswith("allreduce"))
    return seen | {"counted": counted, "accuracy": as_number(returned), "reduced": reduced}


@question(
    "Start with the six edits in the lesson. Then ask of each number of the script whether it belongs to one process or "
    "to all: the batch size, the steps of the schedule, the samples that are right. Number 1 under `Break it` and number "
    "4 under `More failures` are about two of your lines.",
    "Accelerator(cpu=True, gradient_accumulation_steps=every) divides the loss itself, within accumulate. A loader keeps "
    "its batch size, so give it batch_size // num_processes; its length before prepare is then the one that a prepared "
    "schedule needs. Clip under if accelerator.sync_gradients: before that, gradients are this process's own. "
    "gather_for_metrics drops what prepare has repeated.",
    "Per batch: with accelerator.accumulate(model): accelerator.backward(loss); if accelerator.sync_gradients: "
    "accelerator.clip_grad_norm_(model.parameters(), max_norm); then optimizer.step(), scheduler.step() and "
    "optimizer.zero_grad(), all three prepared. In the evaluation: guesses, labels = "
    "accelerator.gather_for_metrics((guesses, labels)). At the end: "
    'accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt").',
)
def check_script(answer, draw):
    """On any number of processes, the script must train, evaluate and save as one process
    does with the same global batches.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3, 1):  # alone, most mistakes do nothing
        batch_size, every = n * draw.randint(3, 4), 2 if n == 3 else 3  # another number than n
        case = Case(batch_size * every * draw.randint(3, 4), draw.choice(PRIMES), draw.randrange(10**6))
        data, _ = data_of(case)
        sizes = Sizes(batch_size, every, 2, first_norm(data, case.seed))
        seen = answer.on_ranks(ported, case, sizes, nproc=n, timeout=20)
        checked = f"script with batch_size={batch_size}, every={every}, on {n} process{'es' * (n > 1)}"
        on_every_rank(partial(runs_together, checked), seen)
        hold(shares(checked, [of_rank["trained"] for of_rank in seen], case, sizes))
        truth = after(data, case, updates_of(seen, sizes), sizes.max_norm)
        on_every_rank(partial(like_one_process, checked, data, case, sizes, truth), seen)
        updates = case.train // batch_size // every * sizes.epochs
        on_every_rank(partial(sends_once, checked, updates, every, NO_SYNC), seen)
        on_every_rank(partial(exact, checked, case, truth, CAUSES), seen)
        on_every_rank(partial(one_file, checked, truth, EVERY, wrapped), seen)
        on_every_rank(partial(nothing_else, checked), seen)


# ---- what is claimed ----

CAUSES = (
    "the processes share the evaluation, too: prepare the loader of the test set",
    "the right ones are this process's own: gather those of all processes",
    "samples that prepare has repeated are counted: gather_for_metrics drops them from guesses and labels, but not from a "
    "count",
)
NO_SYNC = "use accelerator.accumulate(model), or no_sync for all but the last"
EVERY = (
    "every process saves, and on one machine all of them write to the same file at the same time: use accelerator.save, or "
    "save if accelerator.is_main_process"
)


def wrapped(names):
    yield ([f"module.{name}" for name in names], "these are the names in the wrapper: save "
           "accelerator.unwrap_model(model).state_dict()")  # fmt: skip


def runs_together(checked, rank, of_ranks):
    yield Claim(f"the accelerator's num_processes in {checked}", of_ranks[rank]["counted"], len(of_ranks), "each process "
                "trains a copy of its own, as if it were alone: make an Accelerator, and pass cpu=True, or it looks for "
                "GPUs only")  # fmt: skip
    yield from modes(checked, of_ranks[rank])


def shares(checked, trained, case, sizes):
    """Claims that the processes divide each global batch among them. trained: for each
    process, the samples of each of its batches.
    """
    n, counts = len(trained), [sum(map(len, batches)) for batches in trained]
    share = sizes.batch_size // n
    yield Claim(f"the sizes of the batches of each process in {checked}",
                sorted({len(batch) for batches in trained for batch in batches}), [share],
                "batch_size is that of all processes together, and each process takes its part of it", [
                    ([sizes.batch_size], "the global batch is multiplied by the number of processes: prepare leaves the "
                     "batch size alone, so give the loader batch_size // accelerator.num_processes"),
                ])  # fmt: skip
    otherwise = "each sample goes through the network once in each epoch, on one process"
    if all(len(set(sum(batches, []))) == case.train for batches in trained):
        otherwise = "every process goes through all samples: prepare the loader, and loop over what prepare returns"
    elif max(counts) < case.train * sizes.epochs // n:
        otherwise = "samples are left out: is the data divided among the processes twice, or an epoch missing?"
    yield Claim(f"how many samples each process is trained on, in {checked}", counts,
                [case.train * sizes.epochs // n] * n, otherwise)  # fmt: skip
    yield from shuffled(checked, trained, case.train, sizes.epochs, "the given script shuffles, anew in each epoch: keep "
                        "shuffle=True, and call set_epoch(epoch) of a sampler of your own")  # fmt: skip


def updates_of(of_ranks, sizes):
    """For each update, its rounds: the batches of all processes."""
    rounds = sum(epochs_of([of_rank["trained"] for of_rank in of_ranks], sizes.epochs), [])
    return [rounds[begin : begin + sizes.every] for begin in range(0, len(rounds), sizes.every)]


def after(data, case, updates, max_norm, first=0, steps=int, rule=None, rate=LEARNING_RATE):
    """The parameters after these updates. first: the process whose network is trained;
    steps: of the schedule before an update, by its number; rate: the first one.
    """
    done = [min(steps(number) / len(updates), 1) for number in range(len(updates))]
    rates = [rate * (1 - part * (1 - LAST_FACTOR)) for part in done]
    return descended(data, case.seed + first, updates, rates, rule or joined(max_norm))


def nothing_else(checked, rank, of_ranks):
    if rank > 0:
        yield Claim(f"the files of this process after {checked}", of_ranks[rank]["files"], [], "the main process saves, and "
                    "the others save nothing, under no name", told="none")  # fmt: skip


def like_one_process(checked, data, case, sizes, truth, rank, of_ranks):
    end = of_ranks[rank]["end"]
    otherwise = (
        "does every object go through prepare, and does the loop use what it returns? Momentum, schedule and clipping stay "
        "those of the given script"
    )
    if any(of_rank["copied"] for of_rank in of_ranks):
        otherwise = "another network was trained, such as a copy: prepare the one that you are given"
    elif agree(end, start_of(case.seed + rank), DIGITS) or agree(end, start_of(case.seed), DIGITS):
        otherwise = "the network has not changed: does the optimizer step, and does it have these parameters?"
    elif not all(agree(of_rank["end"], of_ranks[0]["end"], DIGITS) for of_rank in of_ranks):
        otherwise = (
            "the processes end with different networks: does each of them call the model that prepare returns, and is the "
            "optimizer prepared, so that it waits for the last micro-batch of an update?"
        )
    yield Claim(f"the parameters after {checked}, compared with one process", end, truth, otherwise,
                partial(mistakes, data, case, sizes, rank, of_ranks), DIGITS)  # fmt: skip


def mistakes(data, case, sizes, rank, of_ranks):
    """(parameters at the end, cause)"""
    n, every, most = len(of_ranks), sizes.every, sizes.max_norm
    trained = partial(after, data, case, updates_of(of_ranks, sizes), most)
    each = partial(after, data, case, updates_of(of_ranks, sizes._replace(every=1)), most)
    alone = partial(after, data, case, updates_of([of_ranks[rank]], sizes), most)
    step_each_time = "the schedule steps with each micro-batch: prepare the scheduler, or step it only if "
    step_each_time += "accelerator.sync_gradients"
    too_large = (
        "the gradients are too large: accelerator.backward divides the loss by gradient_accumulation_steps, which is "
    )
    too_large += "every, and DDP takes the mean over the processes: add no factor"
    return [
        (trained(steps=lambda update: n * update), "the schedule is too fast: a prepared scheduler steps once per process "
         "at each update, so plan it for updates * num_processes, as with the length of the loader before prepare"),
        (trained(steps=lambda update: every * (update + 1) - 1), step_each_time),
        (trained(steps=lambda update: (every * (update + 1) - 1) / n), step_each_time),
        (trained(steps=lambda update: update / n), "the schedule is too slow: a scheduler that is not prepared steps once "
         "per update, so plan it for the updates, with the length of the prepared loader"),
        (trained(steps=lambda update: update / every), "the schedule is planned for the batches, but it steps with the "
         "updates, each of which has several batches"),
        (trained(steps=lambda update: 0), "the learning rate stays as it is: call scheduler.step()"),
        (each(steps=lambda update: every * update), "each micro-batch makes an update: set "
         "gradient_accumulation_steps=every"),
        (trained(rate=n * LEARNING_RATE), "the learning rate is multiplied by the number of processes: the global batch has "
         "not changed, so leave the rate as it is"),
        (trained(rule=lambda parts: clipped(parts[-1].mean(0) / every, most)), "only the last micro-batch of an update "
         "counts: zero_grad after optimizer.step(), not before backward"),
        (trained(rule=partial(each_time, most)), "the gradients are clipped after each micro-batch, before they are "
         "complete: clip only if accelerator.sync_gradients"),
        (trained(rule=partial(each_own, most)), "each process clips its own gradients before they are averaged: clip after "
         "the backward of the last micro-batch, in which DDP averages them"),
        (trained(rule=joined(torch.inf)), "the gradients are not clipped"),
        (trained(rule=joined(most, 1 / every)), "the loss is divided twice: accelerator.backward divides by "
         "gradient_accumulation_steps itself"),
        (trained(rule=joined(most, 1 / n)), "the gradients are divided by the number of processes twice"),
        *[(trained(rule=joined(most, scale)), too_large) for scale in (every, n, n * every)],
        (alone(), "this process starts with the network of process 0, but trains it alone: call the model that prepare "
         "returns, not the network within it"),
        (alone(first=rank), "this process trains its own network alone: prepare the network, too, and call what prepare "
         "returns"),
    ]  # fmt: skip


def each_own(max_norm, parts):
    return torch.stack([clipped(own, max_norm) for own in parts.mean(0)]).mean(0)


def each_time(max_norm, parts):
    *first, last = parts / len(parts)
    own = torch.zeros_like(last)
    for of_processes in first:
        own = torch.stack([clipped(vector, max_norm) for vector in own + of_processes])
    return clipped((own + last).mean(0), max_norm)
