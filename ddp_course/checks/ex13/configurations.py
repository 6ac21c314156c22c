"""Question 1: five configurations, each with one mistake."""

import copy
import math
from functools import partial
from pprint import pformat

from ddp_course import UsageError
from ddp_course.checkpoints.deepspeed_configurations import BATCH, check_batch
from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

RANKS = 8  # on which all of the configurations are to run

GOOD = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 100},
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
        micro, accumulation = draw.randrange(2, 9), draw.randrange(7, 13)  # from 7 on, // shows a 7 in the place of 8
        good |= dict(zip(BATCH, (micro * accumulation * RANKS, micro, accumulation)))
        good["zero_optimization"]["stage"] = draw.choice([1, 2, 3])
        rate = draw.choice([1e-4, 2e-4, 6e-4])
        good["optimizer"]["params"]["lr"] = good["scheduler"]["params"]["warmup_max_lr"] = rate
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
        with trying(f"repair({name!r}, ...)"):
            seen[name] = repair(name, copy.deepcopy(config))
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
        [seen] = answer.on_ranks(observe_repairs, {name: config for name, (_, config) in cases.items()})
        for name, (wanted, config) in cases.items():
            hold(claims(name, wanted, config, seen[name]))


# ---- what is claimed ----

ABSENT = "no such key"
NOTHING_ELSE = "change what is wrong, and nothing else"


def claims(name, wanted, config, got):
    """Claims that a configuration is repaired, and that nothing else has changed."""
    claim = partial(Claim, f"repair({name!r}, ...), which wants {wanted}")
    yield claim(isinstance(got, dict), True, "return the repaired configuration",
                told="a configuration, a dict", shown=str(got))  # fmt: skip
    repaired, may_change = REPAIRS[name]
    yield from repaired(claim, config, got)
    for key in sorted((config.keys() | got.keys()) - may_change, key=str):
        before = config.get(key, ABSENT)
        yield claim(got.get(key, ABSENT), before, NOTHING_ELSE, told=f"{key} as it was: {before}")


def arithmetic(claim, config, got):
    problem = None
    try:
        check_batch(got, RANKS)
    except UsageError as error:
        problem = str(error)
    yield claim(problem, None, problem, told="micro batch x accumulation x ranks = train_batch_size",
                shown={key: got.get(key) for key in BATCH})  # fmt: skip
    for key in BATCH[:2]:
        yield claim(got.get(key, ABSENT), config[key], "the batch sizes stay as they are: change the accumulation",
                    told=f"{key} {config[key]}")  # fmt: skip


def memory(claim, config, got):
    sharding = config["zero_optimisation"]
    ignored = "DeepSpeed ignores a key that it does not know, and trains without ZeRO"
    yield claim(got.get("zero_optimization", ABSENT), sharding, "its contents were right", [(ABSENT, ignored)],
                told=f"a key zero_optimization, with {sharding}")  # fmt: skip
    left = got.get("zero_optimisation", ABSENT)
    yield claim(left, ABSENT, "the misspelt one is still there", told="no key zero_optimisation")


def clipping(claim, config, got):
    yield claim(got.get("gradient_clipping", ABSENT), 0.0, "0 does not clip; any other number is the largest norm",
                [(ABSENT, "left out, gradient_clipping is 1.0")], told="a gradient_clipping that says so")  # fmt: skip


def precision(claim, config, got):
    enabled = [kind for kind in ("fp16", "bf16") if isinstance(got.get(kind), dict) and got[kind].get("enabled")]
    both = "exactly one of the two may be enabled, and bf16 is wanted"
    yield claim(enabled, ["bf16"], both, told="bf16, and not fp16")


def schedule(claim, config, got):
    right, rate = copy.deepcopy(config["scheduler"]), lowest_rate(got)
    highest = right["params"]["warmup_max_lr"]
    between = Between(math.nextafter(0, 1), math.nextafter(highest, 0))
    yield claim(rate, between, "WarmupLR makes its first two updates with this rate",
                told=f"a warmup_min_lr above 0, and below {highest}")  # fmt: skip
    right["params"]["warmup_min_lr"] = rate
    yield claim(got["scheduler"], right, NOTHING_ELSE, told=f"scheduler as it was, but for this rate: {right}")


def lowest_rate(config):
    """WarmupLR's warmup_min_lr; 0, its default, where the configuration has none."""
    for key in ("scheduler", "params"):
        config = config.get(key)
        if not isinstance(config, dict):
            return 0.0
    return config.get("warmup_min_lr", 0.0)


REPAIRS = {  # what is claimed of each, and which keys may change
    "arithmetic": (arithmetic, {BATCH[2]}),
    "memory": (memory, {"zero_optimization", "zero_optimisation"}),
    "clipping": (clipping, {"gradient_clipping"}),
    "precision": (precision, {"fp16"}),
    "schedule": (schedule, {"scheduler"}),
}
