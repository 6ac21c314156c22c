"""Question 2: uneven examples, and their loss."""

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial

import torch

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex08.on_ranks import PRELOADED, TIMEOUT, Meeting, a_trainer, settings
from ddp_course.checks.ex08.uneven_cases import (
    ACCUMULATION,
    BATCH_SIZE,
    Tagger,
    lengths_of,
    telling_batches,
    uneven_batches,
)
from ddp_course.checks.ex08.uneven_collate import pads
from ddp_course.checks.ex08.uneven_loss import (
    UNCLEAR,
    descend,
    joined,
    like_one_process,
    numbers_and_inputs,
    returns_a_loss,
)
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

# ---- what the ranks observe ----


def collated(collate, mean_loss, batches):
    seen = []
    for batch in batches:
        with trying(f"collate, with {lengths_of(batch)}"):
            returned = collate(copied := deepcopy(batch))
        made = dict(returned) if isinstance(returned, Mapping) else returned
        seen.append({"made": made, "spoiled": spoiled(copied, batch)})
    return seen


def spoiled(examples, originals):
    """Whether examples, a list of dicts of tensors, differ from what they were."""
    return len(examples) != len(originals) or any(
        now.keys() != before.keys() or any(not torch.equal(now[name], before[name]) for name in before)
        for now, before in zip(examples, originals)
    )


def trained(collate, mean_loss, examples, seed):
    """Train on these examples: this rank's losses, the parameters after each update, and
    what mean_loss has written into.

    odd: a loss that nothing can be trained on, if there was one, in a list; raised: an
    unclear error; then there is no more.
    """
    seen = {"odd": [], "raised": None, "losses": [], "history": [], "written": []}

    def noted(outputs, labels, num_items_in_batch):
        logits = outputs["logits"]
        given = {"logits": logits, "labels": labels, "num_items_in_batch": num_items_in_batch}
        before = {name: value.detach().clone() for name, value in given.items()}
        try:
            loss = mean_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        except Exception as error:
            if any(text in str(error) for text in UNCLEAR):
                seen["raised"] = f"{type(error).__name__}: {error}".splitlines()[0]
                raise NoTraining from error
            raise
        seen["written"].extend(name for name, value in before.items() if not torch.equal(given[name], value))
        seen["written"].extend(["outputs"] * (list(outputs) != ["logits"] or outputs["logits"] is not logits))
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0 or not comes_from(logits, loss):
            seen["odd"] = [loss]
            raise NoTraining
        seen["losses"].append(loss.item())
        return loss

    options = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION}
    with settings(Meeting(), num_train_epochs=1, logging_strategy="no", **options) as made:
        model = Tagger(seed)
        trainer = a_trainer(model, made, examples, data_collator=collate, compute_loss_func=noted)
        trainer.optimizer.register_step_post_hook(lambda *_: seen["history"].append(joined(model.parameters())))
        with suppress(NoTraining):
            trainer.train()
    return seen


class NoTraining(Exception):
    """Trainer cannot train on this loss, or DDP would wait for its gradients."""


def comes_from(logits, loss):
    """Whether the backward of a loss leads to the logits."""
    if not loss.requires_grad:
        return False
    return torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0] is not None


@question(
    "nn.utils.rnn.pad_sequence pads a list of tensors. Then find out what Trainer does with the loss, before and "
    "after: from transformers import Trainer, and Trainer.compute_loss?? in a cell shows you.",
    "pad_sequence(..., batch_first=True, padding_value=...). Means of micro-batches cannot be added up, sums "
    "can: F.cross_entropy(..., reduction='sum'), and divide by one number that is the same in all of them. "
    "Trainer multiplies by the number of processes itself, since DDP divides by it.",
    "collate: pad_sequence([example['tokens'] for example in examples], batch_first=True), and the same of "
    "the targets with padding_value=-100. mean_loss: F.cross_entropy(outputs['logits'].transpose(1, 2), "
    "labels, reduction='sum') / num_items_in_batch, and nothing else.",
)
def check_uneven(answer, draw):
    """Batches must be padded, and each update of Trainer must be that of one process on
    the joined window.
    """
    start_server(*PRELOADED)  # where none runs yet
    batches = telling_batches(draw)
    [seen] = answer.on_ranks(collated, batches, timeout=TIMEOUT)
    for batch, of_batch in zip(batches, seen):
        hold(pads(batch, of_batch))
    for n in (1, 2):
        batches, seed = uneven_batches(draw, n), draw.randrange(10**6)
        examples = [example for batch in batches for example in batch]
        of_ranks = answer.on_ranks(trained, examples, seed, nproc=n, timeout=TIMEOUT)
        on_every_rank(returns_a_loss, of_ranks)
        network, window = Tagger(seed), n * ACCUMULATION
        for number, first in enumerate(range(0, len(batches), window), 1):
            of_update = batches[first : first + window]
            on_every_rank(partial(like_one_process, network, number, of_update), of_ranks)
            descend(network, of_update)
        on_every_rank(numbers_and_inputs, of_ranks)
