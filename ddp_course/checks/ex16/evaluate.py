"""Question 3: an evaluation that waits for each sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.claims import Between, Claim, agree, hold
from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import evaluate as slow_evaluate
from ddp_course.checks.training import a_batch, fill
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

WIDTH, CLASSES, BATCH = 8, 5, 32
# numbers fetched before the last batch: DataLoader draws one itself; later ones, however
# many, wait for nothing that the GPU still has to do
MOST = 2
MOST_OPERATORS = 80  # per batch, where ours needs about 15
DIGITS = 5.5  # a sum may be in 32 bits
MANY = 55 * BATCH + 1  # samples, of which more than 256 are right; one is in a batch of its own
LARGE = 32 * BATCH + 3  # samples of an evaluation that is timed
LEAST_GAIN = 2  # where a right answer gains about 10


def make_model(seed):
    """A network whose training mode and evaluation mode differ."""
    layers = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.5)
    return fill(nn.Sequential(*layers, nn.Linear(12, CLASSES)), seed)


def samples(count, seed):
    inputs = a_batch(count, WIDTH, seed)
    return TensorDataset(inputs, (inputs.sum(1) * 7).long().abs() % CLASSES)


def observed(evaluate, count, seed):
    """What the answer returns, and what it did on the way."""
    model, loader = make_model(seed), DataLoader(samples(count, seed), BATCH)
    seen = {"forwards": 0, "gradients": 0, "training": 0, "fetched": 0}
    work = Work()

    def note(module, inputs):
        seen["forwards"] += 1
        seen["fetched"] = work.fetched
        seen["gradients"] += torch.is_grad_enabled()
        seen["training"] += module.training

    model.register_forward_pre_hook(note)
    before = model[1].running_mean.clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of a training that accumulates
    torch.manual_seed(seed)
    with work, trying(f"evaluate(model, a loader of {count} samples)"):
        returned = evaluate(model, loader)
    floats = isinstance(returned, list | tuple) and all(isinstance(number, float) for number in returned)
    seen["returned"] = list(returned) if floats else repr(returned)
    changed = not torch.equal(before, model[1].running_mean)
    seen["trains"] = torch.is_grad_enabled() and all(parameter.requires_grad for parameter in model.parameters())
    left = all(module.training for module in model.modules())
    seen["seeded"] = torch.initial_seed() != seed
    gradients = [parameter.grad for parameter in model.parameters()]
    seen["gradients left"] = all(each is not None and bool((each == 1).all()) for each in gradients)
    return seen | {"operators": work.operators, "left": left, "changed": changed}


def timed(evaluate, seed):
    """The seconds of evaluations by the answer, and by the slow program, in turn."""
    model, loader = make_model(seed), DataLoader(samples(LARGE, seed), BATCH)
    with process_group(), trying(f"evaluate(model, a loader of {LARGE} samples)"):
        return in_turn(lambda: slow_evaluate(model, loader), lambda: evaluate(model, loader))


def truth(count, seed):
    """The accuracy and the mean loss; and what some mistakes would give."""
    model, dataset = make_model(seed).eval(), samples(count, seed)
    with torch.no_grad():
        outputs = model(dataset.tensors[0])
    labels = dataset.tensors[1]
    losses = F.cross_entropy(outputs, labels, reduction="none")
    right = (outputs.argmax(1) == labels).double()
    of_batches = lambda values: sum(part.mean().item() for part in values.split(BATCH))
    batches = -(-count // BATCH)
    return {
        "right": [right.mean().item(), losses.mean().item()],
        "of means": [of_batches(right) / batches, of_batches(losses) / batches],
        "sums": [right.sum().item(), losses.sum().item()],
        "full batches": [values.sum().item() / (batches * BATCH) for values in (right, losses)],
        "without the last": [values[: count // BATCH * BATCH].mean().item() for values in (right, losses)],
    }


# ---- what is claimed ----

MISTAKES = {
    "full batches": "divided by the number of batches times their size, but the last batch is smaller: count samples",
    "without the last": "the last batch is missing: its samples count, too, even if they are fewer",
    "of means": "the last batch is smaller, so the mean of the batches' means is not the mean over all samples",
    "sums": "that is the sum over all samples: divide by their number",
}
RIGHT = {
    "accuracy": "the accuracy is the number of samples whose largest output is at their label, divided by all",
    "mean loss": "the mean loss is the sum of the samples' losses (reduction='sum'), divided by their number",
}


def claims(seen, count, known):
    checked, got, batches = f"{count} samples in batches of {BATCH}", seen["returned"], -(-count // BATCH)
    yield Claim(f"{checked}: the mode of the model", bool(seen["training"] or seen["changed"]), False, "in training mode, "
                "dropout draws and BatchNorm uses the batch: model.eval() first", told="evaluation mode",
                shown="training mode")  # fmt: skip
    yield Claim(checked, len(got) if isinstance(got, list) else got, 2, "return the accuracy and the mean loss, as floats",
                told="two floats", shown=got)  # fmt: skip
    # first the mistakes that explain both numbers
    names = sorted(MISTAKES, key=lambda name: not agree(got, known[name], DIGITS))
    for place, (name, cause) in enumerate(RIGHT.items()):
        yield Claim(f"{checked}: the {name}", got[place], known["right"][place], cause,
                    [(known[name][place], MISTAKES[name]) for name in names], DIGITS,
                    told=f"{known['right'][place]:.6f}", shown=f"{got[place]:.6f}")  # fmt: skip
    yield Claim(f"{checked}: the mode of the model afterwards", seen["left"], True, "the training goes on afterwards: "
                "model.train() before you return", told="training mode", shown="evaluation mode")  # fmt: skip
    yield Claim(f"{checked}: autograd afterwards", seen["trains"], True, "the training goes on afterwards, and needs "
                "gradients: use `with torch.no_grad():`",
                told="on, and gradients for all parameters", shown="off")  # fmt: skip
    yield Claim(f"{checked}: the gradients afterwards", seen["gradients left"], True, "the training goes on afterwards, "
                "perhaps in the middle of an accumulation: leave gradients alone", told="as before",
                shown="others")  # fmt: skip
    yield Claim(f"{checked}: the global seed", seen["seeded"], False, "the training goes on afterwards, and would draw the "
                "same numbers after each evaluation: set no seed", told="as before", shown="another")  # fmt: skip
    yield Claim(f"{checked}: calls of the model", seen["forwards"], batches, "a batch takes little more time than one "
                "sample: call the model once per batch", [(range(batches), "several batches at once need more memory than "
                "one: call the model once per batch")])  # fmt: skip
    yield Claim(f"{checked}: calls of the model with autograd on", seen["gradients"], 0,
                "autograd keeps all activations for a backward that never comes: torch.no_grad()")  # fmt: skip
    waits = "each .item(), int(tensor) and `if tensor` waits for the GPU, and here that happens for each"
    yield Claim(f"{checked}: numbers fetched before the last batch", seen["fetched"], range(MOST + 1),
                f"{waits} batch: add up tensors, and fetch them after the loop",
                [(Between(count - BATCH), f"{waits} sample: count with tensors, and fetch the sum")],
                told=f"at most {MOST}")  # fmt: skip
    yield Claim(f"{checked}: operators per batch that compute", seen["operators"], range(MOST_OPERATORS * batches + 1),
                "that is a loop over samples, and a GPU starts a kernel for each operator: compare a whole batch at once, "
                "and let cross_entropy compute its losses together",
                told=f"at most {MOST_OPERATORS}", shown=f"{seen['operators'] / batches:.0f}")  # fmt: skip


@question(
    "Look for three things in a trace of the program: how often is the model called, how often does Python wait for a "
    "number, and what does autograd keep for a backward that never comes?",
    "Call the model once per batch, inside torch.no_grad(). Add up tensors, not numbers: each .item(), and each `if` on a "
    "tensor, waits for the GPU.",
    "correct += (outputs.argmax(1) == labels).sum(); total += F.cross_entropy(outputs, labels, reduction='sum'); seen += "
    "len(labels). After the loop, return (correct / seen).item(), (total / seen).item(). The last batch is smaller, so do "
    "not average the batches' means.",
)
def check_evaluate(answer, draw):
    """The two numbers are exact; forwards, operators and fetched numbers are counted;
    an evaluation is timed.
    """
    few, some = draw.randrange(4, 8) * BATCH, draw.randrange(5, 9) * BATCH + 3
    for count in (few, some, MANY):
        seed = draw.randrange(10**6)
        [seen] = answer.on_ranks(observed, count, seed, timeout=10)
        hold(claims(seen, count, truth(count, seed)))
    [times] = answer.on_ranks(timed, draw.randrange(10**6), timeout=20)
    cause = (
        "the counts are right, so what takes the time is nothing that they see, such as a loop in Python over the "
        "samples"
    )
    return judge_gain(times, LEAST_GAIN, f"an evaluation of {LARGE} samples", cause)
