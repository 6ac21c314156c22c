"""What question 5 claims of a rank that has trained."""

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex03.by_hand_cases import Faults, combinations, trained
from ddp_course.checks.recording import waited

DIGITS = 5  # clip_grad_norm_ adds a millionth to the norm; some answers do not
CAUSES = {
    "own": "each rank clips the gradient of its own part before the ranks average. One process clips the gradient of the "
    "whole batch, which has another norm: average first, then clip",
    "sum": "the sum over the ranks was clipped, and divided afterwards: max_norm is for the gradient with which the step "
    "is taken",
    "none": "the gradient is not clipped, though the norm of some is larger than max_norm",
    "always": "the gradient of each step has the norm max_norm here. Clipping only ever makes a gradient shorter; or was it "
    "too long before, a sum in place of a mean?",
    "equal": "this is a mean of the ranks' means. Parts differ in size, so a sample of a smaller part counts more: weight "
    "each rank by its share of the batch's samples",
    "whole": "it is the sum of the ranks' means: they have to be averaged, each by its share of the samples",
    "small": "the shares of the ranks already sum to 1, so their gradients have to be summed: here they are divided by the "
    "number of ranks as well",
    "large": "the gradients are n times too large: shares that sum to n need the division by the number of ranks, shares "
    "that sum to 1 do not",
    "start": "this rank has trained from its own parameters: all ranks start with those of rank 0",
}  # fmt: skip
AVERAGES = {
    "own": "this average began as the parameters that this rank had before training started: it begins as those that "
    "all ranks start with, rank 0's",
    "early": "the average has got the parameters of before each step: take those of after it",
    "swapped": "the average keeps the share decay of itself, and gets 1 - decay of the parameters: here it is the other "
    "way round",
}  # fmt: skip


def cause_of(faults):
    names = [faults.clip[:3] == "own" and "own" or faults.clip, faults.share, faults.start and "start"]
    return CAUSES[next(name for name in names if name)]


def claims(case, rank, of_ranks):
    call, mine, right = described(case), of_ranks[rank], trained(case)
    counted = [each["samples"] for each in of_ranks]
    yield waited(call, mine)
    yield Claim(f"{call}: `scale`, a buffer", mine["state"]["scale"], right["state"]["scale"],
                "all ranks need the buffers of rank 0, which forward uses")  # fmt: skip
    for name in [name for name in right["state"] if name != "scale"]:
        wrong = ((trained(case, rank, faults)["state"][name], cause_of(faults)) for faults in combinations())
        yield Claim(
            f"{call}: {name} of the network", mine["state"][name], right["state"][name],
            "one process takes each step with the clipped gradient of the mean over all samples of the batch. Compare the "
            "gradient with that, step by step, before and after it is clipped",
            lambda wrong=wrong: wrong, digits=DIGITS,
        )  # fmt: skip
    yield from moving(case, rank, call, mine["moving"], right["moving"])
    yield Claim(
        f"{call}: samples in each rank's forwards", sum(map(sum, counted)), sum(case["sizes"]),
        "each rank computes its own part of a batch only, once, and together the parts are the batch",
        told=f"{sum(case['sizes'])} together", shown=f"{counted}, {sum(map(sum, counted))} together",
    )  # fmt: skip
    yield from traffic(case, call, mine["bytes"], right["state"])


def moving(case, rank, call, got, right):
    shapes = [list(value.shape) for value in right]
    given = [list(getattr(value, "shape", ())) for value in got] if isinstance(got, list) else got
    yield Claim(f"{call}: the shapes of what it returns", given, shapes, "return a list with the moving average of each "
                "parameter")  # fmt: skip
    wrong = [(trained(case, rank, Faults(average=fault))["moving"], cause) for fault, cause in AVERAGES.items()]
    for place, (average, true) in enumerate(zip(got, right)):
        yield Claim(
            f"{call}: moving average {place} of {len(right)}", average, true,
            "an average begins as the parameter with which training starts. After each step it becomes decay times itself "
            "plus 1 - decay times the parameter", [(values[place], cause) for values, cause in wrong], digits=DIGITS,
        )  # fmt: skip


def traffic(case, call, sent, right):
    """A step sends the gradients once, and a few numbers; the start may send all twice."""
    buffers, gradients = right["scale"].nbytes, sum(value.nbytes for value in right.values())
    gradients -= buffers
    steps = len(case["sizes"])
    most = 2 * (gradients + buffers) + steps * (gradients + 64)
    yield Claim(
        f"{call}: bytes that a rank sends in {steps} steps", sent, Between(0, most),
        "a step has to send each gradient once: neither samples nor parameters need to travel after the start",
        told=f"at most {most}: at the start parameters and buffers, in each step the gradients once",
    )  # fmt: skip


def described(case):
    return f"train_by_hand on {case['n']} ranks, batches of {case['sizes']} samples, max_norm={case['max_norm']}"
