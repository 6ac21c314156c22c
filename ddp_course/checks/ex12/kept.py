"""The bytes that a rank keeps between two steps, by formula."""

import math

from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question


def formula(
    shard=None, mixed_by_default=False, fp32=(4, 4, 8), mixed=(2, 2, 12), begin=(3, 2, 1), buckets=None, whole=float
):
    """The right answer, or one with a mistake in a part of it.

    shard: of parameters and ranks; fp32, mixed: bytes per weight, gradient and optimizer's
    state; begin: the stages from which they are shards; buckets: bytes of a gradient in
    them; whole: what makes the bytes a whole number.
    """
    shard = shard or (lambda parameters, ranks: -(-parameters // ranks))

    def kept_bytes(parameters, ranks, stage, **options):
        sizes = mixed if options.get("mixed", mixed_by_default) else fp32
        of_one = shard(parameters, ranks)
        kept = sum(size * (of_one if stage >= first else parameters) for size, first in zip(sizes, begin))
        again = sizes[1] if buckets is None else buckets
        return float(whole(kept + again * parameters * options.get("buckets", False)))

    return kept_bytes


def one_at_a_time(parameters, ranks, stage, **options):
    """Each stage shards only one of the three."""
    begin = [stage if stage == only else 4 for only in (3, 2, 1)]
    return formula(begin=begin)(parameters, ranks, stage, **options)


def a_fraction(parameters, ranks):
    return parameters / ranks


ROUND_UP = "a shard has a whole number of parameters: round up"
MISTAKES = {
    "what is left out is False: mixed=False, buckets=False": formula(mixed_by_default=True),
    "a shard is rounded up: 10 parameters on 4 ranks are shards of 3, the last one padded":
        formula(lambda parameters, ranks: parameters // ranks),
    ROUND_UP: formula(a_fraction),
    **{f"{ROUND_UP} that number, and not the bytes, with {name}": formula(a_fraction, whole=whole)
       for name, whole in [("int", int), ("round", round), ("ceil", math.ceil)]},
    "in mixed precision, the optimizer also has the master weights in fp32: 4 + 4 + 4 bytes": formula(mixed=(2, 2, 8)),
    "in mixed precision weights and gradients are in 16 bits, 2 bytes each, and only the optimizer's three in fp32":
        formula(mixed=(4, 4, 8)),
    "in mixed precision gradients are in 16 bits, too": formula(mixed=(2, 4, 12)),
    "Adam has two averages for each parameter, 8 bytes in fp32": formula(fp32=(4, 4, 4), mixed=(2, 2, 8)),
    "stage 1 shards the optimizer's state, 2 gradients, too, and 3 weights, too: here one of them is sharded too "
    "early or too late": formula(begin=(4, 3, 2)),
    "stage 1 shards the optimizer's state but not the gradients; stage 2 shards them, too": formula(begin=(3, 1, 2)),
    "stage 2 shards the gradients as well as the optimizer's state, stage 3 all three: a stage adds to the one before":
        one_at_a_time,
    "the buckets hold all gradients a second time, for any number of ranks, in the gradients' dtype": formula(buckets=0),
    "the buckets hold gradients, in the gradients' dtype: 2 bytes each in mixed precision": formula(buckets=4),
}  # fmt: skip


def of_this_case(case, got):
    if got == formula(lambda parameters, ranks: parameters // ranks + 1)(**case):
        return (
            "a shard is rounded up only where something is left over: 12 parameters on 4 ranks are shards of 3, and "
            "not of 4"
        )
    if case.get("buckets"):
        return "the buckets hold all gradients a second time: gradient * parameters bytes on each rank"
    return f"stage {case['stage']}: weights, gradients and the optimizer's state, each either whole or a shard"


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
                if stage == 0:
                    cases.append(case | {"buckets": True})
    # fewer parameters than ranks, and more than 32 bits can tell apart
    cases += [{"parameters": 3, "ranks": 4, "stage": 3}, {"parameters": 1_000_000_001, "ranks": 2, "stage": 3}]
    check_function(answer, draw, "kept_bytes", cases, formula(), MISTAKES, of_this_case, digits=12)
