"""A pipeline by hand: a network is cut into stages, and one executor runs any plan.

A plan has a list of actions, (kind, stage, micro-batch), for each rank. "F" is a
forward, "B" a backward, "I" and "W" its halves: the gradients of the input, and of the
weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course import UsageError


def token_loss(logits, targets):
    """Mean cross entropy of float (batch, tokens, vocabulary), int64 (batch, tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut(network, stages):
    """A GPT as this many modules, one after the other, each with the same number of
    blocks, or one more. The first also embeds, the last also has the head.

    Raises UsageError for more stages than blocks.
    """
    first, *blocks, last = network.parts()
    if stages > len(blocks):
        fix = "use fewer ranks, or a larger --shape"
        raise UsageError(f"{len(blocks)} blocks cannot fill {stages} stages: {fix}")
    shares = torch.arange(len(blocks)).tensor_split(stages)
    found = [[blocks[number] for number in share] for share in shares]
    found[0].insert(0, first)
    found[-1].append(last)
    return [nn.Sequential(*share) for share in found]


def owners_of(plan, ranks=None):
    """Who computes which stage: {stage: its rank}. ranks: the global ranks of the
    pipeline, by default those from 0 on.
    """
    ranks = ranks or range(len(plan))
    return {stage: ranks[r] for r, of in enumerate(plan) for _, stage, _ in of}


def place(network, owners):
    """The stages of a network that this rank has: {stage: module}."""
    parts = enumerate(cut(network, len(owners)))
    return {stage: part for stage, part in parts if owners[stage] == dist.get_rank()}


class Pipeline:
    """A rank's stages, and the messages to and from the other ranks' stages.

    parts: {stage: module}, those of this rank. owners: {stage: its rank}, of all. A
    micro-batch of (batch, tokens) travels between two stages as (batch, tokens,
    *width). loss: a function of the last stage's output and the targets. channels:
    process groups by (stage, next stage), see `channels_of`. most: of how many
    micro-batches the last run kept activations at a time, counted for each stage.
    """

    def __init__(self, parts, owners, *width, loss=token_loss, channels=()):
        self.parts, self.owners, self.width, self.loss = parts, owners, width, loss
        self.channels, self.last = dict(channels), max(owners)
        self.like = next(parameters(parts))  # what travels has its dtype and device

    def run(self, actions, inputs, targets):
        """Do this rank's actions of a plan, with a list of micro-batches and one of
        their targets. Add to the gradients those of their mean loss; return the losses
        of the micro-batches, on the rank of the last stage, else []. Raises ValueError
        for micro-batches that differ in size: a mean of means needs equal ones.
        """
        check_alike(actions, inputs)
        self.inputs, self.targets = inputs, targets
        self.kept, self.here, self.sent, losses = {}, {}, [], []
        self.most = 0
        for kind, stage, i in actions:
            result = self.compute(kind, stage, i, self.receive(kind, stage, i))
            if kind == "F" and stage == self.last:
                losses.append(result)
            elif kind == "F":
                self.send("F", stage, i, stage + 1, result.detach())
            elif kind in "BI" and stage > 0:
                self.send("B", stage, i, stage - 1, result)
        for work, _ in self.sent:  # a tensor has to live until it has been sent
            work.wait()
        return losses

    # ---- what an action computes ----

    def compute(self, kind, *where):
        do = {"F": self.forward, "B": self.backward}
        do |= {"I": self.input_gradient, "W": self.weight_gradients}
        return do[kind](*where)

    def forward(self, stage, i, x):
        y = self.parts[stage](x)
        loss = None
        if stage == self.last:
            loss = self.loss(y, self.targets[i])
            y = loss / len(self.inputs)  # the mean over the micro-batches
        if torch.is_grad_enabled():
            self.kept[stage, i] = x, y
            self.most = max(self.most, len(self.kept))
        return y if loss is None else loss.detach()

    def backward(self, stage, i, gradient):
        x, y = self.kept.pop((stage, i))
        y.backward(gradient)
        return x.grad

    def input_gradient(self, stage, i, gradient):
        x, y = self.kept[stage, i]
        self.kept[stage, i] = y, gradient
        if stage > 0:
            [x_gradient] = torch.autograd.grad(y, x, gradient, retain_graph=True)
            return x_gradient

    def weight_gradients(self, stage, i, _):
        y, gradient = self.kept.pop((stage, i))
        weights = [w for w in self.parts[stage].parameters() if w.requires_grad]
        for weight, more in zip(weights, torch.autograd.grad(y, weights, gradient)):
            weight.grad = more if weight.grad is None else weight.grad + more

    # ---- what travels ----

    def send(self, kind, stage, i, to, tensor):
        if to in self.parts:
            self.here[kind, to, i] = tensor
            return
        where = {"group": self.channels.get((stage, to)), "tag": self.tag(kind, to, i)}
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, self.owners[to], **where), tensor))

    def receive(self, kind, stage, i):
        """What an action needs from another stage: its input, or its output's gradient.
        A first stage gets its micro-batch, and a last one needs no gradient.
        """
        if kind == "W" or (kind in "BI" and stage == self.last):
            return None
        if kind == "F" and stage == 0:
            return self.inputs[i]
        kind, source = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        if source in self.parts:
            tensor = self.here.pop((kind, stage, i))
        else:
            tensor = self.like.new_empty(*self.inputs[i].shape, *self.width)
            where = {"group": self.channels.get((source, stage))}
            where["tag"] = self.tag(kind, stage, i)
            dist.recv(tensor, self.owners[source], **where)
        # a leaf of this rank's part of the graph, so that its gradient is kept
        return tensor.requires_grad_(kind == "F" and torch.is_grad_enabled())

    def tag(self, kind, stage, i):
        """A number of its own for each message of a step."""
        return 2 * (stage * len(self.inputs) + i) + (kind == "F")


def check_alike(actions, inputs):
    sizes = [tuple(each.shape) for each in inputs]
    expected = 1 + max((i for *_, i in actions), default=-1)
    if len(sizes) != expected or len(set(sizes)) > 1:
        found = f"{expected} micro-batches of one size are needed, not {sizes}"
        raise ValueError(found)


# ---- what else ranks share ----


def parameters(parts):
    """The parameters of a rank's stages, each once."""
    return nn.ModuleList(parts.values()).parameters()


class Shared:
    """What ranks share after a backward: the tied matrix, between the first stage and
    the last one, and gradients, with the ranks of other replicas that have the same
    stages.

    replicas: their group, or None for a single replica. All ranks create it together.
    """

    def __init__(self, parts, owners, replicas=None):
        self.parameters, self.replicas = list(parameters(parts)), replicas
        self.tied = self.ends = None
        ranks = sorted({owners[0], owners[max(owners)]})
        if len(ranks) == 2 and dist.get_rank() in ranks:
            if 0 in parts:
                self.tied = parts[0][0].token_embedding.weight
            else:
                self.tied = parts[max(owners)][-1][-1].weight
            self.ends = dist.new_group(ranks, use_local_synchronization=True)

    def gradients(self):
        """The sum of the tied matrix's two gradients, then the mean over replicas."""
        if self.ends is not None:
            dist.all_reduce(self.tied.grad, group=self.ends)
        if self.replicas is not None:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, self.replicas)


@torch.no_grad()
def gather(network, parts, owners, group=None):
    """Fill a whole network with what the stages have, on all ranks of the pipeline."""
    for stage, part in enumerate(cut(network, len(owners))):
        if stage in parts:
            part.load_state_dict(parts[stage].state_dict())
        for parameter in part.parameters():
            dist.broadcast(parameter, owners[stage], group)


def channels_of(owners):
    """For nccl, which has no tags: a group for each pair of stages that send to each
    other, in each direction. In a group, messages arrive in the order they are sent.
    """
    channels, rank = {}, dist.get_rank()
    for stage in range(max(owners)):
        for way in ((stage, stage + 1), (stage + 1, stage)):
            ranks = sorted({owners[each] for each in way})
            if rank in ranks and len(ranks) == 2:
                channels[way] = dist.new_group(ranks, use_local_synchronization=True)
    return channels
