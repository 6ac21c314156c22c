"""The usual recipe for training a GPT: the learning rate of each update, the optimizers
and what they decay, the loss, and its mean over a text.
"""

import math

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from ddp_course.models.muon import hidden_matrices


def learning_rate(step, steps, args):
    """The rate of an update, of 0 to steps - 1: up a line, then down half a cosine.

    It reaches --learning-rate after --warmup updates, and ends at a tenth of that.
    """
    if step < args.warmup:
        return args.learning_rate * (step + 1) / (args.warmup + 1)
    if getattr(args, "schedule", "cosine") == "wsd":
        return args.learning_rate * stable_then_decay(step, steps)
    done = (step - args.warmup) / max(1, steps - 1 - args.warmup)
    return args.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def stable_then_decay(step, steps):
    """The part of the highest rate that an update after the warm-up has: all of it, and
    in the last fifth of the updates a line down, nearly to 0.

    S. Hu et al., "MiniCPM", 2024, named it WSD: warm-up, stable, decay.
    """
    decay = round(0.2 * steps)
    return min(1.0, (steps - step) / (decay + 1))


def parameter_groups(model, weight_decay):
    """Groups for AdamW: matrices decay; biases and norms, which are vectors, do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def at_once(parameters, kind, **how):
    return kind(parameters, **how)


def optimizers(groups, name, model, make=at_once):
    """What trains a GPT: {"optimizer": AdamW} for some groups, see parameter_groups. If
    the name is muon, a "muon" beside it takes over the matrices of the blocks.

    make: creates an optimizer of a kind, as ZeroRedundancyOptimizer does.
    """
    parts = {}
    if name == "muon":
        hidden = {id(value): value for value in hidden_matrices(model)}
        how = {"weight_decay": groups[0]["weight_decay"]}
        how |= {"adjust_lr_fn": "match_rms_adamw"}  # so that one rate suits both
        parts["muon"] = make(list(hidden.values()), torch.optim.Muon, **how)
        for group in groups:
            group["params"] = [
                each for each in group["params"] if id(each) not in hidden
            ]
    adamw = make(groups, torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    return {"optimizer": adamw} | parts


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


def evaluate_texts(network, texts, tokenizer, args, precision, device):
    """The losses on some windows of two texts, of the training set and held out, and a
    text that the network writes: see --prompt and --sample-tokens.
    """
    seen, held_out = texts
    train_loss, _ = evaluate(network, seen, precision, device)
    validation_loss, error = evaluate(network, held_out, precision, device)
    tokens = tokenizer.encode(args.prompt.encode()).tolist()
    if dist.get_rank() == 0:  # the other ranks train on
        tokens = network.generate(tokens, args.sample_tokens)
    losses = {"train_loss": train_loss, "validation_loss": validation_loss}
    losses["validation_error"] = error
    losses["bits_per_byte"] = bits_per_byte(validation_loss, held_out, tokenizer)
    return losses | {"sample": tokenizer.decode(tokens)}


def in_words(number, norm, found):
    loss, held_out, error, bits, sample = found.values()
    losses = f"loss {loss:.3f}, held out {held_out:.3f} ± {error:.3f} ({bits:.2f} bits"
    return f"update {number}: {losses} per byte), gradient norm {norm:.2f}\n{sample}"


def bits_per_byte(loss, windows, tokenizer):
    """A loss in nats per token, of some windows, as bits per byte of their text.

    It does not depend on how much text a token holds, so tokenizers can be compared.
    """
    targets = [targets.tolist() for _, targets in windows]
    size = sum(tokenizer.size(tokens) for tokens in targets)
    return loss / math.log(2) * sum(map(len, targets)) / size
