"""Which parameters may train."""

import torch
from torch import nn

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


class Packed(nn.Module):
    """A linear layer with integer weights, as in bitsandbytes, and adapters beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(18, 1, dtype=torch.uint8), requires_grad=False)
        self.A, self.B = (nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2)))


class Adapted(nn.Module):
    """A network with adapters, a head that is tied to the embedding, names inside other
    names, and a frozen part.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"attention": Packed(), "norm": nn.LayerNorm(6), "overhead": nn.Linear(6, 3), "heads": nn.Linear(6, 2)}
            )
            for _ in range(2)
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
        of_choice = {"names": names, "same": same, "counts": counts}
        seen.append(of_choice | {"untouched": untouched})
    return seen


def truth_of(parts):
    """(names of the trained parameters, (the number that trains, the number of all))."""
    network = Adapted()
    named = list(network.named_parameters(remove_duplicate=False))
    chosen = {id(value) for name, value in named if set(parts) & set(name.split(".")) and value.is_floating_point()}
    names = [name for name, value in named if id(value) in chosen]
    trained = sum(value.numel() for value in network.parameters() if id(value) in chosen)
    return names, (trained, sum(value.numel() for value in network.parameters()))


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
        judge_choice(words, parts, of_choice)


def judge_choice(words, parts, seen):
    checked = f"{words}: train_only(network, {parts})"
    names, counts = truth_of(parts)
    got, values = (seen["names"], dict(Adapted().named_parameters(remove_duplicate=False)))
    if not seen["untouched"]:
        cause = "set requires_grad, and leave the numbers and the list of parts as they are"
        raise Wrong(checked, expected="weights and parts as before", got="changed", cause=cause)
    if not seen["same"]:
        cause = "freeze the model's own parameters instead of replacing them with new ones"
        raise Wrong(checked, expected="the same parameters", got="others", cause=cause)
    for name in got:
        if name not in names:
            cause = "a parameter that is not chosen must be frozen: requires_grad_(False)"
            if any(part in name for part in parts):
                cause = (
                    "compare whole words: 'head' matches neither 'overhead' nor 'heads', and 'A' matches no other "
                    "word; split at dots"
                )
            raise Wrong(checked, expected=f"{name} frozen", got="it trains", cause=cause)
    for name in names:
        if name not in got:
            cause = (
                "one of the words between the dots of its name is chosen, so it must train: any of the words, and "
                "even if "
            )
            cause += "it was frozen before"
            if name in ("embedding.weight", "head.weight"):
                cause = (
                    "the head's weight is the embedding's, and one of its two names is chosen: named_parameters() "
                    "returns it under the first name only; with remove_duplicate=False it comes twice, and the "
                    "second name must not undo the first"
                )
            elif name.startswith("norm."):
                cause = "the norm at the end was frozen before, but is chosen now: requires_grad_(True)"
            raise Wrong(checked, expected=f"{name} trains", got="it is frozen", cause=cause)
    returned = seen["counts"]
    if not (isinstance(returned, list) and len(returned) == 2 and tuple(returned) == counts):
        cause = "return two integers: how many numbers train, and how many there are in total; numel() counts them"
        if isinstance(returned, list) and len(returned) == 2:
            twice = sum(value.numel() for value in values.values())
            trained_twice = sum(values[name].numel() for name in names)
            if returned[1] == twice or returned[0] == trained_twice != counts[0]:
                cause = "the tied weight is one parameter with two names: count it once"
            elif tuple(returned) == (len(names), len(list(Adapted().parameters()))):
                cause = "you counted tensors: count their elements with numel()"
            elif tuple(returned) == counts[::-1]:
                cause = "the two are swapped: first the number that trains, then all"
        raise Wrong(checked, expected=counts, got=returned, cause=cause)
