"""Question 1: five configurations, each with one mistake."""

import copy
from pprint import pformat

from ddp_course import UsageError
from ddp_course.checkpoints.deepspeed_configurations import BATCH, check_batch
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong

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
        micro, accumulation = (draw.randrange(2, 9), draw.randrange(3, 7))  # not the notebook's 2
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
        [seen] = answer.on_ranks(observe_repairs, {name: config for name, (_, config) in cases.items()})
        for name, (wanted, config) in cases.items():
            judge_repair(name, wanted, config, seen[name])


def judge_repair(name, wanted, config, got):
    checked = f"repair({name!r}, ...), which wants {wanted}"
    if not isinstance(got, dict):
        raise Wrong(checked, expected="a configuration, a dict", got=got, cause="return the repaired configuration")

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
            fail(config["zero_optimisation"], "its contents were right", got["zero_optimization"])
    if name == "clipping":
        if "gradient_clipping" not in got:
            fail("a line that says so", "left out, gradient_clipping is 1.0", "no gradient_clipping")
        if got["gradient_clipping"] != 0:
            fail(
                "gradient_clipping 0.0",
                "0 does not clip; any other number is the largest norm",
                got["gradient_clipping"],
            )
    enabled = [kind for kind in ("fp16", "bf16") if isinstance(got.get(kind), dict) and got[kind].get("enabled")]
    if name == "precision" and enabled != ["bf16"]:
        fail("bf16, and not fp16", "exactly one of the two may be enabled, and bf16 is wanted", enabled)
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
        fail("no key zero_optimisation", "the misspelt one is still there", sorted(after))
    for key in sorted(before.keys() | after.keys()):
        if key not in may_change and before.get(key) != after.get(key):
            fail(f"{key} as it was: {before.get(key)}", "change what is wrong, and nothing else", after.get(key))


def lowest_rate(config):
    """WarmupLR's warmup_min_lr; 0, its default, where the configuration has none."""
    for key in ("scheduler", "params"):
        config = config.get(key)
        if not isinstance(config, dict):
            return 0.0
    return config.get("warmup_min_lr", 0.0)
