"""Training runs that were published, and constants that are fitted to them."""

import csv
import math
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import (
    GPUS,
    Constants,
    Run,
    flops,
    parts,
    seconds,
)
from ddp_course.estimates.transformer import Model

FILE = Path(__file__).parent.parent / "data/published_runs.csv"


class Published(NamedTuple):
    """A run that happened, and the seconds of its steps."""

    source: str
    model: str
    gpu: str  # one of GPUS
    run: Run
    seconds: float
    checked: (
        str  # "file": in a repository's file; "copies": in copies of a paper's table
    )
    assumed: str  # what the source does not say


def published_runs(path=FILE):
    """All runs of the file, [Published]."""
    with open(path, newline="", encoding="utf-8") as file:
        return [from_row(row) for row in csv.DictReader(file)]


def from_row(row):
    names = "layers width context batch micro_batch stage chunks shards".split()
    gpus, tensor, pipeline = (int(row[k]) for k in ("gpus", "tensor", "pipeline"))
    mesh = Mesh(data=gpus // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
    parameters = float(row["parameters"])
    numbers = {name: int(row[name]) for name in names}
    run = Run(parameters, parameters, mesh=mesh, recompute=row["recompute"], **numbers)
    found = seconds_of(run, GPUS[row["gpu"]], float(row["reported"]), row["unit"])
    return Published(
        row["source"], row["model"], row["gpu"], run, found, row["checked"], row["assumed"]
    )  # fmt: skip


def seconds_of(run, gpu, reported, unit):
    """Of a step, from what was reported in one of four conventions.

    "MFU" is `utilization`; "TFLOP/s" are the same FLOPs per GPU. "TFLOP/s with
    recomputation" count the second forward as well, 4 / 3 of them. "tokens/s" are
    those of one GPU.
    """
    tokens = float(run.batch) * run.context
    if unit == "tokens/s":
        return tokens / (reported * run.gpus())
    counted = {"MFU": gpu.flops, "TFLOP/s": 1e12}
    counted["TFLOP/s with recomputation"] = 3 / 4 * 1e12
    speed = reported * counted[unit]
    return sum(flops(run)) / (speed * run.gpus())


def as_model(published):
    """The Model of a published run, as a GPT: heads of 128, as many parameters per block
    with three matrices in the MLP as GPT has with two, a vocabulary of 51,200.
    """
    layers, width = published.run.layers, published.run.width
    inner, heads = round(8 * width / 3), width // 128
    return Model(layers, width, inner, heads, width, 51200, tied=True)


# ---- three models, from the simplest ----


def constant_utilization(run, gpu, constants):
    """The same share of the flops in every run."""
    return sum(flops(run)) / (run.gpus() * gpu.flops * constants.rate)


def without_communication(run, gpu, constants):
    """What computes, and what waits for it."""
    found = parts(run, gpu, constants)
    return found.products + found.attention + found.bubble


MODELS = {
    "constant MFU": (constant_utilization, ["rate"]),
    "no communication": (without_communication, ["rate", "attention", "half"]),
    "four constants": (seconds, list(Constants._fields)),
}
BEGIN = Constants(rate=0.6, attention=0.6, half=500.0, network=1.0)


def log_error(model, constants, published):
    """How far a prediction is from the run, as a logarithm: 0.1 is about 10 %."""
    predicted = model(published.run, GPUS[published.gpu], constants)
    return math.log(predicted / published.seconds)


def fit(runs, model=seconds, names=Constants._fields):
    """The Constants with the smallest mean error, of the logarithm without its sign, so
    that a few odd runs do not count for much.

    It makes one or two constants larger or smaller by a factor, keeps what helps most,
    and takes the factor's root when nothing helps.
    """

    def error(constants):
        return sum(abs(log_error(model, constants, each)) for each in runs)

    ways = product((1.0, 0.0, -1.0), repeat=len(names))
    moves = [way for way in ways if 0 < sum(map(abs, way)) <= 2]
    best, factor = BEGIN, 1.5
    lowest = error(best)
    while factor > 1.0005:
        tried = [moved(best, names, move, factor) for move in moves]
        found, nearest = min((error(each), each) for each in tried)
        if found < lowest:
            best, lowest = nearest, found
        else:
            factor = math.sqrt(factor)
    return best


def moved(constants, names, move, factor):
    """Constants, of which those with these names are multiplied by factor ** move."""
    changes = {
        name: getattr(constants, name) * factor**power
        for name, power in zip(names, move)
    }
    return constants._replace(**changes)


def halves(runs):
    """Every second run, and the others."""
    return runs[::2], runs[1::2]


def held_out_errors(runs, model=seconds, names=Constants._fields):
    """Fit on each half of the runs and predict the other: [(Published, prediction in
    seconds, Constants)].
    """
    found = []
    for fitted, held_out in (halves(runs), halves(runs)[::-1]):
        constants = fit(fitted, model, names)
        for each in held_out:
            predicted = model(each.run, GPUS[each.gpu], constants)
            found.append((each, predicted, constants))
    return found


def median_error(found):
    """The median of the errors of held_out_errors, as a share of the measured time."""
    errors = sorted(abs(predicted / each.seconds - 1) for each, predicted, _ in found)
    middle = len(errors) // 2
    return (errors[middle] + errors[-1 - middle]) / 2
