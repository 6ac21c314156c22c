"""Exercise 13: configurations that are repaired, batches that are derived, and layers
that are placed on stages.
"""

import copy
from itertools import combinations

from ddp_course import UsageError
from ddp_course.lesson13 import BATCH, check_batch
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
    "arithmetic": f"the batches as they are, on {RANKS} ranks",
    "memory": "ZeRO, in the stage that is named",
    "clipping": "gradients are not to be clipped",
    "precision": "bf16",
    "schedule": "the first update, too, is to do something",
}


def observe_repairs(repair, configurations):
    seen = {}
    for name, config in configurations.items():
        given = copy.deepcopy(config)
        with trying(f"repair({name!r}, ...)"):
            seen[name] = repair(name, given)
    return seen


@question(
    "There is one mistake in each: a number that does not fit, a word misspelt, a line that is missing, a line too many, "
    "and a number that makes two updates do nothing. Lesson 13 has made all five.",
    "arithmetic: the accumulation is what the other two leave. memory: which keys does DeepSpeed know? clipping: what "
    "does it do where nothing is said? precision: one only. schedule: with which rate does WarmupLR begin?",
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
                fail(f"{key} {config[key]}", "the batches are to stay as they are: what is left to change is the "
                     "accumulation", got.get(key))  # fmt: skip
    if name == "memory":
        if "zero_optimization" not in got:
            fail(
                "a key zero_optimization",
                "DeepSpeed ignores what it does not know, and trains without ZeRO",
                sorted(got),
            )
        if got["zero_optimization"] != config["zero_optimisation"]:
            fail(
                config["zero_optimisation"],
                "what stands in it was right",
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
        rate = got.get("scheduler", {}).get("params", {}).get("warmup_min_lr", 0.0)
        highest = config["scheduler"]["params"]["warmup_max_lr"]
        if not 0 < rate < highest:
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
            one["scheduler"]["params"].pop("warmup_min_lr", None)
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
    "A rank's share is samples / ranks. It is made of equally large micro-batches: as few of them as possible, so each as "
    "large as fits, and as divides the share.",
    "If samples % ranks is not 0, raise ValueError. Else count micro down from the smaller of fits and the share, until "
    "share % micro == 0. Then the accumulation is share // micro.",
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
        },  # 36 a rank: 6 divides, 8 and 7 do not
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
    ]
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
    if got == expected:
        return
    whole, micro, accumulation = (got[name] for name in BATCH)
    share = case["samples"] // case["ranks"]
    cause = f"of all micro-batches that divide {share}, take the largest that fits: then there are fewest of them"
    if whole != case["samples"]:
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


# ---- 3: place layers on stages ----


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
            seen.append(place(list(costs), stages))
    return seen


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
