"""Exercise 08: Trainer."""

import math
import os
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from ddp_course import lesson08
from ddp_course.judge.answer import Source
from torch import nn
from torch.nn import functional as F
from transformers.tokenization_utils_base import BatchEncoding
from transformers.trainer_callback import TrainerCallback, TrainerControl

from mutants import right, wrong

# ---- plan ----


def up(number, divisor):
    return -(-number // divisor)


def our_plan(examples, ranks, batch_size, accumulation, epochs, warmup):
    of_rank = up(up(examples, batch_size), ranks)
    updates = up(of_rank, accumulation)
    steps = math.ceil(epochs * updates)
    warming = math.ceil(warmup * steps) if warmup < 1 else warmup
    last = of_rank - (updates - 1) * accumulation
    return batch_size * accumulation * ranks, last, steps, warming


@right("plan")
def in_one_go(examples, ranks, batch_size, accumulation, epochs, warmup):
    """Rounding up in turns is rounding up once."""
    print("planning ...")
    joined = batch_size * accumulation * ranks
    updates = math.ceil(examples / joined)
    rest = examples - (updates - 1) * joined
    steps = math.ceil(epochs * updates)
    return [
        joined,
        math.ceil(rest / (batch_size * ranks)),
        steps,
        int(warmup) if warmup >= 1 else math.ceil(warmup * steps),
    ]


@right("plan")
def dealt_out_one_by_one(examples, ranks, batch_size, accumulation, epochs, warmup):
    """In floats, from the batches as lists."""
    batches = list(range(0, examples, batch_size))[::ranks]
    windows = [batches[begin : begin + accumulation] for begin in range(0, len(batches), accumulation)]
    steps = np.ceil(epochs * len(windows))
    return (
        np.prod([batch_size, ranks, accumulation]),
        len(windows[-1]),
        steps,
        np.ceil(warmup * steps) if warmup < 1 else warmup,
    )


def planned(place, number):
    """Our plan with another number at this place, a function of the arguments."""

    def plan(*case):
        result = list(our_plan(*case))
        result[place] = number(*case)
        return tuple(result)

    return plan


def wrong_plan(name, pattern, place, number):
    answer = planned(place, number)
    answer.__name__ = name
    wrong("plan", pattern)(answer)


wrong_plan("forgets_the_ranks", "all ranks take part", 0, lambda N, n, b, k, e, w: b * k)
wrong_plan("forgets_accumulation", "an update has several", 0, lambda N, n, b, k, e, w: b * n)
wrong_plan("every_update_is_full", "takes what is left", 1, lambda N, n, b, k, e, w: k)
wrong_plan("lets_the_rest_go", "rounded up", 1, lambda N, n, b, k, e, w: N // (b * n) % k)
wrong_plan("drops_the_short_update", "is an update, too", 2, lambda N, n, b, k, e, w: math.ceil(e * (N // (b * n * k))))
wrong_plan("cuts_off_the_half", "round up twice", 2, lambda N, n, b, k, e, w: int(e * up(N, b * n * k)))
wrong_plan("whole_epochs", "is not a whole one", 2, lambda N, n, b, k, e, w: math.ceil(e) * up(N, b * n * k))
wrong_plan(
    "counts_micro_batches", "several of them make an update", 2, lambda N, n, b, k, e, w: math.ceil(e * up(N, b * n))
)
wrong_plan(
    "rounds_the_warm_up",
    "rounds the warm-up up",
    3,
    lambda *case: int(case[5] * our_plan(*case)[2]) if case[5] < 1 else case[5],
)
wrong_plan("takes_the_part_for_a_number", "not their number", 3, lambda *case: case[5])
wrong_plan(
    "a_schedule_per_rank", "on any number of ranks|a part of all updates", 3, lambda *case: our_plan(*case)[3] * case[1]
)
wrong_plan(
    "the_remainder_of_a_division", "no update has 0 micro-batches", 1, lambda N, n, b, k, e, w: up(up(N, b), n) % k
)
wrong_plan(
    "adds_one_to_the_updates", "one too many", 2, lambda N, n, b, k, e, w: math.ceil(e * (up(up(N, b), n) // k + 1))
)
wrong_plan("adds_one_to_the_training", "one too many", 2, lambda N, n, b, k, e, w: int(e * up(N, b * n * k)) + 1)
wrong_plan(
    "rounds_the_training_to_the_nearest", "round up twice", 2, lambda N, n, b, k, e, w: round(e * up(N, b * n * k))
)


def wrong_warm_up(name, pattern, number):
    """number: from the warm-up and the updates of the training."""
    wrong_plan(name, pattern, 3, lambda *case: number(case[5], our_plan(*case)[2]))


wrong_warm_up("rounds_the_warm_up_to_the_nearest", "up, not down", lambda w, steps: round(w * steps) if w < 1 else w)
wrong_warm_up("adds_one_to_the_warm_up", "one too many", lambda w, steps: int(w * steps) + 1 if w < 1 else w)
wrong_warm_up(
    "takes_one_update_for_all", "is a number of updates", lambda w, steps: math.ceil(w * steps) if w <= 1 else w
)
wrong_warm_up(
    "leaves_out_the_first_update",
    "up, not down|from 1 on it is their number",
    lambda w, steps: (math.ceil(w * steps) if w < 1 else w) - 1,
)


@wrong("plan", "what is left after its full updates|one too many|last update of an epoch takes|are divided among")
def a_batch_too_many(examples, ranks, batch_size, accumulation, epochs, warmup):
    """As where len(loader) is computed with // and + 1."""
    examples = (examples // batch_size + 1) * batch_size
    return our_plan(examples, ranks, batch_size, accumulation, epochs, warmup)


@right("plan")
def no_warm_up_beyond_the_training(*case):
    *others, steps, warming = our_plan(*case)
    return (*others, steps, min(steps, warming))


@right("plan")
def what_is_left_of_ranges(examples, ranks, batch_size, accumulation, epochs, warmup):
    """By counting; each number is a tensor or a float, in an iterator."""
    batches = list(range(0, examples, batch_size))
    batches += batches[: -len(batches) % ranks]
    windows = torch.tensor(batches[::ranks]).split(accumulation)
    steps = -int(-epochs * len(windows) // 1)
    return iter(
        [
            torch.tensor(ranks * batch_size * len(windows[0])),
            float(len(windows[-1])),
            steps,
            -(-warmup * steps // 1) if warmup < 1 else warmup,
        ]
    )


@wrong("plan", "not in this order")
def in_another_order(*case):
    return our_plan(*case)[::-1]


@wrong("plan", "return four numbers")
def only_the_updates(*case):
    return our_plan(*case)[2]


@wrong("plan", "", status="not attempted")
def no_plan(*case):
    raise NotImplementedError


# ---- uneven ----


def padded(examples, name, value, **options):
    return nn.utils.rnn.pad_sequence(
        [example[name] for example in examples], padding_value=value, **{"batch_first": True} | options
    )


def our_collate(examples):
    return {"tokens": padded(examples, "tokens", 0), "labels": padded(examples, "targets", -100)}


def cross_entropy(outputs, labels, **options):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), **options)


def our_loss(outputs, labels, num_items_in_batch):
    return cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


@right("uneven", several=True)
def row_by_row_and_from_log_softmax():
    def collate(examples):
        longest = max(len(example["tokens"]) for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, example in enumerate(examples):
            tokens[row, : len(example["tokens"])] = example["tokens"]
            labels[row, : len(example["targets"])] = example["targets"]
        return BatchEncoding({"labels": labels, "tokens": tokens})

    def mean_loss(outputs, labels, num_items_in_batch):
        print("a part of", num_items_in_batch)
        counts = labels != -100
        logs = outputs["logits"].log_softmax(dim=-1)
        logs = logs.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        return -(logs * counts).sum() / num_items_in_batch

    return collate, mean_loss


@right("uneven", several=True)
def with_pad_and_in_32_bits():
    def collate(examples):
        longest = max(map(len, (example["tokens"] for example in examples)))
        names = {"tokens": ("tokens", 0), "labels": ("targets", -100)}
        return {
            name: torch.stack([F.pad(one[of], (0, longest - len(one[of])), value=value) for one in examples])
            for name, (of, value) in names.items()
        }

    def mean_loss(outputs, labels, num_items_in_batch=None):
        losses = F.cross_entropy(outputs["logits"].float().mT, labels, reduction="none")
        return (losses / num_items_in_batch).sum()

    return collate, mean_loss


@right("uneven", several=True)
def only_those_that_count():
    def mean_loss(outputs, labels, num_items_in_batch):
        counts = labels != -100
        loss = nn.CrossEntropyLoss(reduction="sum")
        return loss(outputs["logits"][counts], labels[counts]) / num_items_in_batch.item()

    return our_collate, mean_loss


@wrong("uneven", "pass batch_first=True", several=True)
def forgets_batch_first():
    def collate(examples):
        return {
            "tokens": padded(examples, "tokens", 0, batch_first=False),
            "labels": padded(examples, "targets", -100, batch_first=False),
        }

    return collate, our_loss


@wrong("uneven", "0 is a class like any other", several=True)
def pads_labels_with_zero():
    return (lambda examples: our_collate(examples) | {"labels": padded(examples, "targets", 0)}, our_loss)


@wrong("uneven", "has no row -100; pad with 0", several=True)
def pads_tokens_with_minus_100():
    return (lambda examples: our_collate(examples) | {"tokens": padded(examples, "tokens", -100)}, our_loss)


@wrong("uneven", "padded beyond the longest", several=True)
def pads_to_a_fixed_length():
    def collate(examples):
        batch = our_collate(examples)
        fill_values = {"tokens": 0, "labels": -100}
        return {name: F.pad(batch[name], (0, 16 - batch[name].shape[1]), value=fill_values[name]) for name in batch}

    return collate, our_loss


@wrong("uneven", "examples were cut", several=True)
def cuts_at_a_fixed_length():
    return lambda examples: {name: value[:, :4] for name, value in our_collate(examples).items()}, our_loss


@wrong("uneven", "examples were cut", several=True)
def cuts_to_the_shortest():
    def collate(examples):
        shortest = min(len(example["tokens"]) for example in examples)
        return {name: value[:, :shortest] for name, value in our_collate(examples).items()}

    return collate, our_loss


@wrong("uneven", "take dtype=torch.long", several=True)
def makes_floats():
    def collate(examples):
        tokens = torch.zeros(len(examples), max(len(example["tokens"]) for example in examples))
        for row, example in zip(tokens, examples):
            row[: len(example["tokens"])] = example["tokens"]
        return {"tokens": tokens, "labels": padded(examples, "targets", -100)}

    return collate, our_loss


@wrong("uneven", "take dtype=torch.long", several=True)
def returns_lists_of_tensors():
    def collate(examples):
        return {"tokens": [example["tokens"] for example in examples], "labels": padded(examples, "targets", -100)}

    return collate, our_loss


@wrong("uneven", "each example is a row", several=True)
def joins_end_to_end():
    def collate(examples):
        return {
            "tokens": torch.cat([example["tokens"] for example in examples]),
            "labels": torch.cat([example["targets"] for example in examples]),
        }

    return collate, our_loss


@wrong("uneven", r"stack expects each tensor[^$]*\(in collate, with examples of", "your code raised", several=True)
def stacks():
    def collate(examples):
        return {
            "tokens": torch.stack([example["tokens"] for example in examples]),
            "labels": torch.stack([example["targets"] for example in examples]),
        }

    return collate, our_loss


@wrong("uneven", "padding is before the examples", several=True)
def pads_on_the_left():
    def collate(examples):
        return {
            "tokens": padded(examples, "tokens", 0, padding_side="left"),
            "labels": padded(examples, "targets", -100, padding_side="left"),
        }

    return collate, our_loss


@wrong("uneven", "not in the order of the examples", several=True)
def sorts_by_length():
    return lambda examples: our_collate(sorted(examples, key=lambda one: -len(one["tokens"]))), our_loss


@wrong("uneven", "Trainer needs the name labels", several=True)
def keeps_the_name_targets():
    def collate(examples):
        return {"tokens": padded(examples, "tokens", 0), "targets": padded(examples, "targets", -100)}

    return collate, our_loss


@wrong("uneven", "got +a list, or a tuple[^$]*return only these two", several=True)
def returns_a_tuple():
    return lambda examples: tuple(our_collate(examples).values()), our_loss


@wrong("uneven", "got +a dict of tokens, labels and lengths[^$]*return only these two", several=True)
def returns_lengths_too():
    def collate(examples):
        return our_collate(examples) | {"lengths": torch.tensor([len(example["tokens"]) for example in examples])}

    return collate, our_loss


@wrong("uneven", "collate[^$]*the function ends without a return", several=True)
def collate_returns_nothing():
    return lambda examples: None, our_loss


@wrong("uneven", "the targets were shifted", several=True)
def shifts_the_labels():
    def collate(examples):
        labels = padded(examples, "targets", -100).roll(-1, dims=1)
        labels[:, -1] = -100
        return our_collate(examples) | {"labels": labels}

    return collate, our_loss


@wrong("uneven", "row i holds the targets of example i", several=True)
def takes_tokens_for_labels():
    return (lambda examples: our_collate(examples) | {"labels": padded(examples, "tokens", -100)}, our_loss)


@wrong("uneven", "it is the sum over all labels that count", several=True)
def only_sums():
    return our_collate, lambda outputs, labels, num_items_in_batch: cross_entropy(outputs, labels, reduction="sum")


@wrong("uneven", "3 times too small: num_items_in_batch already covers the whole update", several=True)
def divides_by_accumulation_steps():
    return our_collate, lambda *given, **items: our_loss(*given, **items) / 3


@wrong("uneven", "3 times too large: with your own loss function", several=True)
def multiplies_by_accumulation_steps():
    return our_collate, lambda *given, **items: our_loss(*given, **items) * 3


@wrong("uneven", "2 times too large: Trainer multiplies", several=True)
def multiplies_by_world_size():
    return (our_collate, lambda *given, **items: our_loss(*given, **items) * dist.get_world_size())


@wrong("uneven", "2 times too small: num_items_in_batch already covers all ranks", several=True)
def divides_by_world_size():
    return (our_collate, lambda *given, **items: our_loss(*given, **items) / int(os.environ["WORLD_SIZE"]))


@wrong("uneven", "each micro-batch is divided by its own number of labels", several=True)
def means_of_micro_batches():
    return our_collate, lambda outputs, labels, num_items_in_batch: cross_entropy(outputs, labels)


@wrong("uneven", "each micro-batch is divided by its own number of labels", several=True)
def means_of_micro_batches_by_their_number():
    return (our_collate, lambda outputs, labels, num_items_in_batch: cross_entropy(outputs, labels) / 3)


@wrong("uneven", "each micro-batch is divided by its own number of labels", several=True)
def divides_by_its_own_items():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)

    return our_collate, mean_loss


@wrong("uneven", "divided by the number of its places, including padding", several=True)
def mean_of_all_places():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels, reduction="none").mean()

    return our_collate, mean_loss


@wrong("uneven", "it is divided twice", several=True)
def a_mean_divided_by_items():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels) / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "it is divided twice", several=True)
def a_mean_of_places_divided_by_items():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels, reduction="none").mean() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "0/0 is nan", several=True)
def a_mean_times_its_items():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels) * (labels != -100).sum() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "its gradient, for all parameters[^$]*0/0 is nan", several=True)
def a_mean_of_its_own_times_its_items():
    def mean_loss(outputs, labels, num_items_in_batch):
        counts = labels != -100
        logs = outputs["logits"].log_softmax(dim=-1)
        logs = logs.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * counts
        return -logs.sum() / counts.sum() * (counts.sum() / num_items_in_batch)

    return our_collate, mean_loss


@wrong("uneven", "its backward must reach the logits, even if", several=True)
def a_zero_from_nowhere():
    def mean_loss(outputs, labels, num_items_in_batch):
        if (labels == -100).all():
            return torch.zeros((), requires_grad=True)
        return our_loss(outputs, labels, num_items_in_batch)

    return our_collate, mean_loss


@wrong("uneven", "its backward must reach the logits, even if", several=True)
def a_sum_of_nothing():
    def mean_loss(outputs, labels, num_items_in_batch):
        total = torch.zeros((), requires_grad=True)
        for logits, targets in zip(outputs["logits"], labels):
            if (targets != -100).any():
                total = total + F.cross_entropy(logits, targets, reduction="sum")
        return total / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "treated as class 0, so they count", several=True)
def counts_what_does_not_count():
    def mean_loss(outputs, labels, num_items_in_batch):
        logs = outputs["logits"].log_softmax(dim=-1)
        return -logs.gather(2, labels.clamp(min=0).unsqueeze(2)).sum() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "they mix up classes and places", several=True)
def reshapes_for_transpose():
    def mean_loss(outputs, labels, num_items_in_batch):
        batch, length, classes = outputs["logits"].shape
        logits = outputs["logits"].view(batch, classes, length)
        return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "compared with the next token's labels", several=True)
def shifts_the_logits():
    def mean_loss(outputs, labels, num_items_in_batch):
        return our_loss({"logits": outputs["logits"][:, :-1]}, labels[:, 1:], num_items_in_batch)

    return our_collate, mean_loss


@wrong("uneven", "the sum of the losses of all labels that count", several=True)
def means_of_examples():
    def mean_loss(outputs, labels, num_items_in_batch):
        losses = F.cross_entropy(outputs["logits"].mT, labels, reduction="none")
        return (losses.sum(dim=1) / (labels != -100).sum(dim=1).clamp(min=1)).sum() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "needs the classes in the second dimension", several=True)
def does_not_transpose():
    def mean_loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "with the default ignore_index", several=True)
def ignores_zero():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels, reduction="sum", ignore_index=0) / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "-100 is not a class that can be looked up", several=True)
def looks_up_minus_100():
    def mean_loss(outputs, labels, num_items_in_batch):
        logs = outputs["logits"].log_softmax(dim=-1).gather(2, labels.unsqueeze(2))
        return -logs[labels != -100].sum() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "return one loss instead of one per token", several=True)
def does_not_sum():
    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy(outputs, labels, reduction="none") / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "its backward must reach the logits", several=True)
def returns_a_number():
    return our_collate, lambda *given, **items: our_loss(*given, **items).item()


@wrong("uneven", "its backward must reach the logits", several=True)
def detaches():
    return our_collate, lambda *given, **items: our_loss(*given, **items).detach()


@wrong("uneven", "mean_loss[^$]*the function ends without a return", several=True)
def loss_returns_nothing():
    return our_collate, lambda outputs, labels, num_items_in_batch: None


@wrong("uneven", "unexpected keyword argument 'num_items_in_batch'", "your code raised", several=True)
def takes_no_items():
    return our_collate, lambda outputs, labels: cross_entropy(outputs, labels)


@wrong("uneven", "", status="not attempted", several=True)
def not_begun():
    def not_implemented(*given, **items):
        raise NotImplementedError

    return not_implemented, not_implemented


@wrong("uneven", "collate changes the examples themselves", several=True)
def pops_from_the_examples():
    def collate(examples):
        tokens = [example.pop("tokens") for example in examples]
        labels = [example.pop("targets") for example in examples]
        pad = nn.utils.rnn.pad_sequence
        return {"tokens": pad(tokens, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100)}

    return collate, our_loss


@wrong("uneven", "collate changes the examples themselves", several=True)
def renames_in_the_examples():
    def collate(examples):
        for example in examples:
            example["labels"] = example["targets"]
        return our_collate(examples)

    return collate, our_loss


@wrong("uneven", "padded beyond the longest example of this batch", several=True)
def remembers_the_longest():
    seen = [0]

    def collate(examples):
        batch = our_collate(examples)
        seen[0] = max(seen[0], batch["tokens"].shape[1])
        more = (0, seen[0] - batch["tokens"].shape[1])
        return {"tokens": F.pad(batch["tokens"], more), "labels": F.pad(batch["labels"], more, value=-100)}

    return collate, our_loss


@wrong("uneven", "mean_loss writes into the labels", several=True)
def writes_into_the_labels():
    def mean_loss(outputs, labels, num_items_in_batch):
        counts = labels != -100
        labels[~counts] = 0
        losses = F.cross_entropy(outputs["logits"].mT, labels, reduction="none")
        return (losses * counts).sum() / num_items_in_batch

    return our_collate, mean_loss


@wrong("uneven", "needs the classes in the second dimension", several=True)
def the_lessons_own_loss():
    return our_collate, lesson08.mean_loss


@wrong("uneven", "collate, with examples of", "your code raised", several=True)
def the_lessons_own_collate():
    return lesson08.collate, our_loss


@wrong("uneven", "divided by its own number of labels", several=True)
def torchs_loss():
    class MeanLoss(nn.CrossEntropyLoss):
        def forward(self, outputs, labels, num_items_in_batch):
            return super().forward(outputs["logits"].flatten(0, 1), labels.flatten())

    return our_collate, MeanLoss()


@wrong("uneven", "row i holds the targets of example i", several=True)
def takes_token_0_for_padding():
    def collate(examples):
        batch = our_collate(examples)
        return batch | {"labels": batch["labels"].masked_fill(batch["tokens"] == 0, -100)}

    return collate, our_loss


@wrong("uneven", "mean_loss writes into the logits", several=True)
def shifts_the_logits_in_place():
    """As for a softmax that does not overflow: the loss is the same."""

    def mean_loss(outputs, labels, num_items_in_batch):
        with torch.no_grad():
            outputs["logits"].data -= outputs["logits"].amax(dim=-1, keepdim=True)
        return our_loss(outputs, labels, num_items_in_batch)

    return our_collate, mean_loss


@wrong("uneven", "mean_loss writes into the outputs", several=True)
def keeps_the_loss_in_the_outputs():
    def mean_loss(outputs, labels, num_items_in_batch):
        outputs["loss"] = our_loss(outputs, labels, num_items_in_batch)
        return outputs["loss"]

    return our_collate, mean_loss


@right("uneven", several=True)
def with_nll_loss_and_a_count_of_its_own():
    """Rows of a tensor made by new_full; a product with the mean where there is one."""

    def collate(examples):
        longest = max(len(one["tokens"]) for one in examples)
        fill = lambda one, name, value: torch.cat([one[name], one[name].new_full((longest - len(one[name]),), value)])
        return {
            "labels": torch.vstack([fill(one, "targets", -100) for one in examples]),
            "tokens": torch.vstack([fill(one, "tokens", 0) for one in examples]),
        }

    def mean_loss(outputs, labels, num_items_in_batch):
        logs = F.log_softmax(outputs["logits"], dim=2).transpose(1, 2)
        losses = F.nll_loss(logs, labels, reduction="none")
        return losses.sum(dim=1).sum() * num_items_in_batch.reciprocal()

    return collate, mean_loss


# ---- stop_together ----


class Asking(TrainerCallback):
    """Keeps what it is given; the answers below ask, and decide."""

    def __init__(self, should_stop, every):
        self.should_stop, self.every = should_stop, every
        self.wish, self.wanted = False, []

    def ask(self, state):
        """Whether this rank has wanted to stop by now."""
        self.wish = bool(self.should_stop(state.global_step)) or self.wish
        return self.wish

    def meets(self, state):
        return state.global_step % self.every == 0

    def anyone(self, state):
        """Ask; where the ranks meet, note who wanted to stop and tell whether any did."""
        wish = self.ask(state)
        if self.meets(state):
            self.wanted = who(wish)
        return bool(self.wanted)


def over_ranks(wish, op=dist.ReduceOp.MAX):
    """A wish, or what else is a number, reduced over the ranks."""
    number = torch.tensor(int(wish))
    if dist.is_initialized():
        dist.all_reduce(number, op)
    return number.item()


def who(wish):
    """The ranks with this wish."""
    wishes = [wish]
    if dist.is_initialized():
        wishes = wishes * dist.get_world_size()
        dist.all_gather_object(wishes, wish)
    return [rank for rank, wish in enumerate(wishes) if wish]


def number_of_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


@right("stop_together")
class SumsABitForEachRankAndReturnsControl(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if state.global_step % self.every:
            return control
        wishes = torch.tensor([float(self.wish) * 2**args.process_index])
        if args.world_size > 1:
            dist.all_reduce(wishes)
        bits = int(wishes)
        self.wanted = [rank for rank in range(args.world_size) if bits >> rank & 1]
        control.should_training_stop = control.should_training_stop or bits > 0
        return control


@right("stop_together")
class AnyoneStopsAll(Asking):
    """And keeps NumPy's numbers."""

    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step)
        if self.anyone(state):
            self.wanted = np.array(self.wanted)
            control.should_training_stop = True


@right("stop_together")
class WithAccelerate(Asking):
    """Counts the steps itself, and begins anew with each training."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.steps, self.mine = 0, []

    def on_step_end(self, args, state, control, **kwargs):
        from accelerate.utils import gather_object

        self.steps += 1
        if self.should_stop(self.steps):
            self.mine = [args.process_index]
        if self.steps % self.every == 0:
            self.wanted = tuple(gather_object(self.mine))
        if self.wanted:
            return replace(control, should_training_stop=True)


@right("stop_together")
class OneAfterTheOther(Asking):
    """A broadcast from each rank."""

    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if not self.meets(state):
            return
        for rank in range(args.world_size):
            of_rank = torch.tensor(self.wish)
            if dist.is_initialized():
                dist.broadcast(of_rank, rank)
            if of_rank:
                self.wanted.append(rank)
        control.should_training_stop |= len(self.wanted) > 0


@wrong("stop_together", "the ranks communicate after every [23] steps only")
class AsInTheLesson(Asking):
    """Lesson 8's Stop, with together=True."""

    def on_step_end(self, args, state, control, **kwargs):
        wanted = torch.tensor(int(self.should_stop(state.global_step)))
        if dist.is_initialized():
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if wanted:
            control.should_training_stop = True


@wrong("stop_together", "the ranks communicate after every [23] steps only")
class MeetsInEachStepButStopsRarely(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.wanted = who(self.ask(state))
        if self.wanted and self.meets(state):
            control.should_training_stop = True


@wrong("stop_together", "the ranks communicate after every [23] steps only")
class CountsFromTheFirstStep(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if state.global_step % self.every == 1:
            self.wanted = who(self.wish)
        if self.wanted:
            control.should_training_stop = True


@wrong("stop_together", "communicate after every [23] steps only")
class AlwaysThree(Asking):
    def __init__(self, should_stop, every):
        super().__init__(should_stop, 3)

    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "a wish is lost if it comes in a step in which")
class ForgetsItsWish(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.should_stop(state.global_step)
        if self.meets(state):
            self.wanted = who(wish)
        if self.wanted:
            control.should_training_stop = True


@wrong("stop_together", "call it in every step, also where the ranks do not")
class AsksWhereTheyMeet(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.meets(state) and self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "on a single process, too")
class StopsAtOnceWhenAlone(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if not dist.is_initialized():
            control.should_training_stop |= self.wish
        elif self.meets(state):
            self.wanted = who(self.wish)
            control.should_training_stop |= bool(self.wanted)


@wrong("stop_together", "wanted after the training[^$]*list of ranks: .. until")
class KnowsOnlyThatSomeoneWants(Asking):
    def __init__(self, should_stop, every):
        self.should_stop, self.every, self.wish = should_stop, every, False

    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state) and over_ranks(self.wish):
            control.should_training_stop = True


@wrong("stop_together", "each rank lists only itself|does it list only its own wish")
class KnowsOnlyItself(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state) and over_ranks(self.wish):
            self.wanted = [args.process_index] if self.wish else []
            control.should_training_stop = True


@wrong("stop_together", "does it list only its own wish, or has only one rank")
class TellsRankZeroWhoItWas(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            self.wanted = self.wanted if args.process_index == 0 else []
            control.should_training_stop = True


@wrong("stop_together", "list the ranks whose wish is true")
class KeepsTheWishes(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state):
            wishes = [self.wish] * number_of_ranks()
            if dist.is_initialized():
                dist.all_gather_object(wishes, self.wish)
            if any(wishes):
                self.wanted = wishes
                control.should_training_stop = True


@wrong("stop_together", "list the ranks in order")
class ListsThemBackwards(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            self.wanted = self.wanted[::-1]
            control.should_training_stop = True


@wrong("stop_together", "a rank that wanted to stop is missing")
class ListsTheLatest(Asking):
    """All stop for any wish so far, but only those of this step are listed."""

    def on_step_end(self, args, state, control, **kwargs):
        now = self.should_stop(state.global_step)
        self.wish = self.wish or now
        if self.meets(state) and over_ranks(self.wish):
            self.wanted = who(now) or who(self.wish)
            control.should_training_stop = True


@wrong("stop_together", "several may want it, and each wish counts")
class KnowsTheHighestRank(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state):
            highest = over_ranks((args.process_index + 1) * self.wish)
            self.wanted = [highest - 1] if highest else []
            control.should_training_stop |= highest > 0


@wrong("stop_together", "communicate after every [23] steps only")
class WaitsForAllInEachStep(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            dist.barrier()
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "self.wanted[^$]*What belongs to one training")
class ListsThoseOfAllTrainings(Asking):
    wanted = []

    def __init__(self, should_stop, every):
        self.should_stop, self.every, self.wish = should_stop, every, False

    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state) and (wanted := who(self.wish)):
            self.wanted += wanted
            control.should_training_stop = True


@wrong("stop_together", "takes 2 positional arguments|missing 1|positional arg", status="your code raised")
class TakesNoEvery(TrainerCallback):
    def __init__(self, should_stop):
        self.should_stop = should_stop


@wrong("stop_together", "no rank has waited for the decision of the others")
class EachForItself(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.should_stop(state.global_step):
            control.should_training_stop = True


@wrong("stop_together", "no rank has waited for the decision of the others")
class LeavesANote(Asking):
    """A store knows what has been written so far, and waits for nobody."""

    trainings = 0

    def __init__(self, should_stop, every):
        super().__init__(should_stop, every)
        LeavesANote.trainings += 1
        self.training = LeavesANote.trainings

    def on_step_end(self, args, state, control, **kwargs):
        wish, name = self.ask(state), f"stop {self.training} {state.global_step}"
        if dist.is_initialized() and self.meets(state):
            store = dist.distributed_c10d._get_default_store()
            if wish:
                store.set(name, "1")
            wish = wish or store.check([name])
        if wish and self.meets(state):
            control.should_training_stop = True


@wrong("stop_together", "no rank has waited for the decision of the others")
class EachForItselfAtTheEndOfTheEpoch(Asking):
    wish = False

    def on_step_end(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step) or self.wish

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.wish:
            control.should_training_stop = True


@wrong("stop_together", "rank [0-2] goes on with the epoch[^$]*no rank has waited for the decision of the others")
class EachForItselfBetweenSteps(Asking):
    """Stops in the midst of a step, and without its gradients the others cannot end
    it.
    """

    def on_step_end(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step and self.wish:
            control.should_training_stop = True


@wrong("stop_together", "call it in every step that is a multiple of `every`, even if")
class TellsOnlyOfAStop(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.ask(state) and self.meets(state) and over_ranks(1):
            control.should_training_stop = True


@wrong("stop_together", "call it in every step that is a multiple of `every`, even if")
class GathersOnlyForAStop(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.ask(state) and self.meets(state):
            if dist.is_initialized():
                dist.barrier()
            control.should_training_stop = True


@wrong("stop_together", "reduce and gather give the result to one rank")
class ReducesToRankZero(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = torch.tensor(int(self.ask(state)))
        if not self.meets(state):
            return
        if dist.is_initialized():
            dist.reduce(wish, dst=0)
        if wish and args.process_index == 0:
            control.should_training_stop = True


@wrong("stop_together", "only rank 0 decides")
class BroadcastsFromRankZero(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = torch.tensor(int(self.ask(state)))
        if not self.meets(state):
            return
        if dist.is_initialized():
            dist.broadcast(wish, 0)
        if wish:
            control.should_training_stop = True


@wrong("stop_together", "only rank 1 decides")
class BroadcastsFromTheLastRank(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = torch.tensor(int(self.ask(state)))
        if not self.meets(state):
            return
        if dist.is_initialized():
            dist.broadcast(wish, dist.get_world_size() - 1)
        if wish:
            control.should_training_stop = True


@wrong("stop_together", "every rank must call its own should_stop")
class AsksOnRankZero(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = state.is_world_process_zero and self.ask(state)
        if self.meets(state) and over_ranks(wish):
            control.should_training_stop = True


@wrong("stop_together", "they stop only if all ranks, or most of them, want to")
class TakesTheMinimum(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.ask(state)
        if self.meets(state) and over_ranks(wish, dist.ReduceOp.MIN):
            control.should_training_stop = True


@wrong("stop_together", "they stop only if all ranks, or most of them, want to")
class TakesTheMean(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.ask(state)
        if not self.meets(state):
            return
        if over_ranks(wish, dist.ReduceOp.SUM) / number_of_ranks() > 0.5:
            control.should_training_stop = True


@wrong("stop_together", "on 3 ranks[^$]*they stop only if all ranks, or most of them, want to")
class TakesHalfOfThem(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.ask(state)
        if not self.meets(state):
            return
        self.wanted = who(wish)
        if len(self.wanted) >= number_of_ranks() / 2:
            control.should_training_stop = True


@wrong("stop_together", "they stop only if all ranks, or most of them, want to")
class LetsAnyoneGoOn(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.ask(state)
        if self.meets(state) and not over_ranks(not wish):
            control.should_training_stop = True


@wrong("stop_together", "several at the same time cannot")
class ExpectsASumOfOne(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wish = self.ask(state)
        if self.meets(state) and over_ranks(wish, dist.ReduceOp.SUM) == 1:
            control.should_training_stop = True


@wrong("stop_together", "decide in on_step_end")
class DecidesAtTheEndOfTheEpoch(Asking):
    wish = False

    def on_step_end(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step) or self.wish

    def on_epoch_end(self, args, state, control, **kwargs):
        if over_ranks(self.wish):
            control.should_training_stop = True


@wrong("stop_together", "called at the end of each epoch|call it at the end of every step")
class AsksAtTheEndOfTheEpoch(Asking):
    def on_epoch_end(self, args, state, control, **kwargs):
        if over_ranks(self.ask(state)):
            control.should_training_stop = True


@wrong("stop_together", "it comes one step late")
class WaitsInTheNextStep(Asking):
    work = None

    def on_step_end(self, args, state, control, **kwargs):
        if self.work:
            self.work.wait()
            self.work = None
            if self.total:
                control.should_training_stop = True
        self.total = torch.tensor(int(self.ask(state)))
        if self.meets(state) and dist.is_initialized():
            self.work = dist.all_reduce(self.total, async_op=True)


@wrong("stop_together", "decide in the same step in which the ranks communicate")
class StopsWhereTheyMeetNext(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.meets(state) and self.wanted:
            control.should_training_stop = True
        self.anyone(state)


@wrong("stop_together", "the first step is 1: call it in on_step_end")
class DecidesWhenAStepBegins(Asking):
    def on_step_begin(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "the first step is 1: call it in on_step_end")
class CountsFromZero(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step - 1) or self.wish
        if self.meets(state) and over_ranks(self.wish):
            control.should_training_stop = True


@wrong("stop_together", "called more than once per step")
class AsksInEachMicroBatch(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True

    on_substep_end = on_step_end


@wrong("stop_together", "called more than once per step")
class AsksTwice(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step) or self.wish
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "the end of every step, until training stops")
class AsksInEverySecondStep(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2:
            self.ask(state)
        if self.meets(state) and over_ranks(self.wish):
            control.should_training_stop = True


@wrong("stop_together", "takes the number of the step, state.global_step")
class GivesTheState(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if over_ranks(self.should_stop(state) and self.meets(state)):
            control.should_training_stop = True


@wrong("stop_together", "takes the number of the step, state.global_step")
class GivesTheEpoch(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if over_ranks(self.should_stop(state.epoch) and self.meets(state)):
            control.should_training_stop = True


@wrong("stop_together", "but was overruled")
class TakesBackWhatOthersWant(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.anyone(state)


@wrong("stop_together", "is the test of should_stop inverted")
class TurnsItRound(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self.meets(state) and not self.anyone(state)
        if not self.meets(state):
            self.ask(state)


@wrong("stop_together", "should_epoch_stop ends only the current epoch")
class StopsTheEpoch(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_epoch_stop = True


@wrong("stop_together", "Trainer checks control.should_training_stop")
class ForgetsTheControl(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            self.should_training_stop = True


@wrong("stop_together", "loses the requests of other callbacks")
class MakesANewControl(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            return TrainerControl(should_training_stop=True)


@wrong("stop_together", "has set it to False, but another callback has asked")
class TurnsLoggingOff(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True
            control.should_log = False


@wrong("stop_together", "has set it to False, but another callback has asked")
class SavesNothingBeforeTheEnd(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        stop = self.anyone(state)
        control.should_training_stop |= bool(stop)
        control.should_save = bool(stop)


@wrong("stop_together", "What belongs to one training belongs into self")
class RemembersForAll(Asking):
    stopped = []

    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            self.stopped.append(state.global_step)
        if self.stopped and self.meets(state):
            control.should_training_stop = True


@wrong("stop_together", "change the given one, and return it or None")
class ReturnsTheDecision(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        return self.anyone(state)


@wrong("stop_together", r"is_initialized\(\) first")
class NeedsAGroup(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        wishes = [self.ask(state)]
        if not self.meets(state):
            return
        wishes *= args.world_size
        dist.all_gather_object(wishes, self.wish)
        self.wanted = [rank for rank, wish in enumerate(wishes) if wish]
        if self.wanted:
            control.should_training_stop = True


@wrong("stop_together", "StopIteration: time is up", status="your code raised")
class RaisesIt(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            raise StopIteration("time is up")


@wrong("stop_together", "left with sys.exit", status="your code raised")
class Leaves(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        if self.should_stop(state.global_step):
            time.sleep(0.1)
            raise SystemExit(0)


@wrong("stop_together", "", status="not attempted")
class NotBegun(TrainerCallback):
    def __init__(self, should_stop, every):
        raise NotImplementedError


@wrong("stop_together", "but was overruled")
class DecidesForTrainerWhereTheyMeet(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state):
            self.wanted = who(self.wish)
            control.should_training_stop = bool(self.wanted)


@wrong("stop_together", "but was overruled")
class GoesOnWhereTheyDoNotMeet(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        stop = self.anyone(state)
        if stop or not self.meets(state):
            control.should_training_stop = stop


@wrong("stop_together", "self.wanted at the end of step[^$]*under another name")
class ListsItselfAtOnce(Asking):
    """Its own wish is in the list before the ranks communicate."""

    def on_step_end(self, args, state, control, **kwargs):
        if self.ask(state):
            self.wanted = [args.process_index]
        if self.meets(state):
            self.wanted = who(self.wish)
            control.should_training_stop |= len(self.wanted) > 0


@wrong("stop_together", "self.wanted at the end of step[^$]*is .., on every rank")
class KnowsNothingUntilTheEnd(Asking):
    def __init__(self, should_stop, every):
        super().__init__(should_stop, every)
        self.wanted = None

    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state) and (wanted := who(self.wish)):
            self.wanted = wanted
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.wanted = self.wanted or []


@wrong("stop_together", "collectives in on_train_end[^$]*communicate in on_step_end only")
class AsksWhoItWasInTheEnd(Asking):
    def on_step_end(self, args, state, control, **kwargs):
        self.ask(state)
        if self.meets(state) and over_ranks(self.wish):
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.wanted = who(self.wish)


@wrong("stop_together", "collectives in on_train_begin[^$]*communicate in on_step_end only")
class WaitsForAllBeforeItBegins(Asking):
    def on_train_begin(self, args, state, control, **kwargs):
        if dist.is_initialized():
            dist.barrier()

    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "collectives in __init__[^$]*communicate in on_step_end only")
class AgreesOnEvery(Asking):
    def __init__(self, should_stop, every):
        super().__init__(should_stop, over_ranks(every))

    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True


@wrong("stop_together", "call it in on_step_end")
class AsksAheadOfTheStep(Asking):
    def on_step_begin(self, args, state, control, **kwargs):
        self.wish = self.should_stop(state.global_step + 1) or self.wish

    def on_step_end(self, args, state, control, **kwargs):
        if self.meets(state):
            self.wanted = who(self.wish)
            control.should_training_stop |= len(self.wanted) > 0


@right("stop_together")
class WithAMaskOfBooleans(Asking):
    """An all-gather into a tensor, and setattr."""

    def on_step_end(self, args, state, control, **kwargs):
        self.wish |= self.should_stop(state.global_step)
        if divmod(state.global_step, self.every)[1]:
            return
        mask = torch.tensor([self.wish], dtype=torch.uint8)
        if args.world_size > 1:
            parts = [torch.empty_like(mask) for _ in range(args.world_size)]
            dist.all_gather(parts, mask)
            mask = torch.cat(parts)
        if mask.any():
            self.wanted.extend(torch.where(mask)[0].tolist())
            setattr(control, "should_training_stop", True)  # noqa: B010


@right("stop_together")
class LeavesTheOtherEventsAlone(Asking):
    """Notes things in other events, without messages; returns what it was given."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.monotonic()
        return control

    def on_step_end(self, args, state, control, **kwargs):
        if self.anyone(state):
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args, state, control, **kwargs):
        self.seconds = time.monotonic() - self.started


@wrong("plan", "")
def plans_nan(*_, **__):
    return [float("nan")] * 4


# ---- script ----


IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, StackDataset
from transformers import Trainer, TrainingArguments
"""
SCRIPT = """
def script(network, train_set, test_set, batch_size, every, epochs, max_norm):
    loader = DataLoader(train_set, batch_size, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    updates = epochs * len(loader) // every
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=updates)
    network.train()
    for epoch in range(epochs):
        for number, (inputs, labels) in enumerate(loader, 1):
            loss = F.cross_entropy(network(inputs), labels)
            (loss / every).backward()
            if number % every == 0:
                nn.utils.clip_grad_norm_(network.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    network.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(test_set, batch_size):
            right += (network(inputs).argmax(dim=1) == labels).sum().item()
    torch.save(network.state_dict(), "model.pt")
    return updates, right / len(test_set)
"""
PORTED = """
class Named(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return {"logits": self.network(inputs)}

def collate(samples):
    inputs, labels = zip(*samples)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

def mean_loss(outputs, labels, num_items_in_batch):
    total = F.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / num_items_in_batch

def accuracy(prediction):
    right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    return {"accuracy": right.mean()}

def script(network, train_set, test_set, batch_size, every, epochs, max_norm):
    settings = TrainingArguments(
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        lr_scheduler_type="linear",
        max_grad_norm=max_norm,
        label_names=["labels"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    settings.gradient_accumulation_steps = every // settings.world_size
    model = Named(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    trainer = Trainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=collate,
        compute_loss_func=mean_loss,
        compute_metrics=accuracy,
        optimizers=(optimizer, None),
    )
    trainer.train()
    share = trainer.evaluate()["eval_accuracy"]
    if settings.process_index == 0:
        torch.save(network.state_dict(), "model.pt")
    return trainer.state.global_step, share
"""


def ports(text, *edits):
    """A port with these edits, (old, new), each of which must be possible."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return (Source("script", IMPORTS, text),)


def wrong_port(name, pattern, *edits, text=PORTED, status="failed"):
    """Our port, or another text, with these edits."""

    def answer():
        return ports(text, *edits)

    answer.__name__ = name
    wrong("script", pattern, status, several=True)(answer)


def right_port(name, *edits):
    wrong_port(name, None, *edits)


LOSS = """class MeanLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss

def script("""
OWN_PLAN = "LinearLR(optimizer, 1.0, 0.0, epochs * len(train_set) // batch_size // every)"
ALONE = """    right = seen = 0
    network.eval()
    with torch.no_grad():
        for number in range(settings.process_index, len(test_set), settings.world_size):
            inputs, label = test_set[number]
            right += int(network(inputs[None]).argmax() == label)
            seen += 1
"""
EVALUATE = '    share = trainer.evaluate()["eval_accuracy"]\n'
SAVE = "    if settings.process_index == 0:\n        torch"

right_port("in_one_trainer")
right_port(
    "the_model_computes_its_loss",
    ("def forward(self, inputs):\n        return {", "def forward(self, inputs, labels):\n        return {"),
    ('{"logits": self.network(inputs)}', '{"loss": F.cross_entropy(x := self.network(inputs), labels), "logits": x}'),
    ("        compute_loss_func=mean_loss,\n", ""),
)
right_port(
    "with_a_trainer_of_its_own",
    ("def script(", LOSS),
    ("trainer = Trainer(", "trainer = MeanLoss("),
    ("        compute_loss_func=mean_loss,\n", ""),
)
right_port(
    "trainers_own_sgd",
    ("        optimizers=(optimizer, None),\n", ""),
    ('lr_scheduler_type="linear"', 'optim="sgd", optim_args="momentum=0.9", learning_rate=0.2'),
)
right_port("a_schedule_of_its_own", ("(optimizer, None)", f"(optimizer, {OWN_PLAN})"))
right_port(
    "dicts_and_predict",
    ("        data_collator=collate,\n", ""),
    ("train_dataset=train_set", "train_dataset=StackDataset(inputs=train_set.inputs, labels=train_set.labels)"),
    ("eval_dataset=test_set", "eval_dataset=StackDataset(inputs=test_set.inputs, labels=test_set.labels)"),
    ('trainer.evaluate()["eval_accuracy"]', 'float(trainer.predict(trainer.eval_dataset).metrics["test_accuracy"])'),
)
right_port(
    "counts_its_share_by_hand",
    (EVALUATE, ALONE + "    counts = torch.tensor([right])\n    if dist.is_initialized():\n        dist.all_reduce(counts)\n"
     "    share = counts.item() / len(test_set)\n"),
)  # fmt: skip

wrong_port("the_script_as_given", "use_cpu=True", text=SCRIPT)
wrong_port("forgets_use_cpu", "use_cpu=True", ("        use_cpu=True,\n", ""))
wrong_port("multiplies_the_global_batch", "the global batch is multiplied", ("every // settings.world_size", "every"))
wrong_port("no_accumulation", "set gradient_accumulation_steps", ("= every // settings.world_size", "= 1"))
wrong_port(
    "batch_size_left_out",
    "per_device_train_batch_size=batch_size",
    ("        per_device_train_batch_size=batch_size,\n", ""),
)
wrong_port("divides_the_micro_batch", "per_device_train_batch_size=batch_size", ("=batch_size,", "=batch_size // 2,"))
wrong_port("three_epochs", "set num_train_epochs", ("        num_train_epochs=epochs,\n", ""))
wrong_port(
    "in_the_order_of_the_data",
    "shuffles, anew in each epoch",
    ('"linear"', '"linear", train_sampling_strategy="sequential"'),
)
wrong_port("a_constant_rate", "stays as it is", ('"linear"', '"constant"'))
wrong_port("a_cosine", "lr_scheduler_type='linear'", ('"linear"', '"cosine"'))
wrong_port("a_warm_up", "without a warm-up", ('"linear"', '"linear", warmup_steps=2'))
wrong_port("rate_times_processes", "multiplied by the number of processes", ("lr=0.2", "lr=0.2 * settings.world_size"))
wrong_port("trainers_own_optimizer", "its default, 5e-5", ("        optimizers=(optimizer, None),\n", ""))
wrong_port(
    "adamw_with_the_right_rate",
    "the optimizer was AdamW",
    ("        optimizers=(optimizer, None),\n", ""),
    ('"linear"', '"linear", learning_rate=0.2'),
)
wrong_port("a_schedule_for_the_batches", "plan it for the updates", ("(optimizer, None)", f"(optimizer, {OWN_PLAN})"),
           (" // batch_size // every", " // batch_size"))  # fmt: skip
wrong_port(
    "a_schedule_for_one_process",
    "plan it for the updates",
    ("(optimizer, None)", f"(optimizer, {OWN_PLAN})"),
    ("batch_size // every)", "batch_size // settings.gradient_accumulation_steps)"),
)
wrong_port("without_momentum", "is it SGD with momentum", (", momentum=0.9", ""))
wrong_port("without_clipping", "are not clipped", ("max_grad_norm=max_norm", "max_grad_norm=0.0"))
wrong_port("clips_to_one", "set max_grad_norm", ("        max_grad_norm=max_norm,\n", ""))
wrong_port("a_mean_in_its_loss", "the gradients are too large", (', reduction="sum")\n    return total / num_items_in_batch',
                                                               ")\n    return total"))  # fmt: skip
wrong_port("a_sum_in_its_loss", "the gradients are too large", ("total / num_items_in_batch", "total"))
wrong_port(
    "divides_the_loss_by_the_processes",
    "divided by the number of processes twice",
    (
        "total / num_items_in_batch",
        "total / num_items_in_batch / (dist.get_world_size() if dist.is_initialized() else 1)",
    ),
)
wrong_port(
    "a_loss_from_the_network_within",
    "must come from the model",
    ("def script(", LOSS),
    ("trainer = Trainer(", "trainer = MeanLoss("),
    ("        compute_loss_func=mean_loss,\n", ""),
    ("outputs = model(**inputs)", "outputs = self.model(**inputs)"),
)
wrong_port(
    "trains_a_copy_of_it",
    "another network was trained",
    ("Named(network)", "Named(__import__('copy').deepcopy(network))"),
)
wrong_port(
    "wraps_it_before_trainer_does",
    "sent with each micro-batch",
    ("model = Named(network)", "model = Named(network)\n    if settings.world_size > 1:\n"
     "        model = nn.parallel.DistributedDataParallel(model)"),
    ('label_names=["labels"]', 'label_names=["labels"], remove_unused_columns=False'),
)  # fmt: skip
wrong_port(
    "returns_the_accuracy_alone", "return two numbers", ("return trainer.state.global_step, share", "return share")
)
wrong_port(
    "returns_the_other_order",
    "the updates first, and then the accuracy",
    ("trainer.state.global_step, share", "share, trainer.state.global_step"),
)
wrong_port(
    "counts_micro_batches",
    "global_step counts the updates",
    ("trainer.state.global_step, ", "trainer.state.global_step * every, "),
)
wrong_port("accuracy_of_this_process", "this process's own", (EVALUATE, ALONE + "    share = right / seen\n"))
wrong_port(
    "right_ones_of_this_process", "this process's own", (EVALUATE, ALONE + "    share = right / len(test_set)\n")
)
wrong_port("a_number_of_samples", "not their number", ("right.mean()", "int(right.sum())"))
wrong_port(
    "everybody_evaluates_everything",
    "share the evaluation",
    (EVALUATE, ALONE.replace("settings.process_index, len(test_set), settings.world_size", "len(test_set)")
     + "    share = right / seen\n"),
)  # fmt: skip
wrong_port("every_process_saves", "your own lines run on all processes", (SAVE, "    torch"))
wrong_port("saves_nothing", "process 0 saves", ('torch.save(network.state_dict(), "model.pt")', "pass"))
wrong_port("saves_the_wrapper", "the names in a wrapper", ("network.state_dict()", "model.state_dict()"))
wrong_port(
    "saves_by_trainer",
    "process 0 saves",
    (SAVE + '.save(network.state_dict(), "model.pt")', '    trainer.save_model("model")'),
)
wrong_port(
    "nothing_written_yet", "", status="not attempted", text="def script(*given):\n    raise NotImplementedError\n"
)
right_port("test_batches_of_another_size", ("label_names", "per_device_eval_batch_size=250,\n        label_names"))
right_port("evaluates_after_each_epoch", ('save_strategy="no"', 'save_strategy="no",\n        eval_strategy="epoch"'))
wrong_port(
    "drops_the_last_batch", "does its loader drop", ("label_names", "dataloader_drop_last=True,\n        label_names")
)
wrong_port(
    "divides_by_all_micro_batches",
    "by the number of micro-batches, too",
    ("mean_loss(outputs, labels, num_items_in_batch)", "mean_loss(outputs, labels, num_items_in_batch, every=1)"),
    ("total / num_items_in_batch", "total / num_items_in_batch / every"),
    ("=mean_loss,", "=lambda *batch, **options: mean_loss(*batch, **options, every=every),"),
)
wrong_port(
    "a_plain_loader_of_its_own",
    "every process goes through all samples",
    (
        "    trainer.train()\n",
        "    trainer.get_train_dataloader = lambda: DataLoader(train_set, batch_size, shuffle=True, collate_fn=collate)\n"
        "    trainer.train()\n",
    ),
)
wrong_port(
    "evaluates_first",
    "no evaluate.. before train",
    ("    trainer.train()\n", "    trainer.evaluate()\n    trainer.train()\n"),
)
wrong_port("saves_the_network_itself", "save the state_dict", (".state_dict()", ""), status="your code raised")


# ---- weighted_trainer ----

WEIGHTED_IMPORTS = """
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer
"""
WEIGHTED = """
class WeightedTrainer(Trainer):
    def __init__(self, *given, weights, **named):
        super().__init__(*given, **named)
        self.weights = weights
        self.lowest, self.best = math.inf, None

    def get_train_dataloader(self):
        data, size = self.train_dataset, self.args.per_device_train_batch_size
        sampler, collate = DistributedSampler(data), self.data_collator
        loader = DataLoader(data, size, sampler=sampler, collate_fn=collate)
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels, self.weights)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *given, **named):
        metrics = super().evaluate(*given, **named)
        if metrics["eval_error"] < self.lowest:
            self.lowest = metrics["eval_error"]
            self.best = self.model.state_dict()
        return metrics
"""
SAMPLER = "sampler, collate = DistributedSampler(data), self.data_collator"
LOADER = "DataLoader(data, size, sampler=sampler, collate_fn=collate)"
OWN_LOADER = ("def get_train_dataloader", "def loader_that_nobody_asks_for")
OWN_LOSS = 'F.cross_entropy(outputs["logits"], labels, self.weights)'
OWN_MEAN = (OWN_LOSS, OWN_LOSS[:-1] + ', reduction="none").mean()')
STATE = "self.best = self.model.state_dict()"
OWN_COPY = (STATE, "self.best = copy.deepcopy(self.model.state_dict())")


def loses(loss):
    return (OWN_LOSS, loss)


def wrong_weighted(name, pattern, *edits, status="failed"):
    """The given program with these edits, (old, new), each of which must be possible."""

    def answer():
        text = WEIGHTED
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        return (Source("WeightedTrainer", WEIGHTED_IMPORTS, text),)

    answer.__name__ = name
    wrong("weighted_trainer", pattern, status, several=True)(answer)


def right_weighted(name, *edits):
    wrong_weighted(name, None, *edits)


DIVIDED_TWICE, OF_MICRO_BATCHES = "divided among the ranks twice", "divided by the sum of its own weights"
NO_COPY = "these tensors are the model's own"

wrong_weighted("weighted_as_given", DIVIDED_TWICE)
wrong_weighted("weighted_with_two_loaders", DIVIDED_TWICE, OWN_MEAN, OWN_COPY)
wrong_weighted("weighted_with_loader_and_loss", DIVIDED_TWICE, OWN_COPY)
wrong_weighted("weighted_with_loader_and_alias", DIVIDED_TWICE, OWN_MEAN)
wrong_weighted("weighted_by_micro_batches", OF_MICRO_BATCHES, OWN_LOADER, OWN_COPY)
wrong_weighted("weighted_by_micro_batches_and_alias", OF_MICRO_BATCHES, OWN_LOADER)
wrong_weighted("weighted_with_an_alias", NO_COPY, OWN_LOADER, OWN_MEAN)
wrong_weighted(
    "weighted_with_a_shallow_copy", NO_COPY, OWN_LOADER, OWN_MEAN, (STATE, "self.best = dict(self.model.state_dict())")
)
wrong_weighted(
    "weighted_detached",
    NO_COPY,
    OWN_LOADER,
    OWN_MEAN,
    (STATE, "self.best = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}"),
)

right_weighted("weighted_without_a_loader", OWN_LOADER, OWN_MEAN, OWN_COPY)
right_weighted(
    "weighted_prepares_a_plain_loader",
    (SAMPLER, "collate = self.data_collator"),
    (LOADER, "DataLoader(data, size, shuffle=True, collate_fn=collate)"),
    OWN_MEAN,
    OWN_COPY,
)
right_weighted(
    "weighted_samples_for_one_rank",
    ("DistributedSampler(data)", "DistributedSampler(data, num_replicas=1, rank=0)"),
    OWN_MEAN,
    OWN_COPY,
)
right_weighted(
    "weighted_tells_its_sampler_the_epoch",
    ("return self.accelerator.prepare(loader)", "loader.set_epoch = sampler.set_epoch\n        return loader"),
    OWN_MEAN,
    OWN_COPY,
)
right_weighted(
    "weighted_by_hand",
    OWN_LOADER,
    loses('(-outputs["logits"].log_softmax(1).gather(1, labels[:, None])[:, 0] * self.weights[labels]).mean()'),
    (STATE, "self.best = {name: value.detach().clone() for name, value in self.model.state_dict().items()}"),
)
right_weighted(
    "weighted_sum_over_labels", OWN_LOADER, loses(OWN_LOSS[:-1] + ', reduction="sum") / len(labels)'), OWN_COPY
)
right_weighted(
    "weighted_undoes_the_division",
    OWN_LOADER,
    loses(OWN_LOSS + " * self.weights[labels].mean()"),
    (
        STATE,
        "self.best = type(self.model.state_dict())((name, value + 0) for name, value in self.model.state_dict().items())",
    ),
)
right_weighted(
    "weighted_counts_items",
    OWN_LOADER,
    OWN_COPY,
    ("        self.weights = weights\n", "        self.weights, self.model_accepts_loss_kwargs = weights, True\n"),
    loses(
        'F.cross_entropy(outputs["logits"], labels, self.weights, reduction="sum")\n'
        "        n = dist.get_world_size()\n"
        "        loss = loss / len(labels) if num_items_in_batch is None else n * loss / num_items_in_batch"
    ),
)
right_weighted(
    "weighted_by_a_function_for_the_loss",
    OWN_LOADER,
    OWN_COPY,
    (
        "        self.weights = weights\n",
        "        self.weights = weights\n        self.compute_loss_func = self.of_labels\n",
    ),
    (
        "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n"
        '        labels = inputs.pop("labels")\n        outputs = model(**inputs)\n',
        "    def of_labels(self, outputs, labels, num_items_in_batch=None):\n",
    ),
    loses(OWN_LOSS[:-1] + ', reduction="sum")'),
    (
        "return (loss, outputs) if return_outputs else loss",
        "return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)",
    ),
)

NO_PREPARE = ("return self.accelerator.prepare(loader)", "return loader")
wrong_weighted("weighted_forgets_set_epoch", "shuffled anew in each epoch", NO_PREPARE, OWN_MEAN, OWN_COPY)
wrong_weighted(
    "weighted_in_the_order_of_the_data",
    "shuffled anew in each epoch",
    (SAMPLER, "collate = self.data_collator"),
    (LOADER, "DataLoader(data, size, collate_fn=collate)"),
    OWN_MEAN,
    OWN_COPY,
)
wrong_weighted(
    "weighted_all_samples_on_each_rank",
    "each rank goes through all samples",
    NO_PREPARE,
    (SAMPLER, "collate = self.data_collator"),
    (LOADER, "DataLoader(data, size, shuffle=True, collate_fn=collate)"),
    OWN_MEAN,
    OWN_COPY,
)
wrong_weighted(
    "weighted_the_same_share_on_all_ranks",
    "once, on one",
    NO_PREPARE,
    ("DistributedSampler(data)", "DistributedSampler(data, rank=0)"),
    OWN_MEAN,
    OWN_COPY,
)
wrong_weighted(
    "weighted_other_micro_batches",
    "per_device_train_batch_size samples",
    NO_PREPARE,
    (LOADER, LOADER.replace("size,", "1,")),
    OWN_MEAN,
    OWN_COPY,
)
wrong_weighted(
    "weighted_without_weights",
    "the weight of its class is missing",
    OWN_LOADER,
    OWN_COPY,
    loses(OWN_LOSS.replace(", self.weights", "")),
)
wrong_weighted("weighted_sum", "the mean is needed", OWN_LOADER, OWN_COPY, loses(OWN_LOSS[:-1] + ', reduction="sum")'))
for name, pattern, more in [
    ("accumulation_twice", "by the number of micro-batches twice", "/ self.current_gradient_accumulation_steps"),
    ("accumulation_undone", "too large, by the number of micro-batches", "* self.current_gradient_accumulation_steps"),
    ("ranks_twice", "though DDP already takes the mean", "/ dist.get_world_size()"),
    ("settings_twice", "by the number of micro-batches twice", "/ self.args.gradient_accumulation_steps"),
    ("settings_undone", "too large, by the number of micro-batches", "* self.args.gradient_accumulation_steps"),
    (
        "by_the_settings",
        "it has fewer than gradient_accumulation_steps",
        "* self.current_gradient_accumulation_steps / self.args.gradient_accumulation_steps",
    ),
    ("times_ranks", "multiplied by the number of ranks", "* self.accelerator.num_processes"),
    ("labels_twice", "the samples of the micro-batch twice", "/ len(labels)"),
]:
    wrong_weighted(f"weighted_{name}", pattern, OWN_LOADER, OWN_COPY, loses(f"{OWN_MEAN[1]} {more}"))
wrong_weighted(
    "weighted_by_all_weights_of_the_ranks",
    "micro-batches|by the sum of the weights|Follow one sample",
    OWN_LOADER,
    OWN_COPY,
    loses(
        'F.cross_entropy(outputs["logits"], labels, self.weights, reduction="sum")\n'
        "        total = self.weights[labels].sum()\n        dist.all_reduce(total)\n"
        "        loss = loss * dist.get_world_size() / total"
    ),
)
wrong_weighted(
    "weighted_from_the_model_within",
    "has to come from the model",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ("outputs = model(", "outputs = self.model("),
)
wrong_weighted(
    "weighted_keeps_the_last",
    "of evaluation 3",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ('if metrics["eval_error"] < self.lowest', "if True"),
)
wrong_weighted(
    "weighted_keeps_the_highest",
    "of evaluation [123]: `best`",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ("< self.lowest", "> self.lowest"),
    ("math.inf", "-math.inf"),
)
wrong_weighted(
    "weighted_keeps_the_first",
    "of evaluation 1: `best`",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ('if metrics["eval_error"] < self.lowest', "if self.best is None"),
)
wrong_weighted(
    "weighted_keeps_the_last_of_equals",
    "so it is no better",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ("< self.low", "<= self.low"),
)
wrong_weighted(
    "weighted_keeps_it_on_rank_0",
    "each rank keeps the state_dict",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ('if metrics["eval_error"] < self.lowest', 'if dist.get_rank() == 0 and metrics["eval_error"] < self.lowest'),
)
wrong_weighted(
    "weighted_keeps_the_model",
    "each rank keeps the state_dict",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, "self.best = copy.deepcopy(self.model)"),
)
wrong_weighted(
    "weighted_keeps_before_it_evaluates",
    "of before the training|of evaluation",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, "self.best = before"),
    ("        metrics = super()", "        self.model.zero_grad()\n        metrics = super()"),
    ('self.lowest = metrics["eval_error"]', 'self.lowest = metrics["eval_error"]\n            before = self.start'),
    (
        "        self.weights = weights\n",
        "        self.weights = weights\n        self.start = copy.deepcopy(self.model.state_dict())\n",
    ),
)
wrong_weighted(
    "weighted_keeps_parameters_only",
    "holds the buffers, too",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, "self.best = {name: value.detach().clone() for name, value in self.model.named_parameters()}"),
)
wrong_weighted(
    "weighted_with_the_buffer_of_the_model",
    NO_COPY,
    OWN_LOADER,
    OWN_MEAN,
    (
        STATE,
        "copies = {name: value.detach().clone() for name, value in self.model.named_parameters()}\n"
        "            self.best = {**self.model.state_dict(), **copies}",
    ),
)
wrong_weighted(
    "weighted_with_buffers_of_the_start",
    "keep the buffers of that evaluation",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, OWN_COPY[1] + "\n            self.best.update(self.buffers)"),
    (
        "        self.weights = weights\n",
        "        self.weights = weights\n        self.buffers = copy.deepcopy(dict(self.model.named_buffers()))\n",
    ),
)
wrong_weighted(
    "weighted_goes_back_to_the_best",
    "on 2 ranks(?s:.*)goes on from its own parameters",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, OWN_COPY[1] + "\n        else:\n            self.model.load_state_dict(self.best)"),
)
wrong_weighted(
    "weighted_keeps_wrapped_names",
    "those of self.model.state_dict",
    OWN_LOADER,
    OWN_MEAN,
    (STATE, "self.best = copy.deepcopy(self.model_wrapped.state_dict())"),
)
wrong_weighted(
    "weighted_evaluates_in_silence",
    "returns the metrics",
    OWN_LOADER,
    OWN_MEAN,
    OWN_COPY,
    ("        return metrics\n", ""),
)
wrong_weighted(
    "weighted_nothing_yet",
    "",
    ('        labels = inputs.pop("labels")\n', "        raise NotImplementedError\n"),
    status="not attempted",
)
