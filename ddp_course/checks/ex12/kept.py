"""The bytes that a rank keeps between two steps, by formula."""

import math

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


def observe_kept(kept_bytes, cases):
    seen = []
    for case in cases:
        with trying(words(case)):
            seen.append(kept_bytes(**case))
    return seen


def words(case):
    return ", ".join(f"{name}={value}" for name, value in case.items())


def true_bytes(
    parameters, ranks, stage, mixed=False, buckets=False, shard=None, sizes=None, begin=(3, 2, 1), again=None
):
    """The right answer; the other arguments are for wrong ones: another shard, other
    sizes, sharded from other stages.
    """
    shard = -(-parameters // ranks) if shard is None else shard
    sizes = sizes or ((2, 2, 12) if mixed else (4, 4, 8))
    kept = sum(size * (shard if stage >= sharded_from else parameters) for size, sharded_from in zip(sizes, begin))
    return kept + (parameters * (sizes[1] if again is None else again) if buckets else 0)


@question(
    "Weights, gradients and the optimizer's state take three sizes for each parameter. Each of the three is either "
    "whole on every rank or a shard, depending on the stage.",
    "A shard has parameters / ranks parameters, rounded up: -(-parameters // ranks). The optimizer's state is a shard "
    "from stage 1 on, gradients from stage 2, weights from stage 3. In mixed precision the sizes are 2, 2 and 12.",
    "kept = weight * (shard if stage >= 3 else parameters), and so on for the others; buckets add gradient * parameters.",
)
def check_kept_bytes(answer, draw):
    """All stages, on one rank and on many, in both precisions, also with remainders and
    with DDP's buckets.
    """
    cases = []
    for stage in range(4):
        for mixed in (False, True):
            few = draw.randrange(3, 9)
            left_over = draw.randrange(1, few), draw.randrange(1, 64)
            for ranks, rest in [(1, 0), *zip((few, 64), left_over), (few, 0)]:
                parameters = ranks * draw.randrange(10, 10**6) + rest
                case = {"parameters": parameters, "ranks": ranks, "stage": stage}
                # what is False may be left out
                case |= {"mixed": True} if mixed else draw.choice([{}, {"mixed": False}])
                cases.append(case | draw.choice([{}, {"buckets": False}]))
                if stage == 0 and ranks > 1:
                    cases.append(case | {"buckets": True})
    [seen] = answer.on_ranks(observe_kept, cases)
    for case, got in zip(cases, seen):
        expected = true_bytes(**case)
        if got != expected:
            raise Wrong(f"kept_bytes({words(case)})", expected=f"{expected:,}", cause=cause_of_bytes(cases, seen, case),
                        got=f"{got:,}" if isinstance(got, int | float) else got)  # fmt: skip


def cause_of_bytes(cases, seen, case):
    """The mistake that explains all results, or this one."""
    looks = {
        "what is left out is False: mixed=False, buckets=False":
            lambda c: {"sizes": None if "mixed" in c else (2, 2, 12)},
        "a shard is rounded up: 10 parameters on 4 ranks are shards of 3, the last one padded":
            lambda c: {"shard": c["parameters"] // c["ranks"]},
        "a shard has a whole number of parameters: round up":
            lambda c: {"shard": c["parameters"] / c["ranks"]},
        "in mixed precision, the optimizer also has the master weights in fp32: 4 + 4 + 4 bytes":
            lambda c: {"sizes": (2, 2, 8) if c.get("mixed") else None},
        "in mixed precision weights and gradients are in 16 bits, 2 bytes each, and only the optimizer's three in fp32":
            lambda c: {"sizes": (4, 4, 8)},
        "in mixed precision gradients are in 16 bits, too":
            lambda c: {"sizes": (2, 4, 12) if c.get("mixed") else None},
        "Adam has two averages for each parameter, 8 bytes in fp32":
            lambda c: {"sizes": (2, 2, 8) if c.get("mixed") else (4, 4, 4)},
        "stage 1 shards the optimizer's state, 2 gradients, too, and 3 weights, too: here one of them is sharded too "
        "early or too late": lambda c: {"begin": (4, 3, 2)},
        "stage 1 shards the optimizer's state but not the gradients; stage 2 shards them, too":
            lambda c: {"begin": (3, 1, 2)},
        "stage 2 shards the gradients as well as the optimizer's state, stage 3 all three: a stage adds to the one before":
            None,
        "the buckets hold all gradients a second time, for any number of ranks, in the gradients' dtype":
            lambda c: {"again": 0},
        "the buckets hold gradients, in the gradients' dtype: 2 bytes each in mixed precision":
            lambda c: {"again": 4},
    }  # fmt: skip
    for cause, change in looks.items():
        if change is None:
            alike = all(one_at_a_time(c) == got for c, got in zip(cases, seen))
        else:
            alike = all(about(true_bytes(**c, **change(c)), got) for c, got in zip(cases, seen))
        if alike:
            return cause
    one_more = case["parameters"] // case["ranks"] + 1
    if seen[cases.index(case)] == true_bytes(**case, shard=one_more):
        return (
            "a shard is rounded up only where something is left over: 12 parameters on 4 ranks are shards of 3, and "
            "not of 4"
        )
    if case.get("buckets"):
        return "the buckets hold all gradients a second time: gradient * parameters bytes on each rank"
    return f"stage {case['stage']}: weights, gradients and the optimizer's state, each either whole or a shard"


def about(bytes_, got):
    """Whether this is the number, or what int(), round() or ceil() make of a
    fraction.
    """
    if not isinstance(got, int | float):
        return False
    return got in (bytes_, int(bytes_), round(bytes_), math.ceil(bytes_))


def one_at_a_time(case):
    """The wrong answer in which each stage shards only one of the three."""
    shard = -(-case["parameters"] // case["ranks"])
    sizes = (2, 2, 12) if case.get("mixed") else (4, 4, 8)
    kept = sum(
        size * (shard if case["stage"] == stage else case["parameters"]) for size, stage in zip(sizes, (3, 2, 1))
    )
    return kept + (sizes[1] * case["parameters"] if case.get("buckets") else 0)
