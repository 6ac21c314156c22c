"""Losses of answers: per token, their mean, and of one that is preferred to another."""

import torch
from torch.nn import functional as F

from ddp_course.data.questions import IGNORED


def token_losses(logits, labels):
    """The loss of each token, float (batch, tokens - 1); 0 where the label is -100."""
    pairs = logits[:, :-1].transpose(1, 2).float(), labels[:, 1:]
    return F.cross_entropy(*pairs, ignore_index=IGNORED, reduction="none")


def mean_loss(prediction):
    """The mean over all tokens; Trainer's own is a mean of the means of batches."""
    counted = prediction.label_ids[:, 1:] != IGNORED
    return {"token_loss": float(prediction.predictions[counted].mean())}


def log_likelihoods(model, batch):
    """The log of the probability that the model gives each answer, float (batch,)."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return -token_losses(logits, batch["labels"]).sum(dim=1)


def margins(model, chosen, rejected, reference):
    """How much more the model has come to prefer each chosen answer, float (batch,).

    reference: a pair, the log-likelihoods of both before the training. All of them 0
    means that nothing has changed.
    """
    gains = [
        log_likelihoods(model, batch) - before
        for batch, before in zip((chosen, rejected), reference)
    ]
    return gains[0] - gains[1]


def dpo_loss(margins, beta=0.1):
    """Direct preference optimisation: R. Rafailov et al., 2023, equation 7."""
    return -F.logsigmoid(beta * margins).mean()


@torch.no_grad()
def before_training(network, *batches):
    """The log-likelihoods of answers with the adapters of a peft model switched off."""
    with network.disable_adapter():
        return [log_likelihoods(network, batch) for batch in batches]
