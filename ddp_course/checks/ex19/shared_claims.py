"""What question 5 claims of a rank that has trained on a shared text."""

import torch

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex19.shared_cases import (
    LAYERS,
    WIDTH,
    Faults,
    combinations,
    described,
    network_of,
    parts_of,
    places_of,
    sums_of,
    text_of,
    trained,
)
from ddp_course.checks.recording import waited

LOCAL = "a mask needs the places in the text of its queries and of its keys: here it takes"
CAUSES = {
    "text order": "the mask takes the gathered keys to be in the order of the text. They are in the order of the "
    "ranks, each of which has an early and a late piece: so some queries see later tokens, and miss earlier ones",
    "local": f"{LOCAL} the numbers of the queries among this rank's own tokens, and the keys in the order of the text",
    "local both": f"{LOCAL} numbers among the tokens of a rank, for queries and keys",
    "local keys": f"{LOCAL} numbers among the tokens of a rank for the keys",
    "none": "all queries see all keys: later tokens of the text have to be hidden",
    "later": "each query sees the tokens from its own place on: those up to its place are meant",
    "own": "the queries see the keys of their own rank only: they need those of all ranks",
}  # fmt: skip
ROTATIONS = {
    "local": "queries and keys are rotated by their numbers among this rank's own tokens. Two tokens then seem to "
    "have another distance than in the text: rotate by their places in the text",
    "queries": "the queries are rotated by their numbers among this rank's own tokens, and the keys by their places "
    "in the text: the queries need their places, too",
    "keys": "the keys are rotated by their numbers among their rank's own tokens, and the queries by their places in "
    "the text: the keys need their places, too",
    "text order": "the gathered keys are rotated as if they were in the order of the text: they are in the order of "
    "the ranks",
    "none": "queries and keys are not rotated, so the places of tokens play no part",
}  # fmt: skip
GATHERS = {
    "own": "a rank's keys and values get the gradients of its own queries only. The queries of other ranks have seen "
    "them, too: the backward of a gather adds up what all ranks have for a part",
    "mean": "the gradients of keys and values are averaged over the ranks: the losses of the ranks are parts of a "
    "sum, so these gradients are added up",
    "large": "the gradients of keys and values are too large by the number of ranks: are they added up twice, or "
    "multiplied?",
}
SHARES = {
    "equal": "each rank divides the sum of its losses by its own number of tokens that count: the loss of the text "
    "is the sum of all losses, divided by the number in the whole text",
    "means": "this is a mean of the ranks' means. The ranks have different numbers of tokens that count: divide the "
    "sum of all losses by the number in the whole text",
    "small": "the ranks' parts are already divided by the number of the whole text, so they are added up: here they "
    "are divided by the number of ranks as well",
    "large": "this is too large by the number of ranks: the ranks' parts are divided by the number of tokens that "
    "count in the whole text, and then added up once",
    "sum": "this is a sum over tokens: divide it by the number of tokens that count in the whole text",
}
OWN_STEP = (
    "this rank has taken a step with its own gradient of the parameters: they have to be added up over the ranks, "
    "each once"
)
PART = "this is this rank's part of the loss: the loss of the step is the sum over all ranks"
PART_OF_RANK = "this is the mean over this rank's own tokens that count: all tokens of the text that count are meant"
LATER = (
    "a step has the loss of its own forward, before the parameters change; the gradients of a step are removed "
    "before the next"
)
ADDED_UP = "gradients of earlier steps are still in parameter.grad: remove them before each backward"
FORWARD = (
    "the loss of the first step is the mean cross-entropy over all tokens of the text that count. Each query sees "
    "all keys up to its own place in the text. Compare the attention with that of one process, token by token"
)
GRADIENT = (
    "the loss of the first step is right, but not what the step does to this weight. Go backward: through the "
    "attention, the gather, and the sum over the ranks"
)
IN_32_BITS = (
    "this is right to about 7 digits: somewhere something is computed in 32 bits. (In torch, a quotient of two tensors of "
    "whole numbers is float32.)"
)
GATHERED_GRADIENTS = (
    "the gradients of all keys and values were gathered from all ranks. A rank needs their sum over the ranks, for its own "
    "part: a sum, not a gather of all gradients"
)
ONCE = "each rank calls each layer once per step, for its own tokens only, and together they compute the text once"
ZIGZAG = (
    "a rank has an early and a late piece, pieces[rank] and pieces[-1 - rank], so that all ranks have the same work"
)


def claims(case, rank, of_ranks):
    call, mine, right = described(case), of_ranks[rank], trained(case)
    yield waited(call, mine)
    got = as_floats(mine["losses"])
    yield Claim(
        f"{call}: what it returns", isinstance(got, list) and len(got) == case["steps"], True,
        "return a list with the loss of each step", told=f"a list, of length {case['steps']}", shown=mine["losses"],
    )  # fmt: skip
    yield Claim(
        f"{call}: the loss of the first step", got[0], right["losses"][0],
        in_32_bits(got[0], right["losses"][0]) or FORWARD, lambda: first_losses(case, rank), mistake_digits=8,
    )  # fmt: skip
    one = case["steps"] == 1
    for name, value in right["state"].items():
        yield Claim(
            f"{call}: {name} of the network", mine["state"][name], value,
            in_32_bits(mine["state"][name], value) or (GRADIENT if one else LATER),
            lambda name=name: of_weights(case, rank, name),
        )  # fmt: skip
    yield Claim(f"{call}: the losses", got, right["losses"], in_32_bits(got, right["losses"]) or LATER)
    yield from computed(case, rank, call, mine)
    yield traffic(case, call, mine, right["state"])


def in_32_bits(got, expected):
    """The cause of a small error, None for a large one."""
    return IN_32_BITS if agree(got, expected, 6) else None


def as_floats(losses):
    """Plain numbers, if these are some: tensors of one number do as well."""
    if isinstance(losses, torch.Tensor) and losses.dim() == 1 or isinstance(losses, tuple):
        losses = list(losses)
    if not isinstance(losses, list):
        return losses
    return [one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one for one in losses]


@torch.no_grad()
def first_losses(case, rank):
    """The first loss with each combination of faults of the forward pass, and why."""
    networks = [network_of(case)] * case["n"]
    found = [Faults(), *combinations("mask", "rotation")]
    for number, faults in enumerate(found):
        sums = sums_of(case, networks, faults)
        parts, means = parts_of(case, sums), parts_of(case, sums, "equal")
        cause = number and (CAUSES.get(faults.mask) or ROTATIONS[faults.rotation])
        if number:
            yield sum(parts).item(), cause
        for share, why in SHARES.items():
            yield sum(parts_of(case, sums, share)).item(), cause or why
        yield parts[rank].item(), cause or PART
        yield means[rank].item(), cause or PART_OF_RANK


def of_weights(case, rank, name):
    if case["steps"] > 1:
        yield trained(case, accumulate=True)["state"][name], ADDED_UP
        return
    for faults in combinations("gather", "share", "step"):
        cause = GATHERS.get(faults.gather) or SHARES.get(faults.share) or OWN_STEP
        yield trained(case, rank, faults)["state"][name], cause


def computed(case, rank, call, mine):
    """That a rank computes its own tokens."""
    text, places = text_of(case)[0], places_of(case)
    own, steps = text[places[rank]], case["steps"]
    counts = mine["counted"] | {"embedding": [len(tokens) for tokens in mine["tokens"]]}
    for name in LAYERS:
        yield Claim(
            f"{call}: tokens in each call of {name}", counts[name], [len(own)] * steps, ONCE,
            told=f"{len(own)}, in {steps} calls" if steps > 1 else f"{len(own)}, in one call",
        )  # fmt: skip
    of_token = {token: place for place, token in enumerate(text.tolist())}
    yield Claim(
        f"{call}: the places of the tokens that a rank computes",
        [sorted(of_token.get(token, -1) for token in tokens) for tokens in mine["tokens"]],
        [sorted(places[rank].tolist())] * steps, ZIGZAG,
    )  # fmt: skip


def traffic(case, call, mine, parameters):
    """A gather's backward may be an all-reduce, which sends more than it has to; a
    reduce-scatter leaves no room for anything else.
    """
    gathers, numbers = 2 * 8 * case["tokens"] * WIDTH, 256  # such as a place per token
    weights = sum(value.nbytes for value in parameters.values())
    sent, scattered = mine["bytes"], any("reduce_scatter" in name for name in mine["sent"])
    back = gathers // case["n"] if scattered else gathers
    most = case["steps"] * (gathers + back + weights + numbers)
    all_gradients = case["steps"] * ((1 + case["n"]) * gathers + weights)
    return Claim(
        f"{call}: bytes that a rank sends or receives", sent, Between(0, most),
        "in a step keys and values are gathered, their gradients come back, and the gradients of the parameters are "
        "added up, each once: nothing else needs to travel",
        [] if scattered else [(Between(all_gradients, all_gradients + case["steps"] * numbers), GATHERED_GRADIENTS)],
        told=f"at most {most:,}", shown=f"{sent:,}",
    )  # fmt: skip
