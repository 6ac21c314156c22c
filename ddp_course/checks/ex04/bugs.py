"""Questions 5 to 7: three programs to repair."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters
from torch.utils.data import Dataset

from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.ex04.recorded import RecordingNetwork, hold_training, parameters_of, record_of
from ddp_course.checks.predictions import numbers
from ddp_course.checks.samples import WIDTH, Numbered
from ddp_course.checks.training import unwrapped
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

# the number of a test set's first sample, larger than those of all training samples
FIRST_TEST = 1000
NEW = 200  # samples, on which a network of two classes is tried

# ---- 5: two networks ----


def trained_by(train, samples, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(1000 + rank)
        returned = train(RecordingNetwork, Numbered(samples, seed), epochs, batch_size)
        return record_of(unwrapped(returned))


@question(
    "Print the sum of the first layer's gradients on both ranks, after loss.backward() in the first step. What should be "
    "the same on both, and what is?",
    "DistributedDataParallel prepares in its forward what it does in backward. Which object's forward does the loop call? "
    "Compare with the lesson: model.module is for evaluation and for saving.",
    "Call the wrapper, not the network inside: loss = F.cross_entropy(model(inputs), labels).",
)
def check_find_the_bug_1(answer, draw):
    """All ranks must end with the network of one process on the joined batches."""
    for n in (2, 3):
        batch_size, steps, epochs = draw.randint(3, 5), draw.randint(5, 7), 3
        seed, samples = draw.randrange(10**6), n * batch_size * steps
        records = answer.on_ranks(trained_by, samples, epochs, batch_size, seed, nproc=n)
        checked = f"train_on_ranks with {samples} samples, epochs={epochs}, batch_size={batch_size}, on {n} ranks"
        hold_training(checked, records, samples, epochs, batch_size, seed, alone=SYMPTOM)


SYMPTOM = (
    "the ranks started with the same parameters, and end with different ones: nothing is wrong with any rank's own "
    "training, but there are as many networks as ranks"
)  # fmt: skip


# ---- 6: a loss that looks too good ----


class TwoGroups(Dataset):
    """Two classes that a line separates easily: inputs, float32 (WIDTH,), and label,
    float32 (1,), 0.0 or 1.0.
    """

    def __init__(self, samples, seed, group_seed):
        generator = torch.Generator().manual_seed(group_seed)
        center = 2 * F.normalize(torch.randn(WIDTH, generator=generator), dim=0)
        generator.manual_seed(seed)
        self.labels = (torch.arange(samples) % 2).float()[:, None]
        noise = 0.3 * torch.randn(samples, WIDTH, generator=generator)
        # both on one side of the origin, where a loss of one class cannot tell them apart
        self.inputs = (2 * self.labels + 0.25) * center + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


def two_classes(train, samples, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(seed + rank)
        match train(TwoGroups(samples, seed, seed), epochs, batch_size):
            case [nn.Module() as model, (torch.Tensor() | list() | tuple()) as losses]:
                network = unwrapped(model).eval()
                with torch.no_grad():
                    outputs = network(TwoGroups(NEW, seed + 1, seed).inputs)
                steps = samples // batch_size // world_size
                return {
                    "outputs": outputs,
                    "parameters": parameters_of(network),
                    "losses": numbers(losses, epochs * steps),
                }
            case other:
                return {"returned": f"{other!r}"}


@question(
    "Print the loss of every step. Can an untrained network have such a loss? What is its gradient?",
    "cross_entropy turns the outputs of a sample into probabilities that sum to 1. How many outputs does this network "
    "have? If there is only one, what must its probability be?",
    "For two classes and one output, use F.binary_cross_entropy_with_logits(model(inputs), labels).",
)
def check_find_the_bug_2(answer, draw):
    """Two classes that a line can separate: the loss falls, the ranks agree, and new
    samples are classified correctly.
    """
    n = draw.choice([2, 3])
    batch_size, steps, epochs, seed = (draw.randint(6, 10), draw.randint(5, 7), 9, draw.randrange(10**6))
    samples = n * batch_size * steps
    checked = f"train_two_classes with {samples} samples, epochs={epochs}, batch_size={batch_size}, {n} ranks"
    seen = answer.on_ranks(two_classes, samples, epochs, batch_size, seed, nproc=n)
    labels = TwoGroups(NEW, seed + 1, seed).labels[:, 0] > 0
    on_every_rank(partial(separates, checked, labels, steps), seen)


def separates(checked, labels, steps, rank, of_ranks):
    seen, losses = of_ranks[rank], of_ranks[rank].get("losses")
    yield Claim(checked, "returned" in seen, False, "return both, as the given program does",
                told="the network, and a list of losses", shown=seen.get("returned"))  # fmt: skip
    of_losses = f"the losses of {checked}"
    yield Claim(of_losses, isinstance(losses, list), True, "a loss is one number per step", told="a number for each step",
                shown=losses)  # fmt: skip
    shown = " ".join(f"{loss + 0.0:.3f}" if loss < 1000 else f"{loss:.0e}" for loss in losses[:4])
    shown, last = f"{shown} ... {losses[-1]:.3g}", sum(losses[-steps:]) / steps
    yield Claim(of_losses, max(map(abs, losses)), Between(1e-6), "the loss is zero from the first step, before the network "
                "has learned anything: a loss that is always zero has no gradient, so the network does not change",
                told="a loss that is large at first and then falls", shown=shown)  # fmt: skip
    yield Claim(of_losses, min(losses), Between(-1e-6), "a cross-entropy is never below zero: does the loss get the outputs "
                "first, and then the labels?", told="losses of 0 or more", shown=shown)  # fmt: skip
    yield Claim(of_losses, last, Between(-1, 2 * max(1.0, losses[0])), "training diverges: this loss does not fit two "
                "classes and an unbounded output", told="a falling loss", shown=shown)  # fmt: skip
    outputs = seen["outputs"]
    guessed = guesses(outputs)
    yield Claim(f"the network's outputs for {NEW} new samples", guessed is None, False, "return one output, above 0 for "
                "label 1, or one output per class", told=f"shape ({NEW}, 1), or ({NEW}, 2)",
                shown=f"shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else outputs)  # fmt: skip
    share = (guessed == labels).double().mean().item()
    yield Claim(f"{NEW} new samples after {checked}: above 0 means label 1", share, Between(0.95), "the network does not "
                "separate the two classes, though a line can",
                [(Between(0, 0.1), "it has learned the opposite: which label should an output above 0 mean?")],
                told="nearly all of them right", shown=f"{share:.0%} right")  # fmt: skip
    yield Claim(of_losses, last, Between(-1, 0.2), "the loss stays large, though the classes are far apart: this loss "
                "cannot approach 0, however confident the network is", told="near 0 at the end", shown=shown)  # fmt: skip
    yield Claim(f"the parameters after {checked}", seen["parameters"], of_ranks[0]["parameters"],
                "the ranks have trained different networks", digits=6)  # fmt: skip


def guesses(outputs):
    """The samples to which a network gives label 1, from one output or two; None for
    any other shape.
    """
    if not isinstance(outputs, torch.Tensor) or outputs.shape not in [(NEW,), (NEW, 1), (NEW, 2)]:
        return None
    return outputs.argmax(dim=1) == 1 if outputs.shape[1:] == (2,) else outputs.reshape(NEW) > 0


# ---- 7: a report that cannot be trusted ----


def train_then_test(train_and_test, samples, tests, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(1000 + rank)
        train_set, test_set = (Numbered(samples, seed), Numbered(tests, seed + 1, first=FIRST_TEST))
        returned = train_and_test(RecordingNetwork, train_set, test_set, epochs, batch_size)
        if not (isinstance(returned, tuple | list) and len(returned) == 3):
            return {"network": f"{returned!r}"}
        return record_of(unwrapped(returned[0])) | {"totals": numbers(returned[1:], 2)}


@question(
    "Print, on one rank, the labels of the first batch in each epoch. Which samples do the two counts come from?",
    "Compare this program with the lesson's: one call is missing in its loop over the epochs, and one name is wrong.",
    "Call sampler.set_epoch(epoch) at the start of each epoch, and count on test_set, in both places.",
)
def check_find_the_bug_3(answer, draw):
    """A different order in each epoch, and counts over samples that the network was not
    trained on.
    """
    n = draw.choice([2, 3])
    batch_size, steps, epochs, seed = (draw.randint(3, 5), draw.randint(5, 7), 3, draw.randrange(10**6))
    samples, tests = n * batch_size * steps, n * draw.randint(5, 12) + 1
    seen = answer.on_ranks(train_then_test, samples, tests, epochs, batch_size, seed, nproc=n)
    checked = f"train_and_test with {samples} samples to train on, {tests} to test, {epochs} epochs, {n} ranks"
    on_every_rank(partial(untouched, checked), seen)
    hold_training(
        checked, seen, samples, epochs, batch_size, seed, "what should differ between these epochs, and does not?"
    )
    network, data = RecordingNetwork().eval(), Numbered(tests, seed + 1)
    vector_to_parameters(seen[0]["end"], network.parameters())
    with torch.no_grad():
        correct = int((network(data.inputs).argmax(dim=1) == data.labels).sum())
    on_every_rank(partial(counts, f"the counts of {checked}", correct, tests), seen)


def untouched(checked, rank, of_ranks):
    used = [number for step in of_ranks[rank].get("trained", []) for number in step if number >= FIRST_TEST]
    yield Claim(checked, used, [], "the network is trained on the samples that it is later tested on",
                told="training on train_set", shown="samples of test_set")  # fmt: skip


def counts(checked, correct, tests, rank, of_ranks):
    totals, tested = of_ranks[rank]["totals"], [sum(of_rank["tested"], []) for of_rank in of_ranks]
    others = [number for number in sum(tested, []) if number < FIRST_TEST]
    mistakes, shown = [
        ([Between(), Between(tests + 1)], "samples of the test set are counted more than once, and more often with more "
         "ranks"),
        ([Between(), float(min(len(tested[rank]), tests - 1))], "each rank reports only its own share of the test set"),
    ], totals  # fmt: skip
    otherwise = "do the ranks together count each sample of the test set exactly once?"
    if others:
        otherwise = (
            f"the test set has {tests} samples, numbered from {FIRST_TEST} in this check: which are counted here?"
        )
        mistakes, shown = (), f"{totals}, of samples such as number {others[0]}"
    elif not isinstance(totals, list):
        otherwise = "return the network and two numbers"
    yield Claim(checked, totals, [float(correct), float(tests)], otherwise, mistakes,
                told=f"({correct}, {tests}), of the test set", shown=shown)  # fmt: skip
