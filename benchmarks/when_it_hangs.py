"""What lesson 15's three detectors cost, what they miss, and their false alarms.

Each fault is drawn: its kind, its rank and its step. Two endless loops keep the machine
busy while faults and clean runs are counted.

python benchmarks/when_it_hangs.py
"""

import random
import re
import time

import torch
from claims import claim, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError, lesson15, lesson16
from ddp_course.detectors.desync import DesyncDetector
from ddp_course.detectors.nan import NanGuard
from ddp_course.detectors.straggler import StragglerDetector
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
from exercises import all_cores_busy

STEPS = 20
CLEAN, FAULTY = 200, 40  # runs without a fault; runs of each kind of fault
AT_ONCE = 40  # runs of one launch: each detector's process group keeps threads


def training(tools):
    """A function that takes one step of lesson 4's network, watched by these tools."""
    model = DistributedDataParallel(ConvNet())
    optimizer = torch.optim.AdamW(model.parameters())
    args = lesson15.arguments(["--watch", *tools, "--check-every", "9"])
    lesson15.watch(model, optimizer, print, args)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))

    def step():
        optimizer.zero_grad()
        nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()

    return step


def costs(rounds=27):
    """By tools: how many times as long as an unwatched step a step takes."""
    with process_group():
        choices = {tool: [tool] for tool in lesson15.TOOLS} | {"none": []}
        choices["all"] = lesson15.TOOLS
        steps = {name: training(tools) for name, tools in choices.items()}
        times = lesson16.take_turns(steps, rounds)
        return {
            name: 1 / lesson16.times_as_fast(times, name, "none")[1]
            for name in choices
            if name != "none"
        }


def run(number, fault, rank, world_size):
    """Train with the three tools; (rank and step of the fault, what the tools say)."""
    draw = random.Random(number)
    # the desync detector compares with rank 0, so it would accuse another rank
    guilty = draw.randrange(1 if fault == "bit" else 0, world_size)
    bad_step, said = draw.randrange(1, STEPS + 1), []
    torch.manual_seed(number)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    NanGuard(model, optimizer, 120)
    DesyncDetector(model, optimizer, 5, 120)
    StragglerDetector(model, optimizer, said.append, timeout=120)
    torch.manual_seed(1000 * number + rank)  # each rank has its own inputs
    try:
        for step in range(1, STEPS + 1):
            inputs, now = torch.randn(16, 64), (step, rank) == (bad_step, guilty)
            if fault == "straggler" and rank == guilty:
                time.sleep(0.02)
            if now and fault == "nan":
                inputs[3, 5] = torch.nan
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            if now and fault == "bit":
                network[2].weight.data.view(torch.int32)[0, 7] ^= 1
            optimizer.step()
    except UsageError as error:
        said.append(str(error))
    return guilty, bad_step, said


def runs(some):
    torch.set_num_threads(1)
    with process_group(timeout=120) as place:
        return [run(number, fault, *place) for number, fault in some]


def main():
    slower = launch(costs, timeout=300)[0]
    kinds = ["none"] * CLEAN + ["bit", "nan", "straggler"] * FAULTY
    numbered, found = list(enumerate(kinds)), []
    with all_cores_busy():
        for first in range(0, len(kinds), AT_ONCE):
            some = numbered[first : first + AT_ONCE]
            found += launch(runs, some, nproc=3, timeout=300)[0]
    named = dict.fromkeys(kinds, 0)
    false_alarms = []
    for fault, (guilty, step, said) in zip(kinds, found):
        where = "straggler" if fault == "straggler" else rf"step {step}\b"
        right = [re.search(rf"{where}.*rank {guilty}\b", line) for line in said]
        named[fault] += fault != "none" and any(right)
        if (fault == "none" and said) or not all(right):
            false_alarms.append((fault, guilty, step, said))
    clean = [said for fault, _, _, said in false_alarms if fault == "none"]
    report(
        [
            claim(f"false alarms in {CLEAN} clean runs", len(clean), at_most=0),
            claim("others accused, in runs with a fault", len(false_alarms) - len(clean), at_most=0),
            claim(f"flipped bits named, of {FAULTY}", named["bit"], at_least=FAULTY),
            claim(f"NaN named, of {FAULTY}", named["nan"], at_least=FAULTY),
            claim(f"stragglers named, of {FAULTY}", named["straggler"], at_least=FAULTY // 2),
            claim("a step with the straggler detector, times as long", slower["straggler"], at_most=1.5),
            claim("a step with the desync detector, times as long", slower["desync"], at_most=2.5),
            claim("a step with the NaN guard, times as long", slower["nan"], at_most=3),
            claim("a step with all three, times as long", slower["all"], at_most=4),
        ],
        false_alarms=false_alarms,
        times_as_long=slower,
    )  # fmt: skip


if __name__ == "__main__":
    main()
