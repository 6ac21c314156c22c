"""The usual recipe for training a GPT: the learning rate of each update, the weight
decay, the loss, and its mean over a text.
"""

import math

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset


def learning_rate(step, steps, args):
    """The rate of an update, of 0 to steps - 1: up a line, then down half a cosine.

    It reaches --learning-rate after --warmup updates, and ends at a tenth of that.
    """
    if step < args.warmup:
        return args.learning_rate * (step + 1) / (args.warmup + 1)
    done = (step - args.warmup) / max(1, steps - 1 - args.warmup)
    return args.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def parameter_groups(model, weight_decay):
    """Groups for AdamW: matrices decay; biases and norms, which are vectors, do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def loss_of(model, tokens, targets, precision, device):
    """The mean cross entropy of the next token, in nats, which the model computes."""
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        return model(tokens.to(device), targets.to(device))


@torch.no_grad()
def evaluate(network, windows, batch_size, precision, device):
    """The mean loss over all windows, shared by the ranks. network: not wrapped."""
    network.eval()
    mine = range(dist.get_rank(), len(windows), dist.get_world_size())
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens, targets in DataLoader(Subset(windows, mine), batch_size):
        loss = loss_of(network, tokens, targets, precision, device)
        total += torch.tensor([loss.item() * len(tokens), len(tokens)], device=device)
    dist.all_reduce(total)
    network.train()
    return (total[0] / total[1]).item()
