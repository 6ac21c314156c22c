"""Questions 5 to 7: three programs to repair."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddp_course.checks.ex04.recorded import RecordingNetwork, judge_training, record_of
from ddp_course.checks.samples import WIDTH, Numbered, two_numbers
from ddp_course.checks.training import equal, state, unwrapped
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

# the number of a test set's first sample, larger than those of all training samples
FIRST_TEST = 1000

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
        judge_training(checked, records, samples, epochs, batch_size, seed, alone=SYMPTOM)  # fmt: skip


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
        noise = 0.5 * torch.randn(samples, WIDTH, generator=generator)
        self.inputs = (2 * self.labels - 1) * center + noise

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
                    outputs = network(TwoGroups(200, seed + 1, seed).inputs)
                losses = losses.flatten() if isinstance(losses, torch.Tensor) else losses
                return {"outputs": outputs, "state": state(network), "losses": losses}
            case other:
                return {"losses": [], "returned": f"{other!r}"}


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
    batch_size, steps, epochs, seed = (draw.randint(6, 10), draw.randint(5, 7), 6, draw.randrange(10**6))
    samples = n * batch_size * steps
    checked = f"train_two_classes with {samples} samples, epochs={epochs}, batch_size={batch_size}, {n} ranks"
    seen = answer.on_ranks(two_classes, samples, epochs, batch_size, seed, nproc=n)
    labels = TwoGroups(200, seed + 1, seed).labels[:, 0] > 0
    for rank, of_rank in enumerate(seen):
        where = f"{rank} of {n}"
        if not len(of_rank["losses"]):
            raise Wrong(checked, rank=where, expected="the network, and a list of losses",
                        got=of_rank.get("returned", "no losses"),
                        cause="return both, as the given program does")  # fmt: skip
        try:
            losses = torch.tensor([float(loss) for loss in of_rank["losses"]])
        except (TypeError, ValueError, RuntimeError):
            raise Wrong(f"the losses of {checked}", rank=where, expected="numbers", got=of_rank["losses"],
                        cause="a loss is one number per step") from None  # fmt: skip
        *first, end = [f"{loss + 0.0:.3f}" if loss < 1000 else f"{loss:.0e}" for loss in [*losses[:4], losses[-1]]]
        shown = f"{' '.join(first)} ... {end}"
        last = losses[-len(losses) // epochs :].mean()
        if (losses.abs() < 1e-6).all():
            raise Wrong(f"the losses of {checked}", rank=where, expected="a loss that is large at first and then falls",
                        got=shown, cause="the loss is zero from the first step, before the network has learned "
                        "anything: a loss that is always zero has no gradient, so the network does not change")  # fmt: skip
        if (losses < -1e-6).any():
            raise Wrong(f"the losses of {checked}", rank=where, expected="losses of 0 or more", got=shown,
                        cause="a cross-entropy is never below zero: does the loss get the outputs first, and then the "
                        "labels?")  # fmt: skip
        if not last < 2 * max(1.0, losses[0].item()):
            raise Wrong(f"the losses of {checked}", rank=where, expected="a falling loss", got=shown,
                        cause="training diverges: this loss does not fit two classes and an unbounded output",
                        )  # fmt: skip
        outputs = of_rank["outputs"]
        guessed = guesses(outputs)
        if guessed is None:
            raise Wrong("the network's outputs for 200 new samples", rank=where, expected="shape (200, 1), or (200, 2)",
                        got=f"shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else outputs,
                        cause="return one output, above 0 for label 1, or one output per class")  # fmt: skip
        share = (guessed == labels).float().mean()
        if share < 0.95:
            cause = "the network does not separate the two classes, though a line can"
            if share < 0.1:
                cause = "it has learned the opposite: which label should an output above 0 mean?"
            raise Wrong(f"200 new samples after {checked}: above 0 means label 1", rank=where,
                        expected="nearly all of them right", got=f"{share:.0%} right", cause=cause)  # fmt: skip
        if not last < 0.2:
            raise Wrong(f"the losses of {checked}", rank=where, expected="near 0 at the end", got=shown,
                        cause="the loss stays large, though the classes are far apart: this loss cannot approach 0, "
                        "however confident the network is")  # fmt: skip
    for rank, of_rank in enumerate(seen):
        if not equal(of_rank["state"], seen[0]["state"]):
            raise Wrong(f"the parameters after {checked}", rank=f"{rank} of {n}", expected="as on rank 0",
                        got="others", cause="the ranks have trained different networks")  # fmt: skip


def guesses(outputs):
    """The samples to which a network gives label 1, from one output or two; None for
    any other shape.
    """
    if not isinstance(outputs, torch.Tensor) or outputs.shape not in [(200,), (200, 1), (200, 2)]:
        return None
    return outputs.argmax(dim=1) == 1 if outputs.shape[1:] == (2,) else outputs.reshape(200) > 0


# ---- 7: a report that cannot be trusted ----


def train_then_test(train_and_test, samples, tests, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(1000 + rank)
        train_set, test_set = (Numbered(samples, seed), Numbered(tests, seed + 1, first=FIRST_TEST))
        returned = train_and_test(RecordingNetwork, train_set, test_set, epochs, batch_size)
        if not (isinstance(returned, tuple | list) and len(returned) == 3):
            return {"network": f"{returned!r}"}
        return record_of(unwrapped(returned[0])) | {"totals": returned[1:]}


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
    for rank, of_rank in enumerate(seen):
        trained = of_rank.get("trained", [])
        if any(number >= FIRST_TEST for step in trained for number in step):
            raise Wrong(checked, rank=f"{rank} of {n}", expected="training on train_set", got="samples of test_set",
                        cause="the network is trained on the samples that it is later tested on")  # fmt: skip
    judge_training(checked, seen, samples, epochs, batch_size, seed, "what should differ between these epochs, and "
                   "does not?")  # fmt: skip

    network, data = RecordingNetwork().eval(), Numbered(tests, seed + 1)
    network.load_state_dict(seen[0]["end"])
    with torch.no_grad():
        correct = int((network(data.inputs).argmax(dim=1) == data.labels).sum())
    for rank, of_rank in enumerate(seen):
        totals = two_numbers(of_rank["totals"])
        if totals is not None and (totals - torch.tensor([correct, tests])).abs().max() <= 1e-6:
            continue
        cause = "do the ranks together count each sample of the test set exactly once?"
        tested = sum(of_rank["tested"], [])
        if any(number < FIRST_TEST for number in tested):
            cause = (
                f"the test set has {tests} samples, numbered from {FIRST_TEST} in this check: which are counted here?"
            )
            raise Wrong(f"the counts of {checked}", rank=f"{rank} of {n}", expected=f"({correct}, {tests}), of the test set",
                        got=f"{of_rank['totals']}, of samples such as number {tested[0]}", cause=cause)  # fmt: skip
        if totals is None:
            cause = "return the network and two numbers"
        elif totals[1] > tests:
            cause = "samples of the test set are counted more than once, and more often with more ranks"
        elif totals[1] < tests and len(tested) == totals[1]:
            cause = "each rank reports only its own share of the test set"
        raise Wrong(f"the counts of {checked}", rank=f"{rank} of {n}", expected=f"({correct}, {tests}), of the test set",
                    got=of_rank["totals"], cause=cause)  # fmt: skip
