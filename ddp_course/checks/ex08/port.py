"""Question 4: an ordinary script, ported to Trainer."""

import gc
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, agree, hold, on_every_rank
from ddp_course.checks.ex08.on_ranks import PRELOADED, TIMEOUT, ranks
from ddp_course.checks.ported import (
    DIGITS,
    PRIMES,
    RECORD,
    Case,
    RecordingNetwork,
    Sizes,
    as_number,
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
    trained_on,
)
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

LEARNING_RATE = 0.2  # that of the given script


def ported(script, case, sizes):
    """Run a script in a folder of this rank's own; return what it returned, saved, sent and
    made of the network, and its updates. No GPU is seen here.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    import transformers.trainer  # noqa: F401, what the fork server has not imported
    from accelerate import PartialState
    from torch.optim.optimizer import register_optimizer_step_post_hook

    gc.freeze()  # Trainer collects garbage: not in all that was imported
    network, updates = RecordingNetwork(case.seed + int(os.environ["RANK"])).eval(), []
    RECORD.clear()

    def note(optimizer, *_):
        kind, rate = type(optimizer).__name__, float(optimizer.param_groups[0]["lr"])
        updates.append({"kind": kind, "rate": rate, "batches": len(trained_on())})

    hook = register_optimizer_step_post_hook(note)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with CheckedWatch() as watch:
            returned = script(network, *data_of(case), *sizes)
        seen = observed(network, Path(folder, "model.pt"))
        os.chdir("/")
    hook.remove()
    counted = PartialState().num_processes
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    pair = returned if isinstance(returned, list | tuple) and len(returned) == 2 else [returned, returned]
    reduced = sum(entry["bytes"] for entry in watch.log if entry["name"].startswith("allreduce"))
    return seen | {
        "counted": counted,
        "updates": updates,
        "said": as_number(pair[0]),
        "accuracy": as_number(pair[1]),
        "reduced": reduced,
    }


@question(
    "The table after the first comparison in the lesson has what the script needs besides TrainingArguments. Then go "
    "through the script line by line: which setting is each of its numbers, and what does Trainer do if you leave that "
    "setting out? The lesson's table of defaults says.",
    "per_device_train_batch_size=batch_size, and gradient_accumulation_steps=every // settings.world_size: an update has "
    "the micro-batches of all processes. The schedule of the script is lr_scheduler_type='linear'. The loss is a sum over "
    "num_items_in_batch. compute_metrics gets the logits of all processes, each sample once.",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), passed as optimizers=(optimizer, None); "
    "TrainingArguments(use_cpu=True, num_train_epochs=epochs, max_grad_norm=max_norm, lr_scheduler_type='linear', "
    "label_names=['labels'], save_strategy='no', and the two of the hint before); a wrapper whose forward(inputs) returns "
    "{'logits': network(inputs)}; a collate function that returns {'inputs': ..., 'labels': ...}. After train() and "
    "evaluate(): if settings.process_index == 0, torch.save(network.state_dict(), 'model.pt'). The number of updates is "
    "trainer.state.global_step.",
)
def check_script(answer, draw):
    """On any number of ranks, Trainer must train, evaluate and save as the script does on one
    process with the same updates.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n, accumulation in ((2, 3), (3, 2), (1, 3)):
        batch_size, every = draw.randint(3, 5), n * accumulation
        case = Case(batch_size * every * draw.choice([4, 5]), draw.choice(PRIMES), draw.randrange(10**6))
        data, _ = data_of(case)
        sizes = Sizes(batch_size, every, 2, first_norm(data, case.seed))
        seen = answer.on_ranks(ported, case, sizes, nproc=n, timeout=TIMEOUT)
        checked = f"script with batch_size={batch_size}, every={every}, on {ranks(n)}"
        on_every_rank(partial(runs_together, checked), seen)
        hold(shares(checked, seen, case, sizes))
        on_every_rank(partial(falls, checked), seen)
        truth = after(data, case, sizes, seen)
        on_every_rank(partial(like_one_process, checked, data, case, sizes, truth), seen)
        updates = len(seen[0]["updates"])
        on_every_rank(partial(sends_once, checked, updates, accumulation, NO_SYNC), seen)
        on_every_rank(partial(says, checked, updates), seen)
        on_every_rank(partial(exact, checked, case, truth, CAUSES), seen)
        on_every_rank(partial(one_file, checked, truth, EVERY, wrapped), seen)


# ---- what is claimed ----

CAUSES = (
    "the processes share the evaluation, too: leave it to trainer.evaluate() or trainer.predict()",
    "the right ones are this process's own: compute_metrics gets the logits of all",
    "samples that were repeated to fill a batch are counted: Trainer drops them before it calls compute_metrics",
)
NO_SYNC = "Trainer wraps the model itself, so give it the plain one"
EVERY = (
    "your own lines run on all processes, and on one machine all of them write to the same file at the same time: save if "
    "trainer.args.process_index == 0"
)


def wrapped(names):
    save = "save the state_dict of the network that you were given"
    for prefix in ("network.", "model.", "module.", "net."):
        yield [prefix + name for name in names], f"these are the names in a wrapper: {save}"


def runs_together(checked, rank, of_ranks):
    yield Claim(f"the number of processes that Trainer counts in {checked}", of_ranks[rank]["counted"], len(of_ranks),
                "each process trains a copy of its own, as if it were alone: train with Trainer, and with use_cpu=True, "
                "or it looks for GPUs only")  # fmt: skip
    yield from modes(checked, of_ranks[rank])


def shares(checked, seen, case, sizes):
    """Claims that the processes divide each update among them."""
    n, updates = len(seen), case.train // sizes.batch_size // sizes.every
    trained, steps = [of_rank["trained"] for of_rank in seen], [of_rank["updates"] for of_rank in seen]
    yield Claim(f"the sizes of the micro-batches of each process in {checked}",
                sorted({len(batch) for batches in trained for batch in batches}), [sizes.batch_size],
                "a process takes batch_size samples at a time: per_device_train_batch_size=batch_size")  # fmt: skip
    otherwise = "an update has the same number of samples as in the given script, and there are as many epochs"
    by_mistake = [
        (-(-updates // n) * sizes.epochs, "the global batch is multiplied by the number of processes: "
         "gradient_accumulation_steps counts the micro-batches of one process, so divide `every` by their number"),
        (updates * sizes.epochs * (sizes.every // n), "each micro-batch makes an update: set gradient_accumulation_steps"),
        (updates * 3, "these are three epochs, Trainer's default: set num_train_epochs"),
    ]  # fmt: skip
    if n > 1 and all(len(set(sum(batches, []))) == case.train for batches in trained):
        otherwise, by_mistake = (
            "every process goes through all samples: let Trainer make the loader from train_dataset",
            [],
        )
    for rank in range(n):
        yield Claim(f"the number of updates in {checked}, on rank {rank}", len(steps[rank]), updates * sizes.epochs,
                    otherwise, by_mistake)  # fmt: skip
    counts = [sum(map(len, batches)) for batches in trained]
    yield Claim(f"how many samples each process is trained on, in {checked}", counts,
                [case.train * sizes.epochs // n] * n, "each sample goes through the network once in each epoch, on one "
                "process: Trainer divides the data set that it is given")  # fmt: skip
    yield from shuffled(checked, trained, case.train, sizes.epochs, "the given script shuffles, anew in each epoch, and so "
                        "does Trainer, unless train_sampling_strategy says otherwise")  # fmt: skip


def falling(steps, planned=None, rate=LEARNING_RATE):
    """The learning rate of each update, in a schedule that is planned for so many."""
    planned = planned or steps
    return torch.tensor([rate * max(1 - step / planned, 0) for step in range(steps)], dtype=torch.double)


def falls(checked, rank, of_ranks):
    """Claims that the learning rate falls to 0, in a straight line."""
    updates, n = of_ranks[rank]["updates"], len(of_ranks)
    steps, planned = len(updates), "a schedule of your own steps once per update, as Trainer's does: plan it for the "
    planned += "updates of the training, which all processes make together"
    rates = torch.tensor([update["rate"] for update in updates], dtype=torch.double)
    yield Claim(f"the learning rates of the updates in {checked}", rates, falling(steps), "it begins with 0.2 and falls "
                "to 0, in equal parts, with the updates: lr_scheduler_type='linear', without a warm-up", [
                    (falling(steps, 1e30), "the learning rate stays as it is: set lr_scheduler_type to 'linear'"),
                    (falling(steps, rate=5e-5), "these are the rates of Trainer's own optimizer with its default, 5e-5: "
                     "pass optimizers=(optimizer, None), or set learning_rate"),
                    (falling(steps, 1e30, 5e-5), "this is Trainer's default, 5e-5: pass optimizers=(optimizer, None)"),
                    (falling(steps, rate=LEARNING_RATE * n), "the learning rate is multiplied by the number of processes: "
                     "the global batch has not changed, so leave the rate as it is"),
                    *[(falling(steps, steps * factor), planned) for factor in (n, 1 / n, 2, 3, 6, 3 / 2, 9 / 2)],
                ], DIGITS)  # fmt: skip


def updates_of(of_ranks):
    """For each update, its rounds: the batches of all processes."""
    [rounds] = epochs_of([of_rank["trained"] for of_rank in of_ranks], 1)
    ends = [update["batches"] for update in of_ranks[0]["updates"]]
    return [rounds[begin:end] for begin, end in zip([0, *ends], ends)]


def after(data, case, sizes, of_ranks, first=0, rule=None):
    """The parameters after the updates of these ranks. first: whose network is trained."""
    updates = updates_of(of_ranks)
    rates = falling(len(updates)).tolist()
    return descended(data, case.seed + first, updates, rates, rule or joined(sizes.max_norm))


def like_one_process(checked, data, case, sizes, truth, rank, of_ranks):
    end = of_ranks[rank]["end"]
    otherwise = (
        "is it SGD with momentum, as in the given script, on the mean cross entropy of all samples of the update?"
    )
    kinds = {update["kind"] for of_rank in of_ranks for update in of_rank["updates"]}
    if any(of_rank["copied"] for of_rank in of_ranks):
        otherwise = "another network was trained, such as a copy: give Trainer the one that you are given, in a wrapper"
    elif agree(end, start_of(case.seed + rank), DIGITS) or agree(end, start_of(case.seed), DIGITS):
        otherwise = "the network has not changed: does the optimizer have its parameters?"
    elif kinds != {"SGD"}:
        otherwise = f"the optimizer was {' and '.join(sorted(kinds))}, which is Trainer's default: pass "
        otherwise += "optimizers=(optimizer, None)"
    elif not all(agree(of_rank["end"], of_ranks[0]["end"], DIGITS) for of_rank in of_ranks):
        otherwise = "the processes end with different networks: does the loss come from the model that Trainer calls?"
    yield Claim(f"the parameters after {checked}, compared with one process", end, truth, otherwise,
                partial(mistakes, data, case, sizes, rank, of_ranks), DIGITS)  # fmt: skip


def mistakes(data, case, sizes, rank, of_ranks):
    """(parameters at the end, cause)"""
    n, most = len(of_ranks), sizes.max_norm
    every = sizes.every // n  # the micro-batches of a process
    trained = partial(after, data, case, sizes, of_ranks)
    too_large = (
        "the gradients are too large: with a loss function of your own, Trainer does not divide by the number of "
    )
    too_large += "micro-batches, so divide the sum of the losses by num_items_in_batch"
    divided = (
        "the loss is divided by the number of micro-batches, too: num_items_in_batch counts the items of all of them"
    )
    scales = (every, n, n * every, every * sizes.batch_size, n * every * sizes.batch_size)
    return [
        (trained(rule=joined(torch.inf)), "the gradients are not clipped: set max_grad_norm=max_norm"),
        (trained(rule=joined(1.0)), "the gradients are clipped to a norm of 1, Trainer's default: set max_grad_norm"),
        *[(trained(rule=joined(most, 1 / many)), divided) for many in (every, sizes.every)],
        (trained(rule=joined(most, 1 / n)), "the loss is divided by the number of processes twice: num_items_in_batch "
         "counts the items of all processes"),
        *[(trained(rule=joined(most, scale)), too_large) for scale in scales],
        (after(data, case, sizes, [of_ranks[rank]], rank), "this process trains its own network alone: the loss must come "
         "from the model that Trainer calls, and no evaluate() before train()"),
        (after(data, case, sizes, [of_ranks[rank]]), "this process starts with the network of process 0, but trains it "
         "alone: the loss must come from the model that Trainer calls"),
    ]  # fmt: skip


def says(checked, updates, rank, of_ranks):
    said, accuracy = of_ranks[rank]["said"], of_ranks[rank]["accuracy"]
    yield Claim(f"the number of updates that {checked} returns", said, float(updates), "return two numbers, the updates and "
                "the accuracy, on every process: trainer.state.global_step counts the updates",
                [(said, "return the updates first, and then the accuracy")] if accuracy == updates else [],
                told=updates)  # fmt: skip
