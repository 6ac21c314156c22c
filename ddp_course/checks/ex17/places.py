"""Where to look for streams of random numbers that are the same: seeds and ranks."""

import torch

SEEDS, DATA, TENSOR = 10**6, 64, 8  # below which the arguments are
NUMBERS = 2**32  # that a CPU's generator tells apart
RANKS = [(0, 0), (1, 1), (2, 0), (DATA - 1, TENSOR - 1), (0, TENSOR - 1)]  # (data, tensor)


def places_to_try(seed, draw):
    """[seed, data rank, tensor rank]: the whole mesh of one seed; the first seeds and the
    last; seeds a power of ten or two apart; two with the same digits; some places of a
    block of 64 seeds.
    """
    small = [(s, d, t) for s in range(4) for d in (0, 1, 2, 3, DATA - 1) for t in (0, 1, TENSOR - 1)]
    digits = [(1, 11, 0), (11, 1, 0)]
    ends = [(s, d, t) for s in (SEEDS - 2, SEEDS - 1) for d, t in RANKS]
    powers = [10**k for k in range(6)] + [2**k for k in range(20)]
    apart = {(seed + power) % SEEDS for power in powers} | {(seed ^ 2**k) % SEEDS for k in range(20)}
    mesh = [(seed, d, t) for d in range(DATA) for t in (range(TENSOR) if d in (0, 1, DATA - 1) else (0, TENSOR - 1))]
    first = draw.randrange(SEEDS // 64) * 64
    block = [(first + draw.randrange(64), draw.randrange(DATA), draw.randrange(TENSOR)) for _ in range(800)]
    return [*mesh, *small, *digits, *ends, *((s, d, t) for s in sorted(apart) for d, t in RANKS), *block]


def likely(seed_of):
    """Places at which two streams are the same, if the seeds of streams are linear in the
    three arguments. seed_of(*place): the seeds of the replicated and of the sharded one.
    """
    corner = seed_of(0, 0, 0)
    steps = [[signed(a - b) for a, b in zip(seed_of(*one), corner)] for one in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    data, tensor = (
        index.flatten() for index in torch.meshgrid(torch.arange(DATA), torch.arange(TENSOR), indexing="ij")
    )
    found = []
    for one, other in [(0, 1), (0, 0), (1, 1)]:
        # a pair of places that have one stream: replicated, all tensor ranks of a data rank
        same = (data[:, None] == data) & (one == other) & ((tensor[:, None] == tensor) | (one == 0))
        of = lambda region: corner[region] + data * steps[1][region] + tensor * steps[2][region]  # noqa: E731
        for seed in (0, 1, SEEDS - 1):
            wanted = (of(other) + seed * steps[0][other])[None] - of(one)[:, None]
            for own in solutions(steps[0][one], wanted):
                fits = (own >= 0) & (own < SEEDS) & ~((own == seed) & same)
                for i, j in fits.nonzero()[:4].tolist():
                    found.append((own[i, j].item(), data[i].item(), tensor[i].item()))
                    found.append((seed, data[j].item(), tensor[j].item()))
    return found


def solutions(factor, wanted):
    """The smallest x with factor * x = wanted, modulo 2 ** 32, and the next ones; negative
    where there is none.
    """
    if factor % NUMBERS == 0:
        return
    power = (factor & -factor).bit_length() - 1
    period = NUMBERS >> power
    inverse = pow(factor >> power, -1, period) if period > 1 else 0
    smallest = ((wanted >> power) * signed(inverse)) % period
    smallest = torch.where(wanted % 2**power == 0, smallest, -SEEDS * 9)
    for more in range(min(4, -(-SEEDS // period))):
        yield smallest + more * period


def signed(number):
    """Modulo 2 ** 32, as near to 0 as can be."""
    return (number + NUMBERS // 2) % NUMBERS - NUMBERS // 2
