"""How well lesson 16's model predicts steps that it has not seen, with overlap and
without, and what three of the switches gain where they are said to pay.

python benchmarks/making_it_fast.py
"""

import statistics

import torch
from claims import claim, report
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import lesson16
from ddp_course.detectors.step_profile import profile_step
from ddp_course.models.convnets import MLP
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

NETWORK = (2e-3, 2e8)  # seconds per message, bytes per second
BUCKETS = (0.5, 2, 6, 25)  # MiB
wide, many = (lambda: MLP(384, depth=20)), (lambda: MLP(32, depth=60))


def training(make, batch, fused=False, **ddp):
    model = DistributedDataParallel(make(), **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))

    def step():
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()

    return step


def predictions(rounds=11):
    """{bucket size: seconds of a step, (predicted, without overlap, measured)}."""
    with process_group() as (_, world_size):
        network, profiles = wide(), []
        images, labels = torch.randn(1024, 784), torch.randint(10, (1024,))
        optimizer = torch.optim.AdamW(network.parameters())

        def forward():
            optimizer.zero_grad()
            return F.nll_loss(network(images), labels)

        def profile():
            step = forward, list(network.parameters()), optimizer.step
            profiles.append(profile_step(*step, rounds=1))

        steps = {mb: training(wide, 1024, bucket_cap_mb=mb) for mb in BUCKETS}
        times = lesson16.take_turns(steps | {"profile": profile}, rounds)
        middle, found = sorted(profiles)[len(profiles) // 2], {}
        compute = statistics.median(times["profile"])  # of the slowest rank
        for mb in BUCKETS:
            on = middle, mb * 2**20, world_size, NETWORK[0], 1 / NETWORK[1]
            exposed = lesson16.exposed_seconds(*on)
            sent = sum(end - begin for begin, end in lesson16.transfers(*on))
            found[mb] = compute + exposed, compute + sent, statistics.median(times[mb])
        return found


def ratios(pairs, rounds=15):
    """{name: times as fast} of pairs (before, after), arguments of training."""
    with process_group():
        found = {}
        for name, (before, after) in pairs.items():
            steps = {"before": training(*before[0], **before[1])}
            steps["after"] = training(*after[0], **after[1])
            times = lesson16.take_turns(steps, rounds)
            found[name] = lesson16.times_as_fast(times, "after", "before")
        return found


def main():
    [steps, _] = launch(predictions, network=NETWORK, timeout=300)
    pairs = {
        "itself": (((many, 16), {}), ((many, 16), {})),
        "fused": (((many, 16), {}), ((many, 16), {"fused": True})),
    }
    [found, _] = launch(ratios, pairs, 41, timeout=300)
    buckets = {"buckets": [((wide, 1024), {"bucket_cap_mb": mb}) for mb in (25, 2)]}
    [bucketed, _] = launch(ratios, buckets, network=NETWORK, timeout=300)
    found |= bucketed
    errors = {
        way: {mb: of[-1] / of[place] - 1 for mb, of in steps.items()}
        for place, way in enumerate(("with overlap", "without overlap"))
    }
    typical = statistics.median(map(abs, errors["with overlap"].values()))
    # without overlap, one bucket would be the fastest: it needs the fewest messages
    one, two = steps[25], steps[2]
    report(
        [
            claim("error of a predicted step, the median of 4 bucket sizes", typical, at_most=0.3),
            claim("buckets of 2 MiB in place of 25, times as fast, predicted", one[0] / two[0], at_least=1.0),
            claim("the same, predicted without overlap", one[1] / two[1], at_most=1.0),
            claim("the same, measured", found["buckets"][1], at_least=1.03),
            claim("a program against itself, times as fast, not above", found["itself"][1], at_most=1.2),
            claim("a program against itself, times as fast, not below", found["itself"][1], at_least=0.8),
            claim("fused AdamW, 120 small tensors, times as fast", found["fused"][1], at_least=1.1),
        ],
        errors=errors,
        times_as_fast=found,
        network=NETWORK,
    )  # fmt: skip


if __name__ == "__main__":
    main()
