"""The runs of question 2: a network, what goes wrong with it on one rank, and what a
detector has to find.
"""

import torch
from torch import nn


class Net(nn.Module):
    """Parameters of two dtypes, one that is not contiguous, one of a single number, and
    buffers of two dtypes.
    """

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("zeros", torch.zeros(3))
        self.register_buffer("thirds", torch.full((3,), 1 / 3, dtype=torch.float64))
        self.register_buffer("holes", torch.full((2,), torch.nan))  # equal, bit for bit
        self.register_buffer("table", torch.arange(3002.0))  # its middle is at an odd place
        self.register_buffer("large", torch.tensor([2**60, 2**60 + 2]))  # no float has all of its digits
        self.first = nn.Linear(width, 9)
        self.norm = nn.BatchNorm1d(9)
        self.middle = nn.Linear(9, 5, bias=False, dtype=torch.bfloat16)
        self.last = nn.Linear(5, width)
        self.last.weight = nn.Parameter(self.last.weight.t().contiguous().t())

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).tanh()
        return self.scale * self.last(self.middle(hidden.bfloat16()).float())


def as_integers(tensor):
    """The same bits, as integers."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(sizes[tensor.element_size()])


def all_bits(tensor):
    """Flip all bits of all numbers."""
    as_integers(tensor).bitwise_not_()


def lowest_bit(tensor):
    """Flip the lowest bit of one number."""
    place = tuple(size // 2 for size in tensor.shape)
    as_integers(tensor)[place] ^= 1


def swap(tensor):
    """Exchange two numbers."""
    numbers = tensor.detach()
    places = [(0,) * tensor.dim(), (1,) + (0,) * (tensor.dim() - 1)]
    first, second = (numbers[place].clone() for place in places)
    numbers[places[0]], numbers[places[1]] = second, first


def negate(tensor):
    """Change the sign of all numbers."""
    tensor.detach().neg_()


# What may happen to which tensors: (part, name, fault); the first is the one to name.
# A fault that comes twice undoes itself.
FAULTS = {
    "all bits of a parameter": [("model", "first.bias", all_bits)],
    "the only number of a parameter": [("model", "scale", lowest_bit)],
    "the lowest bit of a parameter in bf16": [("model", "middle.weight", lowest_bit)],
    "the lowest bit of a parameter": [("model", "first.weight", lowest_bit)],
    "two numbers of a parameter, exchanged": [("model", "last.weight", swap)],
    "BatchNorm's count of batches": [("model", "norm.num_batches_tracked", lowest_bit)],
    "the signs of a parameter": [("model", "last.bias", negate)],
    "Adam's count of steps": [("optimizer", "norm.bias.step", lowest_bit)],
    "the lowest bit of a zero": [("model", "zeros", lowest_bit)],
    "a buffer of BatchNorm": [("model", "norm.running_var", all_bits)],
    "Adam's average of a gradient": [("optimizer", "first.bias.exp_avg", lowest_bit)],
    "Adam's averages of two gradients": [
        ("optimizer", "first.weight.exp_avg_sq", lowest_bit),
        ("optimizer", "last.bias.exp_avg", lowest_bit),
    ],
    "the middle of a long buffer": [("model", "table", lowest_bit)],
    "a parameter, and an average of another": [
        ("model", "norm.weight", lowest_bit),
        ("optimizer", "scale.exp_avg", lowest_bit),
    ],
    "the signs of zeros": [("model", "zeros", negate)],
    "a parameter, and a buffer after it": [
        ("model", "first.bias", lowest_bit),
        ("model", "norm.running_mean", lowest_bit),
    ],
    "the lowest bit in 64 bits": [("model", "thirds", lowest_bit)],
    "a buffer, and a parameter after it": [
        ("model", "norm.running_mean", lowest_bit),
        ("model", "last.bias", lowest_bit),
    ],
    "the lowest bit of a NaN": [("model", "holes", lowest_bit)],
    "Adam's average of a squared gradient": [("optimizer", "last.weight.exp_avg_sq", lowest_bit)],
    "the lowest bit of a large whole number": [("model", "large", lowest_bit)],
}  # fmt: skip


LONG = [30, 60, 90]  # with that many steps, a little for each step is too much


def drawn_cases(n, draw):
    """A clean run, in which a check may come right after another, and some runs with
    faults, as the arguments of one_run.
    """
    common = {"n": n, "width": draw.randint(4, 7), "passing": False}
    clean = {"fault": None, "checks": LONG if n == 2 else [14, 28, 28]}
    cases = [common | clean]
    # a third of them on each number of ranks; on two, those that a hash which is too coarse
    # misses come before those that are missed where the optimizer's state is left out
    for place, fault in enumerate(list(FAULTS)[n - 2 :: 3]):
        every = draw.choice([4, 6] if place == 0 else [4, 9, 14])
        # a fault that is missed shows in the next step: not in that of a check
        step = draw.choice([s for s in range(2, 15) if s % every and (s + 1) % every])
        run = common | {"fault": fault, "rank": place % n, "steps": [step]}
        if place == 0:  # a difference of one step, which one check finds; and again two checks later
            checks = [*range(every, step + 3 * every, every)]
            cases.append(run | {"passing": True, "checks": checks, "steps": [step, step + 2 * every]})
        cases.append(run | {"checks": [*range(every, step + every, every)]})
    return cases


def right_results(case):
    """What each check has to return: None, but for the one after the fault."""
    if case["fault"] is None:
        return [None for _ in case["checks"]]
    odd = case["rank"] if case["n"] > 2 else 1
    name, found = FAULTS[case["fault"]][0][1], {}
    for step in reversed(case["steps"]):
        found[min(check for check in case["checks"] if check >= step)] = [step, odd, name]
    return [found.get(step) for step in case["checks"]]


def in_words(case):
    checks = ", ".join(map(str, case["checks"]))
    steps = "step" if len(case["checks"]) == 1 else "each of the steps"
    ranks = f"{case['n']} ranks, with a check after {steps} {checks}"
    if case["fault"] is None:
        return f"a clean run on {ranks}"
    passing = ", and changed back after it" if case["passing"] else ""
    when = " and in step ".join(map(str, case["steps"]))
    return f"{case['fault']}, changed on rank {case['rank']} in step {when}{passing}; {ranks}"
