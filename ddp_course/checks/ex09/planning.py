"""The size of a checkpoint, and the time between two of them, predicted."""

import math
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.models.gpt import GPT, SHAPES

CLOSE = 0.01  # names, counts of updates and the like may be left out


class FrozenTrunk(nn.Module):
    """A frozen layer, a trained one, a buffer that is saved, and one that is not."""

    def __init__(self, width):
        super().__init__()
        self.trunk = nn.Linear(width, 2 * width).requires_grad_(False)
        self.head = nn.Linear(2 * width, 3 * width)
        self.register_buffer("average", torch.zeros(width, width))
        self.register_buffer("mask", torch.ones(5 * width, width), persistent=False)

    def forward(self, inputs):
        return self.head(self.trunk(inputs))


def feed_forward(width):
    network = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    return network.to(torch.bfloat16)


MODELS = {  # the width is drawn
    "a network": lambda width: nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)),
    "a GPT with a tied head": lambda width: GPT(10 * width, 32, 2, 2, width),
    "a network with a frozen layer and two buffers, one of them with persistent=False": FrozenTrunk,
    "a network in bf16": feed_forward,
}
LARGE = "GPT-2, which is too large to try"


def make_large():
    return GPT(50257, **SHAPES["gpt2"])


def plans(plan_checkpoints, widths, runs):
    """For each model, and the large one: the answer's plan."""
    seen = []
    for (words, make), width, run in zip(MODELS.items(), widths, runs):
        with torch.device("meta"):
            model = make(width)
        with trying(words):
            seen.append(numbers(plan_checkpoints(model, **run)))
    with torch.device("meta"), trying(LARGE):
        seen.append(numbers(plan_checkpoints(make_large(), **runs[-1])))
    return seen


def sizes_of_files(widths):
    """For each model, how many bytes its checkpoint really has."""
    torch.manual_seed(0)
    return [saved(make(width)) for make, width in zip(MODELS.values(), widths)]


def numbers(returned):
    """Two numbers as float, or what was returned instead."""
    try:
        size, seconds = returned
        return [float(size), float(seconds)]
    except (TypeError, ValueError):
        return repr(returned)


def saved(model):
    """The bytes of a file with a model and its AdamW, after one update."""
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save(state, path)
        return os.path.getsize(path)


@question(
    "Which tensors are in the file? All that model.state_dict() has, each once, and what AdamW keeps for each parameter "
    "that it trains. How many bytes has each? For the interval, see the lesson: the share of time that is lost is "
    "d / t + t / 2M. What are d, the seconds of one save, and M, the mean time between failures of the whole run?",
    "model.parameters() gives a tied parameter once; its bytes are numel() * element_size(). A parameter that is "
    "trained has two averages of its own size and dtype. Buffers count if they are in the state_dict. If one machine "
    "fails every M seconds, one of n machines fails every M / n seconds.",
    "kept = sum(p.nbytes for p in model.parameters()); adam = 2 * sum(p.nbytes for p in model.parameters() if "
    "p.requires_grad); buffers = sum(value.nbytes for name, value in model.named_buffers() if name in "
    "model.state_dict()). size is their sum, and seconds = math.sqrt(2 * size / disk_speed * machine_mtbf / machines).",
)
def check_plan_checkpoints(answer, draw):
    """For several models, the bytes must be those of a file that is really written, and
    the interval the best one.
    """
    widths = [draw.randrange(150, 220, 2) for _ in MODELS]
    runs = [
        {
            "disk_speed": draw.uniform(1e5, 1e7),
            "machine_mtbf": draw.uniform(1e4, 1e6),
            "machines": draw.choice([2, 3, 5, 12, 40]),
        }
        for _ in widths
    ]
    [planned] = answer.on_ranks(plans, widths, runs)
    seen = zip(planned, [*answer.apart(sizes_of_files, widths), None])
    everything = [*zip(MODELS.items(), widths, runs), ((LARGE, None), 0, runs[-1])]
    for ((words, make), width, run), (got, measured) in zip(everything, seen):
        with torch.device("meta"):
            model = make(width) if make else make_large()
        judge_plan(words, Bytes(model), run, got, measured)


class Bytes:
    """The bytes of a model's parts."""

    def __init__(self, model):
        values = list(model.parameters())
        self.kept = sum(value.nbytes for value in values)
        self.count = sum(value.numel() for value in values)
        self.trained = sum(value.nbytes for value in values if value.requires_grad)
        names = dict(model.named_parameters(remove_duplicate=False))
        self.tied = sum(value.nbytes for value in names.values()) - self.kept
        state = model.state_dict()
        buffers = dict(model.named_buffers())
        self.buffers = sum(buffers[name].nbytes for name in buffers if name in state)
        self.others = sum(buffers[name].nbytes for name in buffers) - self.buffers
        self.file = self.kept + self.buffers + 2 * self.trained


def near(some, other):
    return abs(some - other) <= CLOSE * other


def judge_plan(words, model, run, got, measured):
    """Raise Wrong unless both numbers of a plan are right. measured: the bytes of the
    file, or None.
    """
    if isinstance(got, str):
        raise Wrong(
            words,
            expected="two numbers: bytes, and seconds",
            got=got,
            cause="return a tuple of the two, (size, seconds)",
        )
    size, seconds = got
    true_size = measured or model.file
    if near(seconds, true_size):
        raise Wrong(
            words,
            expected="two numbers: bytes, and seconds",
            got=f"{size:,.2f}, and {seconds:,.0f}",
            cause="bytes come first, and seconds second",
        )
    if not near(size, true_size):
        raise Wrong(
            f"the checkpoint of {words}",
            expected=f"{true_size:,} bytes" + " in the file" * bool(measured),
            got=f"{size:,.0f} bytes",
            cause=cause_of_size(size, model),
        )
    save, failures = (true_size / run["disk_speed"], run["machine_mtbf"] / run["machines"])
    best = math.sqrt(2 * save * failures)
    if not near(seconds, best):
        checked = f"the interval for {words}: a disk of {run['disk_speed']:,.0f} bytes per second, "
        checked += f"{run['machines']} machines, each of which fails every {run['machine_mtbf']:,.0f} s"
        raise Wrong(
            checked,
            expected=f"a checkpoint every {best:,.2f} s",
            got=f"every {seconds:,.2f} s",
            cause=cause_of_interval(seconds, save, run),
        )


def cause_of_size(size, model):
    """The likely cause of a wrong size. model: its Bytes."""
    kept, trained, saved = model.kept, model.trained, model.file
    looks = [
        (kept + model.buffers, "Adam's averages are missing: without them, a resumed run is another run"),
        (saved - trained, "Adam keeps two averages for each parameter, of the gradient and of its square"),
        (saved + trained, "gradients are not in the file: between two updates, nobody needs them"),
        (saved + kept, "gradients are not in the file: between two updates, nobody needs them"),
        (saved + 2 * (kept - trained), "a frozen parameter is in the model's state, but the optimizer keeps nothing for it"),
        (saved - (kept - trained), "frozen parameters are in the model's state, too, and so they are in the file"),
        (saved - model.buffers, "buffers are missing: those in model.state_dict() are saved"),
        (saved + model.others, "a buffer with persistent=False is not in model.state_dict()"),
        (saved + 2 * model.buffers, "buffers are not trained: the optimizer keeps nothing for them"),
        (saved + model.tied, "a tied parameter has two names in the state_dict, but it is one tensor: it is saved once"),
        (saved + 2 * model.tied, "a tied parameter has two names, but it is one tensor: it has one pair of averages"),
        (saved + 3 * model.tied, "a tied parameter has two names, but it is one tensor: it is saved once, and has one "
         "pair of averages"),
        (kept + model.buffers + 8 * model.count, "torch's AdamW keeps its averages in the dtype of the parameter, here "
         "bf16: two bytes per number"),
        (kept + model.buffers + 12 * model.count, "nobody keeps a copy in float32 here, and AdamW keeps its averages "
         "in the dtype of the parameter"),
        (12 * model.count, "not every number has 4 bytes: use element_size(), or nbytes"),
        (saved / 4, "these are numbers, not bytes: a number in float32 has 4 bytes"),
        (saved / 2**20, "these are megabytes (MiB), not bytes"),
        (saved / 2, "these are numbers, not bytes: a number in bf16 has 2 bytes"),
    ]  # fmt: skip
    for value, cause in looks:
        if near(size, value) and not near(value, saved):
            return cause
    return (
        "the file has each tensor of model.state_dict() once, and two averages of the same size for each parameter "
        "that is trained"
    )


def cause_of_interval(seconds, save, run):
    """The likely cause of a wrong interval."""
    one, n = run["machine_mtbf"], run["machines"]
    looks = [
        (math.sqrt(2 * save * one), "the run stops when any of its n machines fails, so it fails n times as often as one"),
        (math.sqrt(2 * save * one * n), "more machines fail more often: divide by their number"),
        (math.sqrt(save * one / n), "a failure costs half of the interval on average, not all of it: that is where the 2 "
         "under the root comes from"),
        (2 * save * one / n, "the square root is missing"),
        (math.sqrt(2 * save * run["disk_speed"] * one / n), "saving takes bytes / disk_speed seconds"),
        (math.sqrt(2 * save * one / n) / 2, "that is the time which a failure costs on average, half of the interval"),
    ]  # fmt: skip
    for value, cause in looks:
        if near(seconds, value):
            return cause
    return (
        "the best interval is sqrt(2 * d * M): d is the time of one save, M the mean time between failures of the run"
    )
