"""Groups of parameters for weight decay."""

import torch
from torch import nn

from ddp_course.checks.claims import Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.models.gpt import GPT


class Odd(nn.Module):
    """A network with parts of real ones: a convolution, a frozen matrix, a scale of one
    number, a tied head.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.convolution = nn.Conv1d(6, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight


class Table(nn.Embedding):
    """An embedding of one's own."""


class Untied(nn.Module):
    """A network whose names mislead: a table that is an embedding, and a projection of
    embeddings that is a Linear; two other layers share their weight. Table and heads have
    equal values.
    """

    def __init__(self):
        super().__init__()
        self.words = Table(7, 4)
        self.embedding_projection = nn.Linear(4, 6)
        self.frozen_embedding = nn.Embedding(3, 6).requires_grad_(False)
        self.head = nn.Linear(4, 7)  # its weight has the table's shape
        self.other_head = nn.Linear(4, 7)
        self.other_head.weight = self.head.weight
        for value in (self.words.weight, self.head.weight):
            nn.init.zeros_(value)


class Deep(nn.Module):
    """A network with an embedding deep inside, a tied head that comes before it, and a
    layer with one output.
    """

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.body = nn.Sequential(nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4)), nn.Linear(4, 4))
        self.score = nn.Linear(4, 1)
        self.head.weight = self.body[0][0].weight


UNDECAYED = "a Linear without bias, and no decay"
NETWORKS = {
    "a GPT": lambda: GPT(vocabulary=11, context=4, layers=2, heads=2, width=6),
    "a network with a convolution, a frozen layer, a scale and a tied head": Odd,
    "a network whose head is not tied, with a subclass of nn.Embedding": Untied,
    "a network whose embedding is deep inside, after its tied head": Deep,
    "a Linear without bias": lambda: nn.Linear(3, 2, bias=False),
    UNDECAYED: lambda: nn.Linear(3, 2, bias=False),
}


STRANGER = "another tensor"


def decay_for(words, decay):
    return 0.0 if words == UNDECAYED else decay


def groups_of(parameter_groups, decay):
    """For each network: which parameters are in which group, by name, and whether AdamW
    takes the groups and steps.
    """
    seen = []
    for words, make in NETWORKS.items():
        torch.manual_seed(0)
        network = make()
        names = {id(value): name for name, value in network.named_parameters()}
        with trying(words):
            groups = list(parameter_groups(network, decay_for(words, decay)))
            found = []
            for group in groups:
                parameters = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
                decays = group.get("weight_decay")
                decays = decays if decays is None else float(decays)
                found += [[names.get(id(one), STRANGER), decays] for one in parameters]
            torch.optim.AdamW([{**group, "params": list(group["params"])} for group in groups], lr=1e-3)
        seen.append(found)
    return seen


# ---- what is claimed ----


def wanted(network, decay):
    """Of each parameter, its name, its weight decay in each group in which it belongs, and
    the cause if an answer gives it others.
    """
    tables = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    yield STRANGER, [], "put the parameters themselves into the groups, not copies of them"
    for name, value in network.named_parameters():
        if not value.requires_grad:
            yield name, [], "a frozen parameter has no gradient, so leave it out of the optimizer: check requires_grad"
        elif value.dim() < 2:
            level = "a bias, a norm's factor or a single number sets a level, so it must not be pulled towards 0"
            yield name, [0.0], level
        elif id(value) in tables:
            table = (
                "this is the weight of an nn.Embedding, so it must not decay, also if the head uses it, too, and "
                "whatever its name is: look for the module"
            )
            yield name, [0.0], table
        elif "embedding" in name:
            linear = "this is the weight of a Linear, so it must decay: look at the module, not at its name"
            yield name, [decay], linear
        else:
            matrix = (
                "a weight with two or more dimensions must be decayed, for example that of a Linear or a convolution"
            )
            yield name, [decay], matrix


def claims(checked, network, decay, found):
    """found: [name, its weight decay] of each parameter in each group."""
    parameters = list(wanted(network, decay))
    decays_of = {name: [decays for other, decays in found if other == name] for name, _, _ in parameters}
    of_matrices = [decays_of[name] for name, expected, _ in parameters if expected == [decay]]
    for name, expected, cause in parameters:
        got = decays_of[name]
        if expected and len(got) > 1:
            cause = "if a parameter is in two groups, or twice in one, AdamW refuses it or updates it twice"
        mistakes = [
            ([], "this parameter is in no group, so it would never be trained"),
            ([None], "the group has no 'weight_decay', so it gets AdamW's default of 0.01: set 0.0"),
        ]
        if expected == [decay] and (got != [0.0] or decay == 0) and of_matrices == [got] * len(of_matrices):
            mistakes += [(got, "the matrices have a weight decay, but not the one that the function was given")]
        told, shown = (f"{name}: {in_words(decays)}" for decays in (expected, got))
        yield Claim(checked, got, expected, cause, mistakes, digits=12, told=told, shown=shown)


def in_words(decays):
    return f"weight_decay {', '.join(map(str, decays[:4]))}" if decays else "in no group"


@question(
    "The number of dimensions, parameter.dim(), distinguishes a matrix from a vector. An embedding has two dimensions as "
    "well: what it is, its module tells, and not its shape or its name.",
    "model.modules() gives all parts, however deep: collect id(part.weight) of those that are nn.Embedding. Then go "
    "through model.parameters(), which gives a tied parameter once, and leave out those with requires_grad=False.",
    "tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}; trained = [p for p in "
    "model.parameters() if p.requires_grad]; decays = [p for p in trained if p.dim() >= 2 and id(p) not in tables]; the "
    "others in a second group, with 'weight_decay': 0.0.",
)
def check_parameter_groups(answer, draw):
    """Each trained parameter must be in one group, once; matrices are decayed, vectors
    and embeddings are not.
    """
    decay = round(draw.uniform(0.11, 0.3), 3)
    [seen] = answer.on_ranks(groups_of, decay)
    for (words, make), found in zip(NETWORKS.items(), seen):
        given = decay_for(words, decay)
        hold(claims(f"the groups of {words}, weight_decay={given}", make(), given, found))
