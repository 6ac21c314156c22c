"""Which parameters may train."""

import torch
from torch import nn

from ddp_course.checks.claims import Claim, OneOf, hold
from ddp_course.checks.predictions import numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


class Packed(nn.Module):
    """A linear layer with integer weights, as in bitsandbytes, and adapters beside it."""

    def __init__(self, packed, adapters):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(18, 1, dtype=packed), requires_grad=False)
        self.A, self.B = (nn.Parameter(torch.randn(size, dtype=adapters)) for size in [(2, 6), (6, 2)])
        self.register_buffer("scales", torch.ones(5))  # no parameter


class Adapted(nn.Module):
    """A network with adapters, a head that is tied to the embedding, names inside other
    names, and a frozen part.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Packed(*dtypes),
                    "norm": nn.LayerNorm(6),
                    "overhead": nn.Linear(6, 3),
                    "heads": nn.Linear(6, 2),
                    "layer_norm": nn.LayerNorm(6),
                    "b": nn.Linear(2, 3),
                }
            )
            for dtypes in [(torch.uint8, torch.float32), (torch.int8, torch.bfloat16)]
        )
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight


CHOICES = {
    "the adapters": ["A", "B"],
    "the adapters and the norms": ["A", "B", "norm"],
    "the head": ["head"],
    "the embedding": ["embedding"],
    "all of attention": ["attention"],
    "nothing": [],
    "one block": ["0"],
    "all weights": ["weight"],
}


def observe_choices(train_only):
    """For each choice: which parameters train, by name, and what was returned."""
    seen = []
    for parts in CHOICES.values():
        torch.manual_seed(0)
        network = Adapted()
        before = {id(value) for value in network.parameters()}
        state = {name: value.clone() for name, value in network.state_dict().items()}
        given = list(parts)
        with trying(f"parts {parts}"):
            counts = train_only(network, given)
        names = [name for name, value in network.named_parameters(remove_duplicate=False) if value.requires_grad]
        same = {id(value) for value in network.parameters()} == before
        untouched = given == parts and all(
            torch.equal(value, state[name]) for name, value in network.state_dict().items()
        )
        of_choice = {"names": names, "same": same, "counts": numbers(counts, 2)}
        seen.append(of_choice | {"untouched": untouched})
    return seen


@question(
    "Go through the names. name.split('.') gives the words between the dots: a parameter trains if one of them is in "
    "parts. All others must be frozen, even if they were trainable before.",
    "A tied parameter has two names, but named_parameters() returns only one of them; "
    "named_parameters(remove_duplicate=False) returns both. Collect the id() of all chosen parameters. Integers "
    "cannot have a gradient: check value.is_floating_point().",
    "chosen = "
    "{id(value) for name, value in model.named_parameters(remove_duplicate=False) "
    "if set(name.split('.')) & set(parts) and value.is_floating_point()}; "
    "then value.requires_grad_(id(value) in chosen) for each of model.parameters(), which returns each parameter "
    "once, as you need for both sums.",
)
def check_train_only(answer, draw):
    """Only the chosen parameters may train, by whole words, also tied ones, never
    integers; each counts once.
    """
    [seen] = answer.on_ranks(observe_choices)
    for (words, parts), of_choice in zip(CHOICES.items(), seen):
        hold(claims(f"{words}: train_only(network, {parts})", parts, of_choice))


# ---- what is claimed ----

TIED = {"embedding.weight", "head.weight"}
WHOLE_WORDS = (
    "compare whole words: 'head' matches neither 'overhead' nor 'heads', and 'A' matches no other word; split at dots"
)


def claims(call, parts, seen):
    yield Claim(call, seen["untouched"], True, "set requires_grad, and leave the numbers and the list of parts as they are",
                told="weights and parts as before", shown="changed")  # fmt: skip
    yield Claim(call, seen["same"], True, "freeze the model's own parameters instead of replacing them with new ones",
                told="the same parameters", shown="others")  # fmt: skip
    named = dict(Adapted().named_parameters(remove_duplicate=False))
    words = {name for name in named if set(parts) & set(name.split("."))}
    words |= TIED if words & TIED else set()
    chosen = [name for name, value in named.items() if name in words and value.is_floating_point()]
    for name in seen["names"]:
        part_of_it = any(part in name for part in parts)
        yield Claim(call, name in chosen, True,
                    WHOLE_WORDS if part_of_it else "a parameter that is not chosen must be frozen: requires_grad_(False)",
                    told=f"{name} frozen", shown="it trains")  # fmt: skip
    for name in sorted(chosen, key=TIED.__contains__):
        yield Claim(call, name in seen["names"], True, cause_of_frozen(name, named[name]),
                    told=f"{name} trains", shown="it is frozen")  # fmt: skip
    yield from counted(call, seen["counts"], named, words, chosen)


def cause_of_frozen(name, value):
    if name in TIED:
        return (
            "the head's weight is the embedding's, and one of its two names is chosen: named_parameters() returns it under "
            "the first name only; with remove_duplicate=False it comes twice, and the second name must not undo the first"
        )
    if name.startswith("norm."):
        return "the norm at the end was frozen before, but is chosen now: requires_grad_(True)"
    if value.dtype is torch.bfloat16:
        return "a parameter in bf16 can train as well: only integers cannot, so check value.is_floating_point()"
    return (
        "one of the words between the dots of its name is chosen, so it must train: any of the words, and even if it "
        "was frozen before"
    )


def counted(call, returned, named, words, chosen):
    """Claims about the two numbers. words: the names that were chosen, integers among them."""
    twice, trained_twice = size(named, named), size(named, chosen)
    total, trained = (number - size(named, {"head.weight"} & set(names))
                      for number, names in [(twice, named), (trained_twice, chosen)])  # fmt: skip
    packed = [name for name, value in named.items() if not value.is_floating_point()]
    yield Claim(
        call, returned, [float(trained), float(total)],
        "return two integers: how many numbers train, and how many there are in total; numel() counts them", [
            (OneOf([[float(first), float(second)] for first in {trained, trained_twice} for second in {total, twice}]),
             "the tied weight is one parameter with two names: count it once"),
            ([float(len(chosen)), len(named) - 1.0], "you counted tensors: count their elements with numel()"),
            ([float(total), float(trained)], "the two are swapped: first the number that trains, then all"),
            ([float(trained), float(total - trained)], "the second number is that of all parameters, and not of the frozen"),
            ([float(trained + size(named, words & set(packed))), float(total)],
             "what is packed into integers never trains: do not count it with what does, even if its name is chosen"),
            ([float(trained), float(total - size(named, packed))],
             "what is packed into integers does not train, but the number of all has it, too"),
        ], told=(trained, total),
    )  # fmt: skip


def size(named, names):
    return sum(named[name].numel() for name in names)
