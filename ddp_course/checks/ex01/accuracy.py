"""Question 4: the accuracy of each digit."""

import math

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.claims import Claim, agree, hold
from ddp_course.checks.ex01.watched import Watched, left_behind, noting_state, number
from ddp_course.judge.question import question

DIGITS, DROPOUT = range(10), 0.5

# ---- what is drawn, and what mistakes make of it ----


def a_test_set(weight, samples, absent, draw, generator):
    """Images (samples, 1, 28, 28) and labels, none of them an absent digit.

    The model is right for between a third and all of a digit's samples, but for none of
    one digit's, and is sure of only half of its predictions.
    """
    present = [digit for digit in DIGITS if digit not in absent]
    labels = present + draw.choices(present, k=samples - len(present))
    draw.shuffle(labels)
    labels = torch.tensor(labels)
    skill = torch.rand(10, generator=generator) * 0.6 + 0.3
    skill[draw.choice(present)] = 0  # not one of its samples is recognised
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


def shares_of(weight, images, labels, batch_size):
    """The right shares, and what common mistakes return: [(ten numbers, the cause)]."""
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
    mistakes = [
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
        ([one or math.nan for one in share],
         "a digit of which no sample is recognised has the share 0: only a digit without any sample has nan"),
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
        mistakes += [
            (by_digit(counts(labels[kept][right[kept]]), counts(labels[kept])), "the last, smaller batch was left out: "
             "include its samples"),
            (by_digit(counts(labels[kept][right[kept]]), seen), "the correct predictions of the last batch were left "
             "out: include them"),
        ]  # fmt: skip
    if whole == len(labels) and batch_size == 10:
        across = torch.cat([rows.argmax(dim=0) for rows in scores.split(10)]) == labels
        cause = "argmax is taken over the samples instead of over the digits: use .argmax(dim=1)"
        mistakes.append((by_digit(counts(labels[across]), seen), cause))
    return share, mistakes


def mean(values):
    return sum(values) / len(values) if values else math.nan


# ---- what the rank observes ----


def observe(accuracy_by_digit, weight, images, labels, batch_size, training):
    """Measure twice, with the model in training mode or in eval mode before; return what
    the second call did.
    """
    model = Watched(weight, DROPOUT).train(training)
    model.linear.weight.grad = torch.ones_like(weight)  # from a training that goes on afterwards
    loader = DataLoader(TensorDataset(images, labels), batch_size)
    accuracy_by_digit(Watched(weight), loader)
    with noting_state(model) as left:
        shares = accuracy_by_digit(model, loader)
    if isinstance(shares, list | tuple):
        shares = [number(share) for share in shares]
    return {
        "shares": shares, "modes": model.modes, "recording": model.recording, "left": left,
        "samples": [len(marks) for marks in model.marks],
        "parameters": model.linear.weight, "gradients": model.linear.weight.grad, "dropout": model.dropout.p,
    }  # fmt: skip


# ---- what is claimed ----


def claims(weight, images, labels, batch_size, training, seen):
    what = f"accuracy_by_digit(model, loader), {len(labels)} samples in batches of {batch_size}"
    yield Claim(f"the mode of the model in {what}", any(map(any, seen["modes"])), False,
                "dropout is still on and removes half of each image: model.eval() switches it off",
                told="eval", shown="training")  # fmt: skip
    yield from of_the_shares(what, seen["shares"], *shares_of(weight, images, labels, batch_size), labels)
    most = max(seen["samples"], default=0)
    yield Claim(f"the samples in one forward of {what}", most, range(batch_size + 1), "all batches together may be too "
                "large for the memory: call the model once for each batch", told=f"at most {batch_size}")  # fmt: skip
    yield Claim(
        f"whether autograd records the model in {what}", any(seen["recording"]), False,
        "evaluation needs no backward: put `with torch.no_grad():` around the loop", told="no", shown="yes",
    )  # fmt: skip
    yield from left_behind("accuracy_by_digit", seen["left"])
    before = {"parameters": weight, "gradients": torch.ones_like(weight), "dropout": DROPOUT}
    for part, value in before.items():
        kinds = [getattr(one, "dtype", None) for one in (seen[part], value)]
        yield Claim(
            f"the {part} of the model after {what}", agree(seen[part], value) and kinds[0] == kinds[1], True,
            f"afterwards everything must be as before, but the {part} of the model changed: an evaluation only reads",
            told="as before", shown="changed",
        )  # fmt: skip
    left = seen["left"]
    restored = left["training"] if training else not left["any_training"]
    names = ("training", "eval") if training else ("eval", "training")
    yield Claim(f"the mode of the model after {what}", restored, True, "remember model.training before model.eval(), and "
                "set it again at the end: model.train(before)", told=f"{names[0]}, as before", shown=names[1])  # fmt: skip


def of_the_shares(what, got, shares, mistakes, labels):
    """Claims that `got` is a list of ten floats, and that they are the shares."""
    problem, shown = why_no_list(got, len(labels.unique()))
    yield Claim(what, problem, None, problem, told=f"ten floats: {in_words(shares)}", shown=shown)
    cause = next((cause for values, cause in mistakes if near(got, values)), None) or why(got, shares)
    yield Claim(what, near(got, shares), True, cause, told=in_words(shares), shown=in_words(got))


def why_no_list(got, present):
    """What is wrong with the type of the shares, or None; and the shares for a verdict.

    present: how many digits have samples.
    """
    if got is None:
        return "it returns None: is the return statement missing?", "nothing (None)"
    if isinstance(got, torch.Tensor):
        return "it is a tensor: .tolist() returns its numbers", "a tensor"
    if not isinstance(got, list):
        return "return a list with one float per digit", got
    if any(isinstance(one, torch.Tensor) for one in got):
        return "these are tensors: .item() or .tolist() returns their numbers", "a list of tensors"
    if len(got) == present < 10:
        return "a digit without any sample is left out: its place has nan", f"{len(got)} numbers"
    if len(got) != 10:
        return "return one float for each of the ten digits, in order", f"{len(got)} numbers"
    if not all(isinstance(one, float) for one in got):
        return "return a list with one float per digit, and nan for a digit without any sample", got
    return None, got


def near(values, others):
    """Whether two lists of ten numbers are equal, nan to nan."""
    pairs = [*zip(values, others)]
    return all((math.isnan(one) and math.isnan(other)) or abs(one - other) < 1e-5 for one, other in pairs)


def why(got, shares):
    """The likely mistake in ten numbers that no mistake gives exactly."""
    pairs = list(zip(got, shares))
    if any(math.isnan(one) and not math.isnan(other) for one, other in pairs):
        return "a digit that has samples got nan: are its counts 0, or was nan added to them?"
    if all(math.isnan(other) or abs(one - other) < 1e-5 for one, other in pairs):
        return "a digit without any sample has no accuracy: return nan for it"
    if all(math.isnan(other) or abs(one - other) < 0.006 for one, other in pairs):
        return "the numbers were rounded: return them as they are"
    return "for each digit, count the samples with that label, and those of them that the model gets right"


def in_words(shares):
    return ", ".join(f"{digit}: {share:.3f}" for digit, share in enumerate(shares))


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
        hold(claims(weight, *test_set, answer.on_ranks(observe, weight, *test_set)[0]))
