"""Question 5: find the bugs in an evaluation, which gives the bits per byte of a text."""

from functools import partial

import torch

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.ex10.perplexity_simulated import CAUSES, Language, fault_sets, simulated, text_of, windows_of
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

# ---- what a rank does ----


def evaluated(bits_per_byte, cases):
    """Of each case, what the answer returned, and what the network has noted."""
    seen = []
    with process_group(timeout=5) as (rank, _):
        for case in cases:
            network, (tokens, sizes) = Language(case["seed"], case["context"]), text_of(case)
            network.train(case["training"])
            given = [tokens.clone(), sizes.clone()]
            with trying(described(case)):
                value = bits_per_byte(network, tokens, sizes, case["context"], case["stride"])
            seen.append({
                "value": value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value,
                "rows": network.rows, "trained": network.trained, "training": network.training,
                "kept": torch.equal(tokens, given[0]) and torch.equal(sizes, given[1]),
            })  # fmt: skip
    return seen


def described(case):
    words = f"{case['ranks']} ranks, a text of {case['length']} tokens"
    return f"{words}, context {case['context']}, stride {case['stride']}"


# ---- what is claimed ----

FOLLOW = (
    "is each token but the first scored once, in the first window that has it as a target, and are bits and bytes those of "
    "the same tokens?"
)


def claims(case, rank, of_ranks):
    seen, call = of_ranks[rank], described(case)
    yield Claim(
        f"{call}: the network's mode while it evaluates", seen["trained"], False,
        "with dropout, the value depends on chance: call network.eval() before the first window",
        told="that of eval()", shown="training",
    )  # fmt: skip
    right = simulated(case)[rank]
    yield Claim(call, seen["value"], right, FOLLOW, partial(likely, case, rank))
    yield Claim(
        f"{call}: the network's mode afterwards", seen["training"], case["training"],
        "put the network back into the mode in which it was: training goes on after an evaluation, and others do not train",
        told=mode(case["training"]), shown=mode(seen["training"]),
    )  # fmt: skip
    yield Claim(f"{call}: the tokens and their bytes", seen["kept"], True, "do not change them", shown="changed")


def mode(training):
    return "training" if training else "that of eval()"


def likely(case, rank):
    """What each set of faults would give: pairs (value, cause)."""
    yield simulated(case)[rank], "some digits are lost: add up in float64"
    for faults in fault_sets():
        yield simulated(case, faults)[rank], next(CAUSES[name] for name in CAUSES if name in faults)


def shared_out(case, rank, of_ranks):
    """Each window with new targets goes through the network once, on one rank, and no rank
    has most of them.
    """
    needed = sorted(inputs for inputs, is_new in windows_of(case) if is_new)
    own = [[row for row in seen["rows"] if row in needed] for seen in of_ranks]
    call, rows = described(case), sorted(row for of_rank in own for row in of_rank)
    yield Claim(
        f"{call}: windows without a target", [] in of_ranks[rank]["rows"], False,
        "an empty window went through the network: the last one begins before the last token", told="none", shown="one",
    )  # fmt: skip
    yield Claim(
        f"{call}: windows with new targets, of all ranks together", rows, needed,
        "each window goes through the network once, on one rank",
        told=f"{len(needed)}, each once", shown=f"{len(rows)}, {len(set(map(tuple, rows)))} of them different",
    )  # fmt: skip
    share = -(-len(list(windows_of(case))) // len(of_ranks)) + 1  # shares may count windows without new targets
    yield Claim(
        f"{call}: windows on this rank", len(own[rank]), range(share + 1),
        "the ranks share the windows: none of them should have most of the work", told=f"at most {share}",
    )  # fmt: skip


@question(
    "Write down a text of nine tokens, with context 4 and stride 2. Which targets has each window, which of them had an "
    "earlier window, and how many bytes do the targets have? Then divide the windows among two ranks.",
    "Three places. The overlap is scored once too often. The bytes must be those of the tokens whose bits are added. And a "
    "mean of two quotients is not the quotient of two sums.",
    "new = context - stride if start > 0 else 0, and then nats += losses[new:].sum(), size += sizes[targets[new:]].sum(). "
    "After the loop: totals = torch.stack([nats, size.double()]); dist.all_reduce(totals), and divide its two numbers.",
)
def check_bits_per_byte(answer, draw):
    """The value is that of one process on all ranks, and each window is evaluated once;
    windows overlap or do not, and there may be fewer windows than ranks.
    """
    for n in (2, 3):
        context = draw.randrange(6, 10)
        strides = [draw.randrange(3, context - 1), context, 1]
        cases = [a_case(draw, n, context, stride) for stride in strides]
        cases.append(cases[0] | {"length": strides[0]})  # one window: the other ranks have none
        cases[1]["training"] = False
        of_ranks = answer.on_ranks(evaluated, cases, nproc=n, timeout=8)
        for claimed in (claims, shared_out):
            for place, case in enumerate(cases):
                on_every_rank(partial(claimed, case), [seen[place] for seen in of_ranks])


def a_case(draw, n, context, stride):
    """Whole windows, and one at the end with a single new target."""
    length = stride * (2 * n + 1) + context - stride + 2
    case = {"ranks": n, "length": length, "context": context, "stride": stride}
    return case | {"seed": draw.randrange(10**6), "training": True}
