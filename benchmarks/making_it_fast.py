"""How well lesson 16's model predicts steps that it has not seen, and what three of the
switches gain where they are said to pay.

python benchmarks/making_it_fast.py
"""

import statistics

import torch
from claims import claim, report
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import lesson16
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
from ddp_course.scenery.models import MLP

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
    """The relative error of the prediction for each bucket size."""
    with process_group() as (_, world_size):
        network, profiles = wide(), []
        images, labels = torch.randn(256, 784), torch.randint(10, (256,))
        optimizer = torch.optim.AdamW(network.parameters())

        def forward():
            optimizer.zero_grad()
            return F.nll_loss(network(images), labels)

        def profile():
            step = forward, list(network.parameters()), optimizer.step
            profiles.append(lesson16.profile_step(*step, rounds=1))

        steps = {mb: training(wide, 256, bucket_cap_mb=mb) for mb in BUCKETS}
        times = lesson16.take_turns(steps | {"profile": profile}, rounds)
        middle, errors = sorted(profiles)[len(profiles) // 2], {}
        for mb in BUCKETS:
            link = world_size, NETWORK[0], 1 / NETWORK[1]
            exposed = lesson16.exposed_seconds(middle, mb * 2**20, *link)
            measured = statistics.median(times[mb])
            errors[mb] = measured / (middle.compute + exposed) - 1
        return errors


def ratios(pairs, rounds=15):
    """{name: times as fast, the median} of pairs (before, after), arguments of training."""
    with process_group():
        found = {}
        for name, (before, after) in pairs.items():
            steps = {"before": training(*before[0], **before[1])}
            steps["after"] = training(*after[0], **after[1])
            times = lesson16.take_turns(steps, rounds)
            found[name] = lesson16.times_as_fast(times, "after", "before")[1]
        return found


def main():
    [errors, _] = launch(predictions, network=NETWORK, timeout=300)
    pairs = {
        "itself": (((many, 16), {}), ((many, 16), {})),
        "fused": (((many, 16), {}), ((many, 16), {"fused": True})),
    }
    [found, _] = launch(ratios, pairs, timeout=300)
    buckets = {"buckets": [((wide, 1024), {"bucket_cap_mb": mb}) for mb in (25, 2)]}
    [bucketed, _] = launch(ratios, buckets, network=NETWORK, timeout=300)
    typical = statistics.median(map(abs, errors.values()))
    report(
        [
            claim("error of a predicted step, the median of 4 bucket sizes", typical, at_most=0.3),
            claim("a program against itself, times as fast", found["itself"], at_most=1.2),
            claim("fused AdamW, 120 small tensors, times as fast", found["fused"], at_least=1.1),
            claim("buckets of 2 MiB in place of 25, times as fast", bucketed["buckets"], at_least=1.03),
        ],
        errors=errors,
        network=NETWORK,
    )  # fmt: skip


if __name__ == "__main__":
    main()
