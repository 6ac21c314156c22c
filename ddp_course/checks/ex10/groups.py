"""Groups of parameters for weight decay."""

import torch
from torch import nn

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
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
    embeddings that is a Linear.
    """

    def __init__(self):
        super().__init__()
        self.words = Table(7, 4)
        self.embedding_projection = nn.Linear(4, 6)
        self.frozen_embedding = nn.Embedding(3, 6).requires_grad_(False)
        self.head = nn.Linear(4, 7)  # its weight has the table's shape


NETWORKS = {
    "a GPT": lambda: GPT(vocabulary=11, context=4, layers=2, heads=2, width=6),
    "a network with a convolution, a frozen layer, a scale and a tied head": Odd,
    "a network whose head is not tied, with a subclass of nn.Embedding": Untied,
    "a Linear without bias": lambda: nn.Linear(3, 2, bias=False),
}


def decaying(network):
    """The names of the parameters that decay."""
    tables = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    return {
        name
        for name, value in network.named_parameters()
        if value.requires_grad and value.dim() >= 2 and id(value) not in tables
    }


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
            groups = list(parameter_groups(network, decay))
            found = []
            for group in groups:
                parameters = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
                decays = group.get("weight_decay")
                found += [[names.get(id(one), "a stranger"), decays] for one in parameters]
            torch.optim.AdamW([{**group, "params": list(group["params"])} for group in groups], lr=1e-3)
        seen.append(found)
    return seen


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
        judge_groups(words, make(), decay, found)


def judge_groups(words, network, decay, found):
    checked = f"the groups of {words}, weight_decay={decay}"
    names, decayed = [name for name, _ in found], decaying(network)
    trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
    for name in sorted(set(names)):
        if name not in trained:
            cause = "a frozen parameter has no gradient, so leave it out of the optimizer: check requires_grad"
            if name == "a stranger":
                cause = "put the parameters themselves into the groups, not copies of them"
            raise Wrong(checked, expected="the parameters that are trained", got=f"{name}, too", cause=cause)
        if (times := names.count(name)) > 1:
            cause = "if a parameter is in two groups, or twice in one, AdamW refuses it or updates it twice"
            raise Wrong(checked, expected=f"{name} once", got=f"{times} times", cause=cause)
    decays = dict(found)
    for name, value in trained.items():
        if name not in decays:
            cause = "this parameter is in no group, so it would never be trained"
            raise Wrong(checked, expected=f"{name} in a group", got="it is in no group", cause=cause)
        truth = decay if name in decayed else 0.0
        others = {other for known, other in found if other and known in decayed}
        if name in decayed and decays[name] and len(others) == 1:
            cause = "the matrices have a weight decay, but not the one that the function was given"
        elif decays[name] is None:
            cause = "the group has no 'weight_decay', so it gets AdamW's default of 0.01: set 0.0"
        elif value.dim() < 2:
            cause = "a bias, a norm's factor or a single number sets a level, so it must not be pulled towards 0"
        elif name not in decayed:
            cause = (
                "this is the weight of an nn.Embedding, so it must not decay, also if the head uses it, too, and "
                "whatever its name is: look for the module"
            )
        elif "embedding" in name:
            cause = "this is the weight of a Linear, so it must decay: look at the module, not at its name"
        else:
            cause = (
                "a weight with two or more dimensions must be decayed, for example that of a Linear or a convolution"
            )
        if decays[name] is None or not abs(decays[name] - truth) < 1e-12:
            raise Wrong(checked, expected=f"{name} {tuple(value.shape)}: weight_decay {truth}",
                        got=f"weight_decay {decays[name]}", cause=cause)  # fmt: skip
