"""What question 4 claims of a block on a rank."""

from functools import partial

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex17.block_simulated import CAUSES, simulated
from ddp_course.checks.ex17.meshes import in_words
from ddp_course.checks.training import fill
from ddp_course.models.gpt import Block

SIZE = 8  # bytes of a number in float64
FORWARD, BACKWARD = ("cut", "scale", "bias"), ("enter", "leave", "enter attention", "enter mlp")
HEADS = 12


def whole_block(case):
    return fill(Block(case["width"], HEADS, 0.0), case["seed"])


def inputs(case, number):
    """x and the gradient of the block's output, for a group."""
    generator = torch.Generator().manual_seed(case["seed"] + 1 + number)
    shape = 2, case["tokens"], case["width"]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def described(case):
    return f"{in_words(case['groups'])}, a block of width {case['width']} with {HEADS} heads, {case['tokens']} tokens"


def claims(case, rank, of_ranks):
    seen, words, block = of_ranks[rank], described(case), whole_block(case)
    [(number, ranks)] = [(i, ranks) for i, ranks in enumerate(case["groups"]) if rank in ranks]
    n, place, given = len(ranks), ranks.index(rank), inputs(case, number)
    tried = partial(simulated, block, *given, n, place)
    right = tried(())
    mistakes = lambda name, faults: [(tried(some)[name], CAUSES[some[0]]) for some in faults]  # noqa: E731
    yield Claim(
        f"{words}: y", seen["y"], right["y"],
        "the output is not that of one process: compare each line with Attention and MLP of ddp_course/models/gpt.py"
        + (", and use rank and size of the given group, and group=group" if len(case["groups"]) > 1 else ""),
        partial(mistakes, "y", subsets(FORWARD)),
    )  # fmt: skip
    yield Claim(f"{words}: the input x", seen["changed"], False, "the block must not change its input", shown="changed")
    names = sorted(name for name in right if name not in "xy")
    yield Claim(
        f"{words}: the names of the parameters", sorted(seen["gradients"]), names,
        "keep the names of the layers, and keep weights and biases as nn.Parameter",
    )  # fmt: skip
    for name in sorted([*names, "x"], key=from_behind):
        got = seen["x"] if name == "x" else seen["gradients"][name]
        own = right[name]
        more = [(None, "each rank has this parameter, uses it, and needs its gradient: otherwise the replicas drift apart"),
                (n * own, "this is n times the gradient: it was added up once too often"),
                (own / n, CAUSES["divided bias" if name.endswith(("output.bias", "contract.bias")) else "divided"]),
                (0 * own, "this gradient is lost")]  # fmt: skip
        yield Claim(
            f"{words}: the gradient of {name}", got, own,
            f"does each rank hold the {n} parts in the order of the ranks, and does each gradient pass each line once?",
            lambda name=name, more=more: mistakes(name, subsets(BACKWARD)) + more, scale=1e-3,
        )  # fmt: skip
    once = ["allreduce", given[0].numel() * SIZE]
    for phase in ("forward", "backward"):
        got = seen[phase]
        yield Claim(
            f"{words}: collectives in {phase}", got, [once, once],
            "two all-reduces are needed, one in attention and one in the MLP, each of a tensor like x",
            told=f"two all-reduces of {once[1]} bytes", shown=", ".join(f"{name} of {size}" for name, size in got) or "none",
        )  # fmt: skip


def from_behind(name):
    """The order in which backward comes to the gradients."""
    order = ["contract", "expand", "norm2", "output", "query_key_value", "norm1", "x"]
    return order.index(name.split(".")[0]), name


def subsets(faults):
    """Those of one fault first."""
    some = [[]]
    for fault in faults:
        some += [[*one, fault] for one in some]
    return sorted((tuple(one) for one in some if one), key=len)
