"""What question 5 claims of networks that ranks have pretrained, and of what they used for it."""

import math

import torch
from torch.nn import functional as F

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.models.gpt import GPT

CONTEXT, WIDTH = 32, 64
LIMIT, OURS = 4.0, 3.3  # bits per byte; ours has 3.25 to 3.4, depending on what is drawn
FREQUENCIES = 4.3  # bits per byte; a little less than for the one who knows only how often each byte occurs
DIGITS = 4  # to which the ranks' weights agree

# ---- the data ----


def data_claims(case, text, rank, of_ranks):
    """Rows are windows of the text, within the budget, and divided among the ranks."""
    seen, n, windows = of_ranks[rank], case["n"], case["windows"]
    yield Claim("the tokens after pretrain", seen["kept"], True, "do not change the text", shown="changed")
    counts = [len(rows_of(of_rank)) for of_rank in of_ranks]
    yield Claim(
        "windows that went through the network with gradients, of all ranks", sum(counts), Between(1), "nothing was "
        "trained: no batch went through the network while gradients were on", told="some", shown="none",
    )  # fmt: skip
    yield Claim(
        "windows that went through the network with gradients, of all ranks", sum(counts), Between(1, windows),
        over_budget(counts, windows), told=f"at most {windows}",
    )  # fmt: skip
    longest = max((len(row) // 2 for row in rows_of(seen)), default=0)
    yield Claim(
        "the longest row of tokens", longest, Between(0, CONTEXT), f"a window has {CONTEXT} tokens",
        told=f"at most {CONTEXT} tokens", shown=f"{longest} tokens",
    )  # fmt: skip
    foreign = [row for row in rows_of(seen)[::16] if bytes.fromhex(row) not in text]
    yield Claim(
        "a row of tokens that went through the network", bytes.fromhex(foreign[0]) if foreign else True, True,
        "it is not a piece of the text that the answer was given: train on tokens as they follow one another there, and on "
        "nothing else",
        told="a piece of the text",
    )  # fmt: skip
    yield Claim(
        "windows with gradients on each rank", min(counts) > 0.9 * sum(counts) / n, True, uneven(counts),
        told=f"about {sum(counts) // n} on each", shown=" and ".join(map(str, counts)),
    )  # fmt: skip
    own, others = set(rows_of(seen)), [set(rows_of(other)) for r, other in enumerate(of_ranks) if r != rank]
    shared = len(own & set.union(*others)) / len(own)
    yield Claim(
        "the part of this rank's windows that another rank has trained on, too", shared, Between(0, 0.5),
        "the ranks train on the same windows, so a part of the budget teaches nothing new: divide the windows, for example "
        "mine = places[rank:windows:ranks] from a shuffle with the same seed on all ranks",
        told="hardly any", shown=f"{shared:.0%}",
    )  # fmt: skip


def rows_of(seen):
    return [row for batch in seen["batches"] for row in batch]


def over_budget(counts, windows):
    if all(count >= 0.9 * windows for count in counts):
        return (
            "each rank has used the whole budget: `windows` is the number for all ranks together, so divide it by their "
            "number"
        )
    return (
        "the budget counts each row that goes through the network while gradients are on: count updates * rows on all "
        "ranks. An evaluation is free under torch.no_grad()"
    )


def uneven(counts):
    if min(counts) == 0:
        return "one rank has trained alone: the ranks share the windows, and average their gradients"
    return "one rank has more windows than another: all ranks take equally many in each update"


# ---- the weights ----


def weight_claims(starts, rank, of_ranks):
    """The network is whole, and the same on all ranks."""
    seen, first = of_ranks[rank]["weights"], of_ranks[0]["weights"]
    yield Claim(
        "torch.is_grad_enabled() after pretrain", of_ranks[rank]["gradients"], True,
        "gradients are off for the rest of the program: use with torch.no_grad(), which switches them on again",
    )  # fmt: skip
    yield Claim(
        "the names, shapes and types of the network's state_dict after pretrain", forms(seen), forms(starts[rank]),
        "leave the network in the form that it came in: the caller saves it and loads it elsewhere. Wrap it in a variable "
        "of your own, and train it in float32",
        told="as before", shown="others",
    )  # fmt: skip
    yield Claim(
        "network.head.weight after pretrain", of_ranks[rank]["tied"], True, "the head is tied: it is the embedding's "
        "weight, and must still be", told="the embedding's weight", shown="a tensor of its own",
    )  # fmt: skip
    yield Claim(
        "parameters with requires_grad=False after pretrain", of_ranks[rank]["frozen"], [], "a frozen parameter does not "
        "learn, here and when the caller trains the network further", told="none",
    )  # fmt: skip
    finite = all(bool(value.isfinite().all()) for value in seen.values())
    yield Claim(
        "the weights after pretrain", finite, True, "training has diverged: lower the rate, warm it up, or clip gradients",
        told="finite", shown="NaN or infinite",
    )  # fmt: skip
    if same(seen, starts[rank]) or same(seen, starts[0]):
        yield Claim("the weights after pretrain", "as before", "trained", untrained(of_ranks[rank]))
    yield Claim(
        "the weights after pretrain, compared with rank 0's", same(seen, first), True, apart(starts, rank, of_ranks),
        told="the same on all ranks", shown="others",
    )  # fmt: skip


def forms(weights):
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in weights.items()]


def same(weights, others):
    return all(agree(weights[name], others[name], DIGITS) for name in others)


def vector(weights):
    return torch.cat([value.flatten() for value in weights.values()])


def untrained(seen):
    if seen["copied"]:
        return (
            "another network was trained, such as a copy: train the one that you are given, or load the result into it"
        )
    return "the weights have not changed: does the optimizer have this network's parameters, and does it step?"


def apart(starts, rank, of_ranks):
    """Ranks that add the same updates to their own starts stay as far apart as they began."""
    began = vector(starts[rank]) - vector(starts[0])
    ended = vector(of_ranks[rank]["weights"]) - vector(of_ranks[0]["weights"])
    if F.cosine_similarity(began, ended, dim=0) > 0.9:
        return (
            "each rank has drawn its own weights, and they were not made the same before training: broadcast rank 0's, or "
            "wrap the network in DistributedDataParallel, which does so"
        )
    return (
        "each rank has trained with its own gradients: every update needs their mean over the ranks. "
        "DistributedDataParallel averages them if you call the model that it returns, and not `network`"
    )


# ---- what was learnt ----


def learnt(case, of_ranks, held_out):
    """(bits per byte of the held-out text, the claims that it is the next token that costs few)."""
    value, later = (bits(of_ranks[0]["weights"], held_out, places) for places in (1, 2))
    next_best = Claim(
        "what the network predicts best, a token or the one after it", value > LIMIT + 0.1 or later > value + 0.1, True,
        ELSEWHERE, told="the next token, by far", shown=f"the next costs {value:.3f} bits, the one after it {later:.3f}",
    )  # fmt: skip
    return value, [next_best, Claim(
        f"bits per byte of a text that was held out, after {case['windows']} windows at most", value, Between(0, LIMIT),
        lambda: too_many(case, of_ranks, held_out, value),
        told=f"at most {LIMIT:.0f}; our solution reaches {OURS}", shown=f"{value:.3f}",
    )]  # fmt: skip


@torch.no_grad()
def bits(weights, held_out, places=1):
    """What a network needs per token for those so many places after each input, int64
    (pieces, length).
    """
    network = GPT(vocabulary=256, context=CONTEXT, layers=1, heads=4, width=WIDTH)
    network.load_state_dict(weights)
    rows = held_out.unfold(1, CONTEXT + 2, CONTEXT).flatten(0, 1)
    inputs, targets = rows[:, :CONTEXT], rows[:, places : CONTEXT + places]
    return network(inputs, targets.contiguous()).item() / math.log(2)


ELSEWHERE = (
    "the targets are not the next tokens: the target of a token is the one right after it in the text. `network(inputs, "
    "targets)` does not shift them, so the targets of rows[:, :-1] are rows[:, 1:]"
)


def too_many(case, of_ranks, held_out, value):
    """The likely cause, by what the network predicts, and what it has used."""
    seen = of_ranks[0]
    if bits(seen["weights"], held_out, places=0) < value - 3:  # a tied head favours its input a little from the start
        return "the network has learnt to repeat its input: the target of a token is the one right after it in the text"
    if shifted(seen):
        return ELSEWHERE
    if alone := times_apart(of_ranks):
        return (
            f"the ranks' weights were different at {alone} of {len(seen['batches'])} forward passes, so each rank "
            "trained alone, and a mean at the end does not make up for it. Begin with the same weights, and average the "
            "gradients in every update"
        )
    used, updates = sum(len(rows_of(of_rank)) for of_rank in of_ranks), len(seen["batches"])
    if used < 0.7 * case["windows"]:
        return f"only {used} of {case['windows']} windows were used"
    if value > FREQUENCIES and updates > 150:
        return (
            "it has learnt hardly anything. Is the rate too small, or so large that training diverges? AdamW wants about "
            "0.001 to 0.005 here. Are gradients set to zero after each update?"
        )
    if updates <= 150:
        return (
            f"with {len(seen['batches'][0])} windows at a time on each rank, there were only {updates} updates at most: a "
            "smaller batch makes more updates of the same windows"
        )
    return (
        "the recipe: try another rate (for AdamW 0.001 to 0.005), a short warm-up, a decay to 0, and an update after each "
        "batch, after which gradients are set to zero"
    )


def shifted(seen):
    """Whether most batches had targets that are not the next tokens, as far as they were seen."""
    pairs = [(bytes.fromhex(rows[0]), targets) for rows, targets in zip(seen["batches"], seen["targets"]) if targets]
    others = [list(row[1:]) != targets[:-1] for row, targets in pairs]
    return sum(others) > len(others) / 2


def times_apart(of_ranks):
    """How many forward passes began with other weights on another rank, if it was most of them."""
    spaces = [torch.stack(of_rank["spaces"]) for of_rank in of_ranks]
    fewest = min(map(len, spaces))
    first, *others = [rows[:fewest] for rows in spaces]
    largest = first.abs().amax(dim=1)
    apart = sum(((rows - first).abs().amax(dim=1) > 1e-3 * largest) for rows in others) > 0
    count = int(apart.sum())
    return count if count > fewest / 2 else 0
