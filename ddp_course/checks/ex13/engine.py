"""Question 3: an engine that trains."""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course import lesson13
from ddp_course.checks.ex13.installed import TIMEOUT, deepspeed_is_needed
from ddp_course.checks.samples import CLASSES, WIDTH, Numbered
from ddp_course.checks.training import a_look, descend, fill, state
from ddp_course.ranks.environment import process_group
from ddp_course.scenery.configurations import ACCUMULATE, MICRO
from ddp_course.school.judge import Wrong, question, trying

LOWEST, HIGHEST, WARMUP = 0.1, 0.9, 4  # of the learning rates


class Network(nn.Module):
    """A small network in 32 bits. It ignores its first input, a sample's number."""

    def __init__(self, seed):
        super().__init__()
        sizes = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.layers = fill(nn.Sequential(*sizes), seed).float()

    def forward(self, inputs):
        return self.layers(inputs[:, 1:])


def engine_configuration(stage, batch_size, window):
    """SGD, whose steps are as long as the gradients, so that a wrong factor shows."""
    rates = {"warmup_min_lr": LOWEST, "warmup_max_lr": HIGHEST}
    rates |= {"warmup_num_steps": WARMUP, "warmup_type": "linear"}
    buckets = {"reduce_bucket_size": 1000}
    if stage < 3:
        buckets["allgather_bucket_size"] = 1000
    return {
        MICRO: batch_size,
        ACCUMULATE: window,
        "optimizer": {"type": "SGD", "params": {"lr": HIGHEST}},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": rates},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **buckets},
    }


def micro_batches(case, call, ranks):
    """For each rank, its micro-batches in this call, pairs of inputs and labels."""
    count, size = case["lengths"][call], case["batch_size"]
    data = Numbered(count * ranks * size, case["seed"] + call)
    inputs, labels = data.inputs.float().split(size), data.labels.split(size)
    pairs = list(zip(inputs, labels))
    return [pairs[rank::ranks] for rank in range(ranks)]


def observe_training(train, stage, case):
    """Call train once for each of case["lengths"], with one engine; say what it did."""
    with process_group(timeout=8) as (rank, ranks):
        network = Network(case["seed"])
        config = engine_configuration(stage, case["batch_size"], case["window"])
        engine = lesson13.start_engine(network, config, torch.device("cpu"))
        seen = {"calls": 0, "optimizer_steps": 0, "rates": []}

        def count(what):
            seen[what] += 1

        engine.register_forward_pre_hook(lambda *_: count("calls"))
        network.register_forward_pre_hook(
            lambda *_: seen["rates"].append(engine.get_lr()[0])
        )
        if stage == 0:  # there it is torch's, and nothing is around it
            step_hook = engine.optimizer.register_step_post_hook
            step_hook(lambda *_: count("optimizer_steps"))
        seen["returned"], seen["forwards"] = [], []
        for call in range(len(case["lengths"])):
            before = len(seen["rates"])
            mine = micro_batches(case, call, ranks)[rank]
            with trying(f"call {call + 1}, ZeRO stage {stage}"):
                seen["returned"].append(train(engine, mine))
            seen["forwards"].append(len(seen["rates"]) - before)
        seen |= {"updates": engine.global_steps, "steps": engine.micro_steps}
        return seen | {"end": lesson13.whole_parameters(engine)}


@question(
    "An engine has three calls: engine(inputs) for forward, engine.backward(loss), and "
    "engine.step(). Which of them does what optimizer.step(), zero_grad(), the "
    "scheduler's step and the division by the accumulation do in a plain loop?",
    "Call all three for each micro-batch; the engine counts them. Leave out the last "
    "len(batches) % engine.gradient_accumulation_steps(). Ask engine.get_lr()[0] before "
    "the step, since afterwards it is the next update's.",
    "window = engine.gradient_accumulation_steps(). For each whole window of batches: "
    "rate = engine.get_lr()[0]; total = 0; for each micro-batch: loss = "
    "F.cross_entropy(engine(inputs), labels), engine.backward(loss), engine.step(), "
    "total += loss.detach() / window; then dist.all_reduce(total, dist.ReduceOp.AVG).",
)
def check_train(answer, draw):
    """An engine in stage 0, and one in stage 2 or 3, trained in two calls: updates,
    learning rates, parameters and what comes back are one process's.
    """
    deepspeed_is_needed()
    window = draw.randint(2, 4)
    case = {"seed": draw.randrange(10**6), "window": window}
    case |= {"batch_size": draw.randint(2, 4)}
    # the first call has some micro-batches that make no update
    case["lengths"] = [2 * window + draw.randint(1, window - 1), 2 * window]
    # one after the other: what goes wrong in stage 0 is explained before stage 3 raises
    for stage, ranks in ((0, draw.choice([2, 3])), (draw.choice([2, 3]), 2)):
        of_ranks = answer.on_ranks(
            observe_training, stage, case, nproc=ranks, timeout=TIMEOUT
        )
        for rank, seen in enumerate(of_ranks):
            judge_engine(stage, case, rank, ranks, seen)


def judge_engine(stage, case, rank, ranks, seen):
    window, where = case["window"], f"{rank} of {ranks}"
    checked = f"two calls of train, with {case['lengths']} micro-batches, "
    checked += f"gradient_accumulation_steps {window}, ZeRO stage {stage}"
    updates = [length // window for length in case["lengths"]]

    def fail(what, expected, got, cause):
        checked_now = f"{what}: {checked}"
        raise Wrong(checked_now, rank=where, expected=expected, got=got, cause=cause)

    judge_calls(fail, seen, window, updates)
    rates = [rate_of(update) for update in range(sum(updates))]
    used = seen["rates"][::window]
    if not agree(used, rates):
        cause = "engine.step() has moved the schedule on already; do not step it again"
        fail("learning rates of the updates", rounded(rates), rounded(used), cause)
    truth, losses = by_one_process(case, ranks, updates)
    if not near(seen["end"], truth):
        cause = "is it the mean cross entropy that goes into engine.backward()?"
        for mistake, likely in {
            "again": "every step is too short: engine.backward() divides the loss by the "
            "accumulation, so do not divide it as well",
            "last": "only the last micro-batch of each update counts: engine.step() clears "
            "gradients when it is time, and nobody else should",
        }.items():
            if near(seen["end"], by_one_process(case, ranks, updates, mistake)[0]):
                cause = likely
        fail(
            "parameters, next to one process", a_look(truth), a_look(seen["end"]), cause
        )
    for call, returned in enumerate(seen["returned"]):
        before = sum(updates[:call])
        part = slice(before, before + updates[call])
        after = [rate_of(update + 1) for update in range(sum(updates))]
        judge_returned(fail, returned, losses[part], rates[part], after[part])


def judge_calls(fail, seen, window, updates):
    """Raise Wrong unless the engine was called as often as it should be."""
    forwards = [count * window for count in updates]
    if seen["calls"] < sum(seen["forwards"]):
        cause = "call engine(inputs): engine.module goes around what the engine does"
        through = f"{seen['calls']} of {sum(seen['forwards'])}"
        fail("forwards through the engine", "all", through, cause)
    if seen["forwards"] != forwards:
        cause = "each micro-batch of a whole update goes through the engine once"
        if seen["forwards"][0] > forwards[0]:
            cause = (
                "the micro-batches at the end that make no whole update are left out"
            )
        fail("micro-batches in each call", forwards, seen["forwards"], cause)
    if seen["updates"] != sum(updates):
        cause = "call engine.step() after each micro-batch: it counts them, and only "
        cause += f"every {window}th call makes an update"
        if seen["steps"] == 0:
            cause = "engine.step() is not called: nothing has been updated"
        elif seen["updates"] > sum(updates):
            cause = f"an update takes {window} micro-batches: leave that to the engine"
        fail("updates of the engine", sum(updates), seen["updates"], cause)
    if seen["optimizer_steps"] not in (0, seen["updates"]):
        cause = "engine.step() calls the optimizer; do not call its step() as well"
        fail("steps of the optimizer", seen["updates"], seen["optimizer_steps"], cause)


def judge_returned(fail, returned, losses, rates, next_rates):
    what, pairs = "what comes back", as_pairs(returned)
    if pairs is None or len(pairs) != len(losses):
        cause = "return a list with a pair of numbers for each update: (loss, rate)"
        got = f"a list of {len(returned)}" if isinstance(returned, list) else returned
        fail(what, f"a list of {len(losses)} pairs", got, cause)
    got_losses, got_rates = zip(*pairs)
    means = [sum(sum(of_rank) for of_rank in loss) for loss in losses]
    numbers = [len(loss) * len(loss[0]) for loss in losses]
    means = [total / number for total, number in zip(means, numbers)]
    if not agree(got_losses, means):
        cause = "the mean over all micro-batches of an update, and over all ranks"
        own = [[sum(of_rank) / len(of_rank) for of_rank in loss] for loss in losses]
        if any(agree(got_losses, column) for column in zip(*own)):
            cause = "this is the mean on this rank only: average it over the ranks"
        elif agree(got_losses, [mean * len(loss) for mean, loss in zip(means, losses)]):
            cause = "this is a sum over the ranks: take the mean"
            if len(losses[0]) == len(losses[0][0]):
                cause = (
                    "this is a sum, over the ranks or the micro-batches: take the mean"
                )
        elif agree(
            got_losses, [mean * len(loss[0]) for mean, loss in zip(means, losses)]
        ):
            cause = "this is the sum over the micro-batches of an update: take the mean"
        elif agree(
            got_losses, [mean / len(loss[0]) for mean, loss in zip(means, losses)]
        ):
            cause = (
                "this is divided by the accumulation twice: engine.backward() returns "
            )
            cause += "a loss that is divided already"
        elif agree(got_losses, [last_of(loss) for loss in losses]):
            cause = "this is the last micro-batch's only: an update has several"
        fail(f"{what}, the losses", rounded(means), rounded(got_losses), cause)
    if not agree(got_rates, rates):
        cause = "the learning rate that the update was made with"
        if agree(got_rates, next_rates):
            cause = "after engine.step(), get_lr() is the next update's: ask before it"
        fail(f"{what}, the rates", rounded(rates), rounded(got_rates), cause)


def rate_of(update):
    """WarmupLR's: the first two updates have the lowest rate."""
    done = min(1.0, max(0, update - 1) / WARMUP)
    return LOWEST + (HIGHEST - LOWEST) * done


def by_one_process(case, ranks, updates, mistake=None):
    """Plain SGD: (the parameters at the end, for each update its losses by rank and
    micro-batch).

    mistake: 'again', losses divided by the accumulation twice; 'last', gradients of the
    last micro-batch only.
    """
    network, window, all_losses = Network(case["seed"]).double(), case["window"], []
    for call, count in enumerate(updates):
        of_ranks = micro_batches(case, call, ranks)
        for begin in range(0, count * window, window):
            losses = [
                [
                    F.cross_entropy(network(inputs.double()), labels)
                    for inputs, labels in mine[begin : begin + window]
                ]
                for mine in of_ranks
            ]
            counted = [
                of_rank[-1:] if mistake == "last" else of_rank for of_rank in losses
            ]
            total = sum(sum(of_rank) for of_rank in counted) / ranks / window
            (total / window if mistake == "again" else total).backward()
            descend(network, rate_of(len(all_losses)))
            all_losses.append([[loss.item() for loss in of_rank] for of_rank in losses])
    return state(network), all_losses


def last_of(losses):
    """Of an update's losses by rank and micro-batch, the mean of the last ones."""
    return sum(of_rank[-1] for of_rank in losses) / len(losses)


def as_pairs(returned):
    """A list of pairs of numbers as floats; None where it is something else."""
    try:
        return [(float(loss), float(rate)) for loss, rate in returned]
    except (TypeError, ValueError, RuntimeError):
        return None


def agree(numbers, others):
    """Whether two lists hold the same numbers, to four digits."""
    return len(numbers) == len(others) and all(
        abs(a - b) <= 1e-4 * (1 + abs(b)) for a, b in zip(numbers, others)
    )


def near(some, others):
    """Whether two states hold the same numbers, as far as 32 bits go."""
    return some.keys() == others.keys() and all(
        torch.allclose(some[name].double(), others[name], rtol=1e-3, atol=1e-4)
        for name in others
    )


def rounded(numbers):
    return ", ".join(f"{number:.4f}" for number in numbers)
