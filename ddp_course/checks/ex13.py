"""Exercise 13: configurations that are repaired, batches that are derived, an engine
that trains, and layers that are placed on stages.
"""

import copy
import operator
from itertools import combinations
from pprint import pformat

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course import UsageError, lesson13
from ddp_course.checks.samples import CLASSES, WIDTH, Numbered
from ddp_course.checks.training import a_look, descend, fill, state
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import start_server
from ddp_course.scenery.configurations import ACCUMULATE, BATCH, MICRO, check_batch
from ddp_course.school.judge import Wrong, question, trying

RANKS = 8  # on which all of the configurations are to run

# ---- 1: repair configurations ----

GOOD = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 1e-6,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 100,
        },
    },
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


def broken(draw=None):
    """Five configurations, {name: (what is wanted, the configuration)}, each with one
    mistake. draw: other numbers.
    """
    good = copy.deepcopy(GOOD)
    if draw:
        micro, accumulation = (
            draw.randrange(2, 9),
            draw.randrange(3, 7),
        )  # not the notebook's 2
        good |= dict(zip(BATCH, (micro * accumulation * RANKS, micro, accumulation)))
        good["zero_optimization"]["stage"] = draw.choice([1, 2, 3])
        rate = draw.choice([1e-4, 2e-4, 6e-4])
        good["optimizer"]["params"]["lr"] = good["scheduler"]["params"][
            "warmup_max_lr"
        ] = rate
    found = {name: copy.deepcopy(good) for name in WANTED}
    found["arithmetic"]["gradient_accumulation_steps"] *= 2
    found["memory"]["zero_optimisation"] = found["memory"].pop("zero_optimization")
    del found["clipping"]["gradient_clipping"]
    found["precision"]["fp16"] = {"enabled": True}
    found["schedule"]["scheduler"]["params"]["warmup_min_lr"] = 0.0
    return {name: (WANTED[name], found[name]) for name in WANTED}


WANTED = {
    "arithmetic": f"these batch sizes, on {RANKS} ranks; DeepSpeed refuses to start",
    "memory": "ZeRO; but each rank keeps the optimizer's whole state",
    "clipping": "no clipping; but a gradient of norm 7 reaches the optimizer with norm 1",
    "precision": "bf16; DeepSpeed refuses to start",
    "schedule": "weights that change in each update; but the first two change nothing",
}


class Listing(str):
    """A text that a cell shows as it is, if it is the cell's last expression."""

    __repr__ = str.__str__


def listing():
    """The five configurations of the notebook, as text."""
    parts = []
    for name, (wanted, config) in broken().items():
        parts.append(f"{name}: wants {wanted}")
        parts.append(f"{pformat(config, width=88, sort_dicts=False)}\n")
    return Listing("\n".join(parts))


def observe_repairs(repair, configurations):
    seen = {}
    for name, config in configurations.items():
        given = copy.deepcopy(config)
        with trying(f"repair({name!r}, ...)"):
            seen[name] = repair(name, given)
    return seen


@question(
    "There is one mistake in each: a number that does not fit, a misspelt word, a missing line, a line too many, and a "
    "number with which two updates do nothing. Lesson 13 shows all of these.",
    "arithmetic: derive the accumulation from the other two sizes. memory: which keys does DeepSpeed know? clipping: what "
    "is the default? precision: only one can be enabled. schedule: with which rate does WarmupLR begin?",
    "config['gradient_accumulation_steps'] = config['train_batch_size'] // config['train_micro_batch_size_per_gpu'] // 8; "
    "config['zero_optimization'] = config.pop('zero_optimisation'); config['gradient_clipping'] = 0.0; "
    "del config['fp16']; config['scheduler']['params']['warmup_min_lr'] = 1e-6",
)
def check_repair(answer, draw):
    """Five broken configurations, with the notebook's numbers and with others: each
    repaired, and nothing else changed.
    """
    for cases in (broken(), broken(draw)):
        [seen] = answer.on_ranks(
            observe_repairs, {name: config for name, (_, config) in cases.items()}
        )
        for name, (wanted, config) in cases.items():
            judge_repair(name, wanted, config, seen[name])


def judge_repair(name, wanted, config, got):
    checked = f"repair({name!r}, ...), which wants {wanted}"
    if not isinstance(got, dict):
        raise Wrong(
            checked,
            expected="a configuration, a dict",
            got=got,
            cause="return the repaired configuration",
        )

    def fail(expected, cause, got=got):
        raise Wrong(checked, expected=expected, got=got, cause=cause)

    if name == "arithmetic":
        try:
            check_batch(got, RANKS)
        except UsageError as error:
            fail(
                "micro batch x accumulation x ranks = train_batch_size",
                str(error),
                {key: got.get(key) for key in BATCH},
            )
        for key in BATCH[:2]:
            if got.get(key) != config[key]:
                fail(f"{key} {config[key]}", "the batch sizes stay as they are: change the "
                     "accumulation", got.get(key))  # fmt: skip
    if name == "memory":
        if "zero_optimization" not in got:
            fail(
                "a key zero_optimization",
                "DeepSpeed ignores a key that it does not know, and trains without ZeRO",
                sorted(got),
            )
        if got["zero_optimization"] != config["zero_optimisation"]:
            fail(
                config["zero_optimisation"],
                "its contents were right",
                got["zero_optimization"],
            )
    if name == "clipping":
        if "gradient_clipping" not in got:
            fail(
                "a line that says so",
                "left out, gradient_clipping is 1.0",
                "no gradient_clipping",
            )
        if got["gradient_clipping"] != 0:
            fail(
                "gradient_clipping 0.0",
                "0 does not clip; any other number is the largest norm",
                got["gradient_clipping"],
            )
    enabled = [
        kind
        for kind in ("fp16", "bf16")
        if isinstance(got.get(kind), dict) and got[kind].get("enabled")
    ]
    if name == "precision" and enabled != ["bf16"]:
        fail(
            "bf16, and not fp16",
            "exactly one of the two may be enabled, and bf16 is wanted",
            enabled,
        )
    if name == "schedule":
        rate = lowest_rate(got)
        highest = config["scheduler"]["params"]["warmup_max_lr"]
        if not isinstance(rate, int | float) or not 0 < rate < highest:
            fail(
                f"a warmup_min_lr above 0, and below {highest}",
                "WarmupLR makes its first two updates with this rate",
                rate,
            )

    # and nothing else
    may_change = {
        "arithmetic": {BATCH[2]},
        "memory": {"zero_optimization", "zero_optimisation"},
        "clipping": {"gradient_clipping"},
        "precision": {"fp16"},
        "schedule": set(),
    }[name]
    before, after = copy.deepcopy(config), copy.deepcopy(got)
    if name == "schedule":
        for one in (before, after):
            one["scheduler"]["params"].pop("warmup_min_lr")
    if name == "memory" and "zero_optimisation" in after:
        fail(
            "no key zero_optimisation", "the misspelt one is still there", sorted(after)
        )
    for key in sorted(before.keys() | after.keys()):
        if key not in may_change and before.get(key) != after.get(key):
            fail(
                f"{key} as it was: {before.get(key)}",
                "change what is wrong, and nothing else",
                after.get(key),
            )


def lowest_rate(config):
    """WarmupLR's warmup_min_lr; 0, its default, where the configuration has none."""
    for key in ("scheduler", "params"):
        config = config.get(key)
        if not isinstance(config, dict):
            return 0.0
    return config.get("warmup_min_lr", 0.0)


# ---- 2: derive the sizes of a batch ----


def true_batch(samples, ranks, fits):
    """The right answer: the largest micro-batch that fits and divides. None where there
    is none.
    """
    if samples % ranks:
        return None
    share = samples // ranks
    micro = max(size for size in range(1, fits + 1) if share % size == 0)
    return dict(zip(BATCH, (samples, micro, share // micro)))


def observe_batches(batch_sizes, cases):
    seen = []
    for case in cases:
        try:
            with trying(f"batch_sizes({words(case)})"):
                seen.append(batch_sizes(**case))
        except ValueError as error:
            seen.append(f"ValueError: {error}")
    return seen


def words(case):
    return ", ".join(f"{name}={value}" for name, value in case.items())


@question(
    "The share of each rank is samples / ranks. It consists of equally large micro-batches, as few as possible: so take the "
    "largest micro-batch that fits and divides the share.",
    "If samples % ranks is not 0, raise ValueError. Otherwise count micro down from the smaller of fits and the share "
    "until share % micro == 0. Then the accumulation is share // micro.",
    "micro = next(size for size in range(fits, 0, -1) if share % size == 0), and the three keys are train_batch_size, "
    "train_micro_batch_size_per_gpu and gradient_accumulation_steps.",
)
def check_batch_sizes(answer, draw):
    """Batches that divide at once, after some search, and not at all; and one that fits
    whole.
    """
    ranks = draw.choice([2, 4, 8])
    cases = [
        {"samples": 4 * 8 * ranks, "ranks": ranks, "fits": 8},
        {
            "samples": 4 * 9 * ranks,
            "ranks": ranks,
            "fits": 8,
        },  # 36 per rank: 6 divides, 8 and 7 do not
        {
            "samples": 5 * ranks,
            "ranks": ranks,
            "fits": draw.randrange(20, 40),
        },  # no need to accumulate
        {
            "samples": draw.choice([13, 17, 19]) * ranks,
            "ranks": ranks,
            "fits": 8,
        },  # a prime: one at a time
        {"samples": 60 * 3, "ranks": 3, "fits": draw.randrange(7, 10)},
        {"samples": 8 * ranks + 1, "ranks": ranks, "fits": 4},
        {"samples": 6, "ranks": 1, "fits": 4},
        {"samples": 5 * ranks, "ranks": ranks, "fits": 1},
    ]
    for _ in range(6):
        case = {"ranks": draw.randrange(2, 13), "fits": draw.randrange(2, 40)}
        case["samples"] = case["ranks"] * draw.randrange(12, 500)
        cases.append(case)
    [seen] = answer.on_ranks(observe_batches, cases)
    for case, got in zip(cases, seen):
        judge_batch(case, true_batch(**case), got)


def judge_batch(case, expected, got):
    checked = f"batch_sizes({words(case)})"
    refused = isinstance(got, str) and got.startswith("ValueError")
    if expected is None:
        if not refused:
            cause = f"{case['samples']} samples cannot be shared equally by {case['ranks']} ranks: raise ValueError"
            raise Wrong(checked, expected="ValueError", got=got, cause=cause)
        return
    if refused:
        raise Wrong(
            checked,
            expected=expected,
            got=got,
            cause="this can be done: a micro-batch of 1 always divides",
        )
    if not isinstance(got, dict) or sorted(got) != sorted(BATCH):
        raise Wrong(
            checked,
            expected=expected,
            got=got,
            cause=f"return a dict with the keys {', '.join(BATCH)}",
        )
    if got == expected and all(isinstance(value, int) for value in got.values()):
        return
    whole, micro, accumulation = (got[name] for name in BATCH)
    share = case["samples"] // case["ranks"]
    cause = f"of all micro-batches that divide {share}, take the largest that fits: then there are fewest of them"
    if not all(isinstance(value, int) for value in got.values()):
        cause = "these are whole numbers: a DataLoader refuses a batch_size of 4.0"
    elif whole != case["samples"]:
        cause = "train_batch_size is the number of samples in an update, of all ranks"
    elif not all(
        isinstance(value, int) and value > 0 for value in (micro, accumulation)
    ):
        cause = "these are whole numbers from 1"
    elif micro * accumulation * case["ranks"] != whole:
        product = f"{micro} x {accumulation} x {case['ranks']} = {micro * accumulation * case['ranks']}"
        cause = f"{product}, and not {whole}: DeepSpeed would refuse it. The micro-batch must divide {share}"
    elif micro > case["fits"]:
        cause = f"a micro-batch of {micro} does not fit: {case['fits']} is the most"
    raise Wrong(checked, expected=expected, got=got, cause=cause)


# ---- 3: train with an engine ----

# The ranks begin with these, where they are installed; the process that judges need not
# wait for them.
PRELOADED = ["deepspeed", "torch._inductor.compile_fx"]
TIMEOUT = 40  # seconds, for ranks that have yet to import these; else they need two
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
    start_server(*PRELOADED)  # where none runs yet
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


# ---- 4: place layers on stages ----


def slowest(costs, sizes):
    """How long the slowest stage takes."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends))


def best(costs, stages):
    """How long the slowest stage takes where layers are placed best: all placements are
    tried.
    """
    every = combinations(range(1, len(costs)), stages - 1)
    return min(
        slowest(costs, [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)))])
        for cuts in every
    )


def observe_places(place, cases):
    seen = []
    for costs, stages in cases:
        with trying(f"place({costs}, {stages})"):
            seen.append(whole_numbers(place(list(costs), stages)))
    return seen


def whole_numbers(answer):
    """A list of whole numbers of any kind, NumPy's, too, as ints; else the answer."""
    try:
        return [operator.index(number) for number in answer]
    except TypeError:
        return answer


@question(
    "Each micro-batch goes through all stages, so the slowest stage sets the pace, and all others wait for it. Make the "
    "slowest one as quick as possible; how many layers each has does not matter.",
    "Suppose that no stage may take longer than some limit. Then fill the first with layers until the next would be too "
    "much, go on with the second, and so on: either there are stages enough, or not. Try limits from below.",
    "for limit in sorted(the sums of all layers that follow one another): fill; the first limit at which `stages` stages "
    "are enough is the best. If fewer were needed, split one that has several layers.",
)
def check_place(answer, draw):
    """Layers of unequal cost on 1 to 5 stages, drawn at random: the slowest stage is as
    quick as it can be.
    """
    cases = [
        ([1, 1, 1, 1, 1, 1], 3),
        ([9, 1, 1, 1, 1, 1], 2),  # not in the middle
        ([2, 3, 2, 5, 5, 1, 5, 2], 3),  # filling up to the mean goes wrong
        ([1, 1, 1, 9], 4),
        ([3, 1, 2], 1),
    ]
    for _ in range(12):
        costs = [draw.randrange(1, 20) for _ in range(draw.randrange(6, 12))]
        cases.append((costs, draw.randrange(2, 6)))
    [seen] = answer.on_ranks(observe_places, cases)
    for (costs, stages), got in zip(cases, seen):
        judge_place(costs, stages, got)


def judge_place(costs, stages, got):
    checked = f"place({costs}, {stages})"
    truth = best(costs, stages)
    expected = f"{stages} numbers of layers, with which the slowest stage takes {truth}"
    if not isinstance(got, list | tuple) or not all(
        isinstance(size, int) for size in got
    ):
        cause = (
            "return a list: how many layers each stage has, from the first to the last"
        )
        raise Wrong(checked, expected=expected, got=got, cause=cause)
    if len(got) != stages:
        raise Wrong(
            checked,
            expected=expected,
            got=got,
            cause=f"these are {len(got)} stages, not {stages}",
        )
    if min(got) < 1:
        raise Wrong(
            checked,
            expected=expected,
            got=got,
            cause="a stage without a layer is a rank without work",
        )
    if sum(got) != len(costs):
        cause = f"there are {len(costs)} layers, and each is on one stage: these are {sum(got)}"
        raise Wrong(checked, expected=expected, got=got, cause=cause)
    if slowest(costs, got) > truth:
        cause = f"the slowest stage takes {slowest(costs, got)} here, and sets the pace for all"
        if max(got) - min(got) <= 1:
            cause += "; equally many layers are not equally much work"
        raise Wrong(checked, expected=expected, got=got, cause=cause)
