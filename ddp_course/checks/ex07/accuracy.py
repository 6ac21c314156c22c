"""Question 3: an exact metric, for which the processes communicate once."""

from functools import partial

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex07.accuracy_cases import comes_in_training, half_known, in_training
from ddp_course.checks.ex07.accuracy_claims import messages, surroundings, totals, work
from ddp_course.checks.ex07.networks import PRELOADED, changed
from ddp_course.checks.ported import RECORD
from ddp_course.checks.training import equal, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

# ---- what the processes observe ----


def metrics(accuracy, sizes, batch_size, seed):
    """Count on data sets of these sizes; return for each the result, and what the
    network saw and how it changed.
    """
    from accelerate import Accelerator

    accelerator, seen = Accelerator(cpu=True), []
    accelerator.wait_for_everyone()
    before, joined = settings(accelerator), batch_size * accelerator.num_processes
    for place, size in enumerate(sizes):
        data, network = half_known(size, seed, joined), in_training(seed)
        network.train(comes_in_training(place))
        RECORD.clear()
        with trying(f"{size} samples"), CheckedWatch() as watch:
            returned = accuracy(accelerator, network, data.inputs, data.labels, batch_size)
        wrapped = any(is_start_of_ddp(entry, network) for entry in watch.log)
        seen.append(
            {"returned": returned, "modes": sorted({module.training for module in network.modules()})}
            | {"record": list(RECORD), "sent": [entry["whole"] for entry in watch.log], "wrapped": wrapped}
            | {"changed": changed(data, half_known(size, seed, joined)), "settings": [before, settings(accelerator)]}
            | left_behind(network, in_training(seed))
        )
        if wrapped:
            break  # DDP may wait for a process that has no sample
    accelerator.end_training()
    return seen


def settings(accelerator):
    """What the caller may have chosen, {name: value in words}."""
    chosen = dict(vars(accelerator.dataloader_config))
    for name in ("gradient_accumulation_steps", "device_placement", "step_scheduler_with_optimizer"):
        chosen[name] = getattr(accelerator, name)
    return {name: str(value) for name, value in chosen.items()}


def is_start_of_ddp(entry, network):
    """Whether all parameters were broadcast, as DDP does when it is constructed."""
    size = sum(parameter.nbytes for parameter in network.parameters())
    return entry["name"] == "broadcast" and entry["bytes"] >= size


def left_behind(network, before):
    """What is no longer as it was before the call. Gradients are recorded again."""
    pairs = list(zip(network.parameters(), before.parameters()))
    grads = [(now.grad, was.grad) for now, was in pairs if was.grad is not None]
    seen = {
        "off": not torch.is_grad_enabled(),
        "frozen": any(was.requires_grad > now.requires_grad for now, was in pairs),
        "unfrozen": any(was.requires_grad < now.requires_grad for now, was in pairs),
        "other gradients": any(now is None or not torch.equal(now, was) for now, was in grads),
        "other numbers": not equal(state(network), state(before)),
    }
    torch.set_grad_enabled(True)
    return seen


@question(
    "What makes it necessary in training that all processes get equally many batches? Is it necessary here, too? A loader "
    "that is not prepared repeats nothing.",
    "Give each process its own part of the samples: torch.utils.data.Subset, slices, or "
    "accelerator.split_between_processes. Count in the loop, without communication, and add up the two numbers of all "
    "processes after it. Before the loop, store network.training, call network.eval(), and use torch.no_grad().",
    "mine = range(accelerator.process_index, len(samples), accelerator.num_processes); loader = "
    "DataLoader(Subset(TensorDataset(samples, labels), mine), batch_size). In the loop, counts += "
    "torch.tensor([right, len(targets)]), from torch.zeros(2, dtype=torch.long). At the end, call network.train(mode), "
    "where mode is the stored network.training, and return accelerator.reduce(counts, 'sum').tolist().",
)
def check_accuracy(answer, draw):
    """Every process must return the exact number of correct predictions and of samples,
    after hardly any communication, and leave the network unchanged.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(5, 7), draw.randrange(10**6)
        joined = n * batch_size
        # In the first case, one process of a prepared loader fills up a batch and others
        # repeat whole batches.
        sizes = [4 * joined + draw.randint(n + 1, batch_size - 1), 2 * joined + 1, 2 * joined, 1]
        seen = answer.on_ranks(metrics, sizes, batch_size, seed, nproc=n, timeout=20)
        cases = [
            (f"accuracy with {size} sample{'s' * (size > 1)}, batch_size={batch_size}, {n} processes", size)
            for size in sizes
        ]
        for place, (checked, size) in enumerate(cases):
            of_ranks = [of_rank[place] for of_rank in seen]
            on_every_rank(partial(surroundings, checked, place), of_ranks)
            on_every_rank(partial(totals, checked, size, batch_size, seed), of_ranks)
        for place, (checked, size) in enumerate(cases):
            of_ranks = [of_rank[place] for of_rank in seen]
            on_every_rank(partial(work, checked, size, batch_size), of_ranks)
            on_every_rank(partial(messages, checked), of_ranks)
