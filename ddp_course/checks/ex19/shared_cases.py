"""What question 5 tries an answer on, and what training on it gives: in one process, or on
ranks that make mistakes.
"""

from collections import namedtuple
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.ex19.batch_targets import IGNORED
from ddp_course.checks.training import fill, state
from ddp_course.models.modern import rotated

VOCABULARY, WIDTH = 40, 8
LAYERS = ["embedding", "query", "key", "value", "output"]
CHOICES = {
    "mask": ("", "text order", "local", "local both", "local keys", "none", "later", "own"),
    "rotation": ("", "local", "queries", "keys", "text order", "none"),
    "gather": ("", "own", "mean", "large"),
    "share": ("", "equal", "means", "small", "large", "sum"),
    "step": ("", "own"),
}
Faults = namedtuple("Faults", CHOICES, defaults=[""] * len(CHOICES))


def draw_case(draw, n, steps):
    """A text whose ranks have different numbers of tokens that count, 1 or more each."""
    tokens = 2 * n * draw.randint(3, 5)
    case = {"n": n, "steps": steps, "tokens": tokens, "seed": draw.randrange(10**6)}
    case |= {"learning_rate": draw.choice([0.2, 0.3])}
    while True:
        case["hidden"] = [place for place in range(tokens - 1) if draw.random() < 0.4] + [tokens - 1]
        numbers = [int(number) for number in counted(case)]
        if min(numbers) and len(set(numbers)) > 1:
            return case


def described(case):
    steps = "1 step" if case["steps"] == 1 else f"{case['steps']} steps"
    return f"train_shared on {case['n']} ranks, a text of {case['tokens']} tokens, {steps}"


def network_of(case):
    network = nn.Module()
    network.embedding = nn.Embedding(VOCABULARY, WIDTH)
    for name in LAYERS[1:]:
        setattr(network, name, nn.Linear(WIDTH, VOCABULARY if name == "output" else WIDTH, bias=False))
    fill(network, case["seed"])
    with torch.no_grad():
        for name in LAYERS[1:]:
            getattr(network, name).weight.mul_(0.5)
    return network


def text_of(case):
    """No token is there twice, so a token tells its place."""
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    text = torch.randperm(VOCABULARY, generator=generator)[: case["tokens"]]
    targets = text.roll(-1)
    targets[case["hidden"]] = IGNORED
    return text, targets


def places_of(case):
    """[int64 (tokens of a rank,)] by rank."""
    pieces = torch.arange(case["tokens"]).chunk(2 * case["n"])
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(case["n"])]


def counted(case):
    """How many targets of each rank count: a list of tensors ()."""
    return [(text_of(case)[1][places] != IGNORED).sum() for places in places_of(case)]


def combinations(*names):
    """Faults of some kinds, those with the fewest first."""
    found = [Faults(**dict(zip(names, each))) for each in product(*(CHOICES[name] for name in names))]
    return sorted((faults for faults in found if any(faults)), key=lambda faults: sum(map(bool, faults)))


def sums_of(case, networks, faults=Faults()):
    """Of each rank, the sum of its losses. networks: those of the ranks, which are alike."""
    text, targets = text_of(case)
    everywhere = places_of(case)
    own = torch.arange(len(everywhere[0]))
    xs = [network.embedding(text[places])[None, None] for network, places in zip(networks, everywhere)]
    of_query, of_key = (
        [own if faults.rotation in ("local", kind) else places for places in everywhere] for kind in ("queries", "keys")
    )
    if faults.rotation == "text order":  # rotated after they were gathered
        of_key = torch.arange(case["tokens"]).chunk(case["n"])
    if faults.rotation == "none":
        of_query = of_key = [0 * own] * case["n"]
    queries = [rotated(network.query(x), places) for network, x, places in zip(networks, xs, of_query)]
    keys = [rotated(network.key(x), places) for network, x, places in zip(networks, xs, of_key)]
    values = [network.value(x) for network, x in zip(networks, xs)]
    found = []
    for rank, (x, query, places) in enumerate(zip(xs, queries, everywhere)):
        key, value = (torch.cat(gathered(parts, rank, faults.gather), 2) for parts in (keys, values))
        allowed = allowed_of(faults.mask, rank, everywhere)
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        logits = networks[rank].output(x)[0, 0]
        found.append(F.cross_entropy(logits, targets[places], reduction="sum", ignore_index=IGNORED))
    return found


def gathered(parts, rank, fault):
    """The parts of all ranks, whose gradients come back as the fault says."""
    n = len(parts)
    if fault == "own":
        return [part if other == rank else part.detach() for other, part in enumerate(parts)]
    by = {"": 1.0, "mean": 1 / n, "large": float(n)}[fault]
    return [part.detach() + by * (part - part.detach()) for part in parts]


def allowed_of(fault, rank, everywhere):
    """Which of the gathered keys the queries of a rank see: bool (queries, keys)."""
    places, keys = everywhere[rank], torch.cat(everywhere)
    own, repeated = torch.arange(len(places)), torch.arange(len(places)).repeat(len(everywhere))
    in_text, here = torch.arange(len(keys)), torch.isin(keys, places)
    queries, keys = {
        "text order": (places, in_text), "local": (own, in_text), "local both": (own, repeated),
        "local keys": (places, repeated),
    }.get(fault, (places, keys))  # fmt: skip
    allowed = queries[:, None] <= keys if fault == "later" else queries[:, None] >= keys
    return allowed | (fault == "none") if fault != "own" else allowed & here


def parts_of(case, sums, fault=""):
    """What each rank adds to the loss of the whole text."""
    n, numbers = case["n"], counted(case)
    number = sum(numbers)
    by = {
        "equal": numbers, "means": [n * one for one in numbers], "small": [n * number] * n,
        "large": [number / n] * n, "sum": [1] * n,
    }.get(fault, [number] * n)  # fmt: skip
    return [one / divisor for one, divisor in zip(sums, by)]


def trained(case, rank=0, faults=Faults(), accumulate=False):
    """The losses of all steps, floats, and the parameters of a rank after them. faults:
    of the gradients; those of the ranks' own steps only for one step.
    """
    networks, losses = [network_of(case) for _ in range(case["n"])], []
    parameters = [list(network.parameters()) for network in networks]
    total = [0.0] * len(parameters[0])
    for _ in range(case["steps"]):
        parts = parts_of(case, sums_of(case, networks, faults), faults.share)
        losses.append(sum(part.item() for part in parts))
        sum(parts).backward()
        with torch.no_grad():
            for place, of_ranks in enumerate(zip(*parameters)):
                own = [parameter.grad for parameter in of_ranks]
                total[place] = total[place] * accumulate + (own[rank] if faults.step else sum(own))
                for parameter in of_ranks:
                    parameter -= case["learning_rate"] * total[place]
                    parameter.grad = None
    return {"losses": losses, "state": state(networks[rank])}
