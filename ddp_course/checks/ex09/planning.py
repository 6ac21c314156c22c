"""Question 2: the size of a checkpoint, and the time between two of them, predicted."""

import math
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from ddp_course.checks.claims import Claim, agree, hold
from ddp_course.checks.predictions import likely, numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.models.gpt import GPT, SHAPES

CLOSE = 2  # digits, to 1 %: names, counts of updates and the like may be left out


class FrozenTrunk(nn.Module):
    """A frozen layer in bf16, a trained one in fp32, and within the frozen one a buffer that
    is saved, and one that is not.
    """

    def __init__(self, width):
        super().__init__()
        self.trunk = nn.Linear(width, 2 * width).requires_grad_(False).bfloat16()
        self.trunk.register_buffer("average", torch.zeros(5 * width, width))
        self.trunk.register_buffer("mask", torch.ones(9 * width, width), persistent=False)
        self.head = nn.Linear(2 * width, 3 * width)


def feed_forward(width):
    network = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    return network.to(torch.bfloat16)


MODELS = {  # the width is drawn
    "a network": lambda width: nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)),
    "a GPT with a tied head": lambda width: GPT(10 * width, 32, 2, 2, width),
    "a network with a frozen layer in bf16 and two buffers, one of them with persistent=False": FrozenTrunk,
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
            seen.append(numbers(plan_checkpoints(model, **run), 2))
    with torch.device("meta"), trying(LARGE):
        seen.append(numbers(plan_checkpoints(make_large(), **runs[-1]), 2))
    return seen


def sizes_of_files(widths):
    """For each model, how many bytes its checkpoint really has."""
    torch.manual_seed(0)
    return [saved(make(width)) for make, width in zip(MODELS.values(), widths)]


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
    measured = answer.apart(sizes_of_files, widths)
    with torch.device("meta"):
        models = [make(width) for make, width in zip(MODELS.values(), widths)] + [make_large()]
    cases = [Bytes(model, **run) for model, run in zip(models, [*runs, runs[-1]])]
    for here, words in enumerate([*MODELS, LARGE]):
        hold(claims(words, cases, planned, here, *measured[here : here + 1]))


class Bytes:
    """The bytes of a model's parts, and how its run is interrupted."""

    def __init__(self, model, disk_speed, machine_mtbf, machines):
        self.disk_speed, self.one, self.machines = disk_speed, machine_mtbf, machines
        values = list(model.parameters())
        self.kept = sum(value.nbytes for value in values)
        self.count = sum(value.numel() for value in values)
        trained = [value for value in values if value.requires_grad]
        self.trained = sum(value.nbytes for value in trained)
        self.frozen, self.averages = self.kept - self.trained, 4 * sum(value.numel() for value in trained)
        names = dict(model.named_parameters(remove_duplicate=False))
        self.tied = sum(value.nbytes for value in names.values()) - self.kept
        state = model.state_dict()
        buffers = dict(model.named_buffers())
        self.buffers = sum(buffers[name].nbytes for name in buffers if name in state)
        self.others = sum(buffers[name].nbytes for name in buffers) - self.buffers
        self.file = self.kept + self.buffers + 2 * self.trained
        self.numbers = 2 * sum(value.numel() for value in trained)
        self.numbers += self.count + sum(buffers[name].numel() for name in buffers if name in state)
        self.first = values[0].element_size()

    @property
    def save(self):
        """Seconds."""
        return self.file / self.disk_speed

    @property
    def mtbf(self):
        """Of the run."""
        return self.one / self.machines


# ---- what is claimed ----

NO_GRADIENTS = "gradients are not in the file: between two updates, nobody needs them"
OF_SIZE = [
    (lambda m: m.kept + m.buffers, "Adam's averages are missing: without them, a resumed run is another run"),
    (lambda m: m.file - m.trained, "Adam keeps two averages for each parameter, of the gradient and of its square"),
    (lambda m: m.file + m.trained, NO_GRADIENTS),
    (lambda m: m.file + m.kept, NO_GRADIENTS),
    (lambda m: m.file + 2 * m.frozen, "a frozen parameter is in the model's state, but the optimizer keeps nothing for it"),
    (lambda m: m.file - m.frozen, "frozen parameters are in the model's state, too, and so they are in the file"),
    (lambda m: m.file - m.buffers, "buffers are missing: those in model.state_dict() are saved"),
    (lambda m: m.file + m.others, "a buffer with persistent=False is not in model.state_dict()"),
    (lambda m: m.file + 2 * m.buffers, "buffers are not trained: the optimizer keeps nothing for them"),
    (lambda m: m.file + m.tied, "a tied parameter has two names in the state_dict, but it is one tensor: it is saved once"),
    (lambda m: m.file + 2 * m.tied, "a tied parameter has two names, but it is one tensor: it has one pair of averages"),
    (lambda m: m.file + 3 * m.tied, "a tied parameter has two names, but it is one tensor: it is saved once, and has one "
     "pair of averages"),
    (lambda m: m.kept + m.buffers + 2 * m.averages, "torch's AdamW keeps its averages in the dtype of the parameter, in "
     "bf16: two bytes per number"),
    (lambda m: m.kept + m.buffers + 8 * m.count, "torch's AdamW keeps its averages in the dtype of the parameter, in bf16: "
     "two bytes per number"),
    (lambda m: m.kept + m.buffers + 12 * m.count, "nobody keeps a copy in float32 here, and AdamW keeps its averages in "
     "the dtype of the parameter"),
    (lambda m: 12 * m.count, "not every number has 4 bytes: use element_size(), or nbytes"),
    (lambda m: m.first * m.numbers, "not all parameters have the dtype of the first one: use the nbytes of each"),
    (lambda m: m.numbers, "these are numbers, not bytes: a number in float32 has 4 bytes, and one in bf16 has 2"),
    (lambda m: m.file / 2**20, "these are megabytes (MiB), not bytes"),
]  # fmt: skip
OF_INTERVAL = [
    (lambda m: math.sqrt(2 * m.save * m.one), "the run stops when any of its n machines fails, so it fails n times as often "
     "as one"),
    (lambda m: math.sqrt(2 * m.save * m.one * m.machines), "more machines fail more often: divide by their number"),
    (lambda m: math.sqrt(m.save * m.mtbf), "a failure costs half of the interval on average, not all of it: that is where "
     "the 2 under the root comes from"),
    (lambda m: 2 * m.save * m.mtbf, "the square root is missing"),
    (lambda m: math.sqrt(2 * m.file * m.mtbf), "saving takes bytes / disk_speed seconds"),
    (lambda m: math.sqrt(2 * m.save * m.mtbf) / 2, "that is the time which a failure costs on average, half of the "
     "interval"),
]  # fmt: skip


def claims(words, cases, planned, here, measured=None):
    """That both numbers of a plan are right. measured: the bytes of the file, if there is
    one.
    """
    model, got = cases[here], planned[here]
    size = float(measured or model.file)
    two = "two numbers: bytes, and seconds"
    yield Claim(words, isinstance(got, list), True, "return a tuple of the two, (size, seconds)", told=two, shown=got)
    yield Claim(
        words, agree(got[1], size, CLOSE), False, "bytes come first, and seconds second",
        told=two, shown=f"{got[0]:,.2f}, and {got[1]:,.0f}",
    )  # fmt: skip

    def seen(place):
        return [each[place] if isinstance(each, list) else None for each in planned]

    yield Claim(
        f"the checkpoint of {words}", got[0], size,
        "the file has each tensor of model.state_dict() once, and two averages of the same size for each parameter that is "
        "trained",
        lambda: likely(OF_SIZE, cases, seen(0), here, CLOSE), CLOSE,
        told=f"{size:,.0f} bytes" + " in the file" * bool(measured), shown=f"{got[0]:,.0f} bytes",
    )  # fmt: skip
    best = math.sqrt(2 * size / model.disk_speed * model.mtbf)
    yield Claim(
        f"the interval for {words}: a disk of {model.disk_speed:,.0f} bytes per second, {model.machines} machines, each of "
        f"which fails every {model.one:,.0f} s", got[1], best,
        "the best interval is sqrt(2 * d * M): d is the time of one save, M the mean time between failures of the run",
        lambda: likely(OF_INTERVAL, cases, seen(1), here, CLOSE), CLOSE,
        told=f"a checkpoint every {best:,.2f} s", shown=f"every {got[1]:,.2f} s",
    )  # fmt: skip
