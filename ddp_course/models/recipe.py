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
def evaluate(network, windows, precision, device):
    """The mean loss over some windows, which the ranks share, and its standard error:
    how far it may be from the mean over the whole text. Both are in nats per token.

    network: not wrapped. One window at a time, since the error needs the loss of each.
    """
    network.eval()
    mine = range(dist.get_rank(), len(windows), dist.get_world_size())
    losses = [
        loss_of(network, *window, precision, device).double()
        for window in DataLoader(Subset(windows, mine))
    ]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if losses:
        losses = torch.stack(losses)
        sums = torch.stack([losses.sum(), losses.square().sum()])
    dist.all_reduce(sums)
    network.train()
    mean, square = (sums / len(windows)).tolist()
    variance = max(0.0, square - mean**2) * len(windows) / max(1, len(windows) - 1)
    return mean, math.sqrt(variance / len(windows))


def bits_per_byte(loss, windows, tokenizer):
    """A loss in nats per token, of some windows, as bits per byte of their text.

    It does not depend on how much text a token holds, so tokenizers can be compared.
    """
    targets = [targets.tolist() for _, targets in windows]
    size = sum(tokenizer.size(tokens) for tokens in targets)
    return loss / math.log(2) * sum(map(len, targets)) / size
