"""Question 4: the accuracy of each digit."""

import math

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.ex01.watched import Watched, compare_state, noting_state, number
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong

DIGITS = range(10)


def measure_there(accuracy_by_digit, weight, images, labels, batch_size, training):
    """Measure twice, with the model in training mode or in eval mode before; return what
    the second call did.
    """
    model = Watched(weight, dropout=0.5).train(training)
    loader = DataLoader(TensorDataset(images, labels), batch_size)
    accuracy_by_digit(Watched(weight), loader)
    with noting_state(model) as left:
        shares = accuracy_by_digit(model, loader)
    if isinstance(shares, list | tuple):
        shares = [number(share) for share in shares]
    return {
        "shares": shares, "modes": model.modes, "recording": model.recording, "left": left,
    }  # fmt: skip


@question(
    "You need two counts for each digit: how many of its images there are, and how many of those the model gets right. "
    "Which digit does an image count for, that of its label or that of its prediction?",
    "The model returns a row of ten scores per sample: .argmax(dim=1) gives the predicted digits. "
    "torch.bincount(digits, minlength=10) counts how often each digit occurs. Remember model.training before "
    "model.eval(), and give it to model.train(...) at the end.",
    "For each batch: right = model(images).argmax(dim=1) == labels; seen += torch.bincount(labels, minlength=10); correct "
    "+= torch.bincount(labels[right], minlength=10). At the end (correct / seen).tolist(): 0 / 0 is nan for tensors.",
)
def check_accuracy_by_digit(answer, draw):
    """The share of each digit's samples, over all batches; in eval mode, without
    gradients, and with the model left as it was.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    weight = torch.randn(10, 784, generator=generator)
    batch_size = draw.choice([7, 8, 9, 11, 12, 13])
    samples = batch_size * draw.randint(5, 7) + draw.randint(3, batch_size - 2)
    absent = draw.sample(DIGITS, 2)
    test_sets = [
        # in batches of 10, even an argmax over the samples raises no error
        (*a_test_set(weight, 60, absent[2:], draw, generator), 10, True),
        (*a_test_set(weight, samples, absent[:1], draw, generator), batch_size, False),
        (*a_test_set(weight, samples, absent[1:], draw, generator), batch_size, True),
    ]
    # one after the other: an error in a later one must not hide a mistake in the first
    for test_set in test_sets:
        seen = answer.on_ranks(measure_there, weight, *test_set)[0]
        compare_accuracy(weight, *test_set, seen)


def a_test_set(weight, samples, absent, draw, generator):
    """Images (samples, 1, 28, 28) and labels, none of them an absent digit.

    The model is right for between a third and all of a digit's samples, and is sure of
    only half of its predictions.
    """
    present = [digit for digit in DIGITS if digit not in absent]
    labels = present + draw.choices(present, k=samples - len(present))
    draw.shuffle(labels)
    labels = torch.tensor(labels)
    skill = torch.rand(10, generator=generator) * 0.6 + 0.3
    right = torch.rand(samples, generator=generator) < skill[labels]
    shifts = torch.randint(1, 10, (samples,), generator=generator)
    guesses = torch.where(right, labels, (labels + shifts) % 10)
    sure = torch.rand(samples, 1, generator=generator) < 0.5
    images = weight[guesses] / torch.where(sure, 200, 500)
    images += 0.005 * torch.randn(images.shape, generator=generator)
    return images.view(-1, 1, 28, 28), labels


def by_digit(correct, seen):
    """The shares of ten counts each; nan for 0 of 0."""
    return [c / s if s else math.nan for c, s in zip(correct, seen)]


def counts(digits):
    return torch.bincount(digits, minlength=10).tolist()


def mistakes(weight, images, labels, batch_size):
    """What common mistakes return: [(ten numbers, the cause)]."""
    with torch.no_grad():
        scores = Watched(weight).eval()(images)
    guesses, sure = scores.argmax(dim=1), scores.exp().max(dim=1).values > 0.5
    right = guesses == labels
    correct, seen, guessed = counts(labels[right]), counts(labels), counts(guesses)
    share, whole = by_digit(correct, seen), len(labels) // batch_size * batch_size
    batches = [
        by_digit(counts(of_batch[hits]), counts(of_batch))
        for of_batch, hits in zip(labels.split(batch_size), right.split(batch_size))
    ]
    ends = "count over all batches, and divide once, at the end"
    first, last = (slice(batch_size), slice(batch_size * ((len(labels) - 1) // batch_size), None))
    looks = [
        ([sum(correct) / sum(seen)] * 10, "it is the accuracy over all digits: count for each digit on its own"),
        (correct, "these are the numbers of correct predictions: divide by the number of samples with that label"),
        ([100 * one for one in share], "these are percentages: return shares between 0 and 1"),
        ([1 - one for one in share], "these are the shares of wrong predictions: compare with =="),
        (by_digit(correct, guessed), "it is divided by the number of predictions of each digit: divide by the number of "
                                     "samples with that label"),
        (by_digit(guessed, seen), "every prediction of a digit is counted, right or wrong: count only those that equal "
                                  "the label"),
        ([c / len(labels) for c in correct], "it is divided by the number of all samples: divide by the number of samples "
                                             "with that label"),
        ([c / max(sum(correct), 1) for c in correct], "it is divided by all correct predictions: divide by the number of "
                                                      "samples with that label"),
        (by_digit(counts(labels[right & sure]), seen), "only predictions with a probability above 1/2 count: the predicted "
         "digit is the one with the highest score, however sure the model is"),
        ([one if known else 0.0 for one, known in zip(share, seen)],
         "a digit without any sample has no accuracy: return nan for it, not 0"),
        ([one if known else 1.0 for one, known in zip(share, seen)],
         "a digit without any sample has no accuracy: return nan for it, not 1"),
        ([c // s if s else math.nan for c, s in zip(correct, seen)], "whole numbers are divided with /, not with //"),
        ([mean([of[digit] for of in batches if not math.isnan(of[digit])]) for digit in DIGITS],
         f"it is the mean of the batches' accuracies, in which a batch with few samples of a digit counts too much: {ends}"),
        ([mean([0.0 if math.isnan(of[digit]) else of[digit] for of in batches]) for digit in DIGITS],
         f"it is the mean of the batches' accuracies, in which a batch with few samples of a digit counts too much: {ends}"),
        ([mean([of[digit] for of in batches]) for digit in DIGITS],
         f"it is the mean of the batches' accuracies, and nan where one batch has no sample of the digit: {ends}"),
        (by_digit(counts(labels[first][right[first]]), counts(labels[first])),
         "it is the accuracy of the first batch: is the return inside the loop?"),
        (by_digit(counts(labels[last][right[last]]), counts(labels[last])),
         "it is the accuracy of the last batch: set the counts to 0 before the loop, and add to them"),
    ]  # fmt: skip
    if whole < len(labels):
        kept = slice(whole)
        looks += [
            (by_digit(counts(labels[kept][right[kept]]), counts(labels[kept])), "the last, smaller batch was left out: "
             "include its samples"),
            (by_digit(counts(labels[kept][right[kept]]), seen), "the correct predictions of the last batch were left "
             "out: include them"),
        ]  # fmt: skip
    if whole == len(labels) and batch_size == 10:
        across = torch.cat([rows.argmax(dim=0) for rows in scores.split(10)]) == labels
        cause = "argmax is taken over the samples instead of over the digits: use .argmax(dim=1)"
        looks.append((by_digit(counts(labels[across]), seen), cause))
    return share, looks


def mean(values):
    return sum(values) / len(values) if values else math.nan


def near(values, others):
    """Whether two lists of numbers are equal, nan to nan."""
    return len(values) == len(others) and all(
        (math.isnan(one) and math.isnan(other)) or abs(one - other) < 1e-5 for one, other in zip(values, others)
    )


def compare_accuracy(weight, images, labels, batch_size, training, seen):
    """Raise Wrong unless the answer returned each digit's accuracy, in eval mode and
    without gradients, and left the model as it was.
    """
    before = "training" if training else "eval"
    checked = f"accuracy_by_digit(model, loader), {len(labels)} samples in batches of {batch_size}"
    if any(map(any, seen["modes"])):
        cause = "dropout is still on and removes half of each image: model.eval() switches it off"
        where = f"the mode of the model in {checked}"
        raise Wrong(where, expected="eval", got="training", cause=cause)
    share, looks = mistakes(weight, images, labels, batch_size)
    compare_list(checked, seen["shares"], share, set(labels.tolist()))
    if not near(seen["shares"], share):
        raise Wrong(
            checked, expected=in_words(share), got=in_words(seen["shares"]), cause=why(seen["shares"], share, looks)
        )
    if any(seen["recording"]):
        cause = "evaluation needs no backward: put `with torch.no_grad():` around the loop"
        where = f"whether autograd records the model in {checked}"
        raise Wrong(where, expected="no", got="yes", cause=cause)
    compare_state("accuracy_by_digit", seen["left"])
    left = seen["left"]
    if not (left["training"] if training else not left["any_training"]):
        cause = "remember model.training before model.eval(), and set it again at the end: model.train(before)"
        after = "eval" if training else "training"
        where = f"the mode of the model after {checked}"
        raise Wrong(where, expected=f"{before}, as before", got=after, cause=cause)


def why(got, share, looks):
    """The likely mistake in ten numbers."""
    for values, cause in looks:
        if near(got, values):
            return cause
    pairs = list(zip(got, share))
    if any(math.isnan(one) and not math.isnan(other) for one, other in pairs):
        return "a digit that has samples got nan: are its counts 0, or was nan added to them?"
    if all(math.isnan(other) or abs(one - other) < 1e-5 for one, other in pairs):
        return "a digit without any sample has no accuracy: return nan for it"
    if all(math.isnan(other) or abs(one - other) < 0.006 for one, other in pairs):
        return "the numbers were rounded: return them as they are"
    return "for each digit, count the samples with that label, and those of them that the model gets right"


def compare_list(checked, got, share, present):
    """Raise Wrong unless `got` is a list of ten floats."""
    cause = None
    if got is None:
        cause, got = ("it returns None: is the return statement missing?", "nothing (None)")
    elif isinstance(got, torch.Tensor):
        cause, got = "it is a tensor: .tolist() returns its numbers", "a tensor"
    elif not isinstance(got, list):
        cause = "return a list with one float per digit"
    elif any(isinstance(one, torch.Tensor) for one in got):
        cause, got = ("these are tensors: .item() or .tolist() returns their numbers", "a list of tensors")
    elif len(got) == len(present) < 10:
        cause, got = ("a digit without any sample is left out: its place has nan", f"{len(got)} numbers")
    elif len(got) != 10:
        cause, got = ("return one float for each of the ten digits, in order", f"{len(got)} numbers")
    elif not all(isinstance(one, float) for one in got):
        cause = "return a list with one float per digit, and nan for a digit without any sample"
    if cause:
        raise Wrong(checked, expected=f"ten floats: {in_words(share)}", got=got, cause=cause)


def in_words(shares):
    return ", ".join(f"{digit}: {share:.3f}" for digit, share in enumerate(shares))
