"""Question 3: an evaluation that waits for each sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import evaluate as slow_evaluate
from ddp_course.checks.training import a_batch, fill
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

WIDTH, CLASSES, BATCH = 8, 5, 32
# numbers fetched before the last batch: DataLoader draws one itself; later ones, however
# many, wait for nothing that the GPU still has to do
MOST = 2
MOST_OPERATORS = 80  # per batch, where ours needs about 15
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
    with work, trying(f"evaluate(model, a loader of {count} samples)"):
        returned = evaluate(model, loader)
    try:
        accuracy, loss = returned
        seen["returned"] = [float(accuracy), float(loss)]
    except (TypeError, ValueError):
        seen["returned"] = repr(returned)
    changed = not torch.equal(before, model[1].running_mean)
    seen["trains"] = torch.is_grad_enabled() and all(parameter.requires_grad for parameter in model.parameters())
    left = all(module.training for module in model.modules())
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
    for count in (draw.randrange(4, 8) * BATCH, draw.randrange(5, 9) * BATCH + 3):
        seed = draw.randrange(10**6)
        [seen] = answer.on_ranks(observed, count, seed, timeout=10)
        judge_evaluation(seen, count, truth(count, seed))
    [times] = answer.on_ranks(timed, draw.randrange(10**6), timeout=20)
    cause = (
        "the counts are right, so what takes the time is nothing that they see, such as a loop in Python over the "
        "samples"
    )
    return judge_gain(times, LEAST_GAIN, f"an evaluation of {LARGE} samples", cause)


def judge_evaluation(seen, count, known):
    checked, batches = f"{count} samples in batches of {BATCH}", -(-count // BATCH)
    got, names = seen["returned"], ("accuracy", "mean loss")
    if seen["training"] or seen["changed"]:
        raise Wrong(f"{checked}: the mode of the model", expected="evaluation mode", got="training mode",
                    cause="in training mode, dropout draws and BatchNorm uses the batch: model.eval() first")  # fmt: skip
    if isinstance(got, str):
        raise Wrong(checked, expected="two numbers", got=got, cause="return the accuracy and the mean loss")  # fmt: skip
    for place, name in enumerate(names):
        true = known["right"][place]
        if not abs(got[place] - true) <= 1e-6 * (1 + abs(true)):  # NaN, too
            raise Wrong(f"{checked}: the {name}", expected=f"{true:.6f}", got=f"{got[place]:.6f}",
                        cause=cause_of_number(got, place, known))  # fmt: skip
    if not seen["left"]:
        raise Wrong(f"{checked}: the mode of the model afterwards", expected="training mode", got="evaluation mode",
                    cause="the training goes on afterwards: model.train() before you return")  # fmt: skip
    if not seen["trains"]:
        raise Wrong(f"{checked}: autograd afterwards", expected="on, and gradients for all parameters", got="off",
                    cause="the training goes on afterwards, and needs gradients: use `with torch.no_grad():`")  # fmt: skip
    if seen["forwards"] < batches:
        raise Wrong(f"{checked}: calls of the model", expected=batches, got=seen["forwards"],
                    cause="several batches at once need more memory than one: call the model once per batch")  # fmt: skip
    if seen["forwards"] != batches:
        raise Wrong(f"{checked}: calls of the model", expected=batches, got=seen["forwards"],
                    cause="a batch takes little more time than one sample: call the model once per batch")  # fmt: skip
    if seen["gradients"]:
        raise Wrong(f"{checked}: calls of the model with autograd on", expected=0, got=seen["gradients"],
                    cause="autograd keeps all activations for a backward that never comes: torch.no_grad()")  # fmt: skip
    if seen["fetched"] > MOST:
        cause = "each .item(), int(tensor) and `if tensor` waits for the GPU"
        if seen["fetched"] >= count - BATCH:
            cause += ", and here that happens for each sample: count with tensors, and fetch the sum"
        else:
            cause += ", and here that happens for each batch: add up tensors, and fetch them after the loop"
        raise Wrong(f"{checked}: numbers fetched before the last batch", expected=f"at most {MOST}",
                    got=seen["fetched"], cause=cause)  # fmt: skip
    if seen["operators"] > MOST_OPERATORS * batches:
        raise Wrong(f"{checked}: operators per batch that compute", expected=f"at most {MOST_OPERATORS}",
                    got=f"{seen['operators'] / batches:.0f}",
                    cause="that is a loop over samples, and a GPU starts a kernel for each operator: compare a whole batch "
                    "at once, and let cross_entropy compute its losses together")  # fmt: skip


def cause_of_number(got, place, known):
    mistakes = {
        "full batches": "divided by the number of batches times their size, but the last batch is smaller: count samples",
        "without the last": "the last batch is missing: its samples count, too, even if they are fewer",
        "of means": "the last batch is smaller, so the mean of the batches' means is not the mean over all samples",
        "sums": "that is the sum over all samples: divide by their number",
    }
    alike = lambda name, at: abs(got[at] - known[name][at]) < 1e-6
    for places in (range(2), [place]):  # both numbers tell more than one
        for name, cause in mistakes.items():
            if all(alike(name, at) for at in places):
                return cause
    if place == 1:
        return "the mean loss is the sum of the samples' losses (reduction='sum'), divided by their number"
    return "the accuracy is the number of samples whose largest output is at their label, divided by all"
