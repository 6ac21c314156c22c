"""The largest r whose bytes fit, and what a step sends, against real ranks."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.ex11.drawn import some, trained_of
from ddp_course.checks.samples import two_numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.models.lora import LoRALinear
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import sent_in_a_ring


class Plan(NamedTuple):
    """layers: (inputs, outputs) of each; budget: bytes per rank."""

    layers: list
    ranks: int
    budget: int


def observe_plans(plan, cases):
    seen = []
    for case in cases:
        case = Plan(*case)
        with trying(f"plan({case.layers}, {case.ranks}, {case.budget})"):
            pair = plan(list(map(tuple, case.layers)), case.ranks, case.budget)
            numbers = two_numbers(pair)
            seen.append(pair if numbers is None else numbers)
    return seen


def measure(layers, sizes):
    """For each r: train one step with DDP; return the bytes of all tensors that stay,
    and those that this rank would send in a ring.
    """
    with process_group(timeout=20) as (_, n):
        return [measured(layers, r, n) for r in sizes]


def measured(layers, r, n):
    adapted = (LoRALinear(nn.Linear(*shape, bias=False).bfloat16(), r) for shape in layers)
    model = nn.Sequential(*adapted)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(trained_of(model).values())
    x = some(2, layers[0][0], seed=0).bfloat16()
    with CheckedWatch() as watched:
        wrapped(x).float().pow(2).mean().backward()
    optimizer.step()
    shared = {"allreduce": sum(entry["whole"] for entry in watched.log)}
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    tensors = [*model.parameters(), *(value for value in state if value.dim())]
    gradients = sum(value.grad.nbytes for value in trained_of(model).values())
    kept = gradients + sum(value.nbytes for value in tensors)
    return {"kept": kept, "sent": sent_in_a_ring(shared, n)}


@question(
    "Count the bytes per number first: which numbers does each rank keep for a frozen weight, and which for a trained "
    "one? Then ask how many trained numbers r adds to each layer when it grows by one.",
    "A frozen weight in bf16 takes 2 bytes and has no gradient. A trained one in fp32 takes 4, its gradient 4, and "
    "Adam's two averages 8. A layer has r * (inputs + outputs) trained numbers. Ranks send gradients, in a ring "
    "2 * (ranks - 1) / ranks times their bytes.",
    "frozen = sum(2 * i * o for i, o in layers); ends = sum(i + o for i, o in layers); r = (budget - frozen) // (16 * "
    "ends); return r, 2 * (ranks - 1) / ranks * 4 * r * ends.",
)
def check_plan(answer, draw):
    """The r that just fits, and what a step sends: as bytes are measured on real ranks."""
    cases = [a_plan(draw, ranks) for ranks in (3, 2, draw.choice([8, 64]))]
    [seen] = answer.on_ranks(observe_plans, list(map(list, cases)))
    pairs = [numbers_of(case, got) for case, got in zip(cases, seen)]
    for case, pair in zip(cases, pairs):
        truth = None
        if case.ranks <= 3:
            sizes = [true_plan(case)[0], true_plan(case)[0] + 1]
            measured = answer.without(measure, case.layers, sizes, nproc=case.ranks, timeout=30)
            truth = measured[0]
        judge_plan(case, pair, truth, list(zip(cases, pairs)))


def a_plan(draw, ranks):
    """A chain of layers, and a budget between two values of r."""
    widths = [draw.randrange(20, 120) for _ in range(draw.randrange(3, 6))]
    layers, r = list(zip(widths, widths[1:])), draw.randrange(5, 13)
    rest = draw.randrange(16 * sum(map(sum, layers)))
    return Plan(layers, ranks, kept_with(layers, r) + draw.choice([0, rest]))


def kept_with(layers, r, frozen=2, trained=16):
    """Bytes per frozen and per trained number; a frozen bf16 weight has 2."""
    return sum(frozen * i * o + trained * r * (i + o) for i, o in layers)


def true_plan(case, frozen=2, trained=16):
    """(the largest r, the bytes sent with it). Other bytes per number: wrong ones."""
    ends = sum(map(sum, case.layers))
    r = (case.budget - kept_with(case.layers, 0, frozen)) // (trained * ends)
    return r, 2 * (case.ranks - 1) / case.ranks * 4 * r * ends


def in_words(case):
    return f"plan({case.layers}, {case.ranks}, {case.budget})"


def numbers_of(case, got):
    """The two numbers of an answer."""
    pair = two_numbers(got)
    if pair is None:
        cause = "return two numbers: r, and the bytes that each rank sends per step"
        raise Wrong(in_words(case), expected="(r, bytes)", got=got, cause=cause)
    return pair.tolist()


def judge_plan(case, pair, truth, answers):
    """truth: what was measured with the right r, and with one more; or None. answers:
    those to all cases.
    """
    (r, sent), (right, bytes_sent) = pair, true_plan(case)
    if truth:  # what counts is what ranks have really kept and sent
        fits, more = (one["kept"] for one in truth)
        assert fits <= case.budget < more, (fits, case.budget, more)
        assert abs(truth[0]["sent"] - bytes_sent) < 1e-6, (truth, bytes_sent)
    as_seen = ", measured" if truth else ""
    if r != right:
        expected = f"r = {right}: {kept_with(case.layers, right):,} bytes{as_seen}"
        raise Wrong(in_words(case), expected=expected, got=f"r = {r:g}",
                    cause=cause_of_r(case, r, answers))  # fmt: skip
    if not abs(sent - bytes_sent) <= 1:
        raise Wrong(in_words(case), expected=f"{bytes_sent:,.0f} bytes sent{as_seen}",
                    got=f"{sent:,.0f}", cause=cause_of_sent(sent / bytes_sent, case))  # fmt: skip


LOOKS_OF_R = {  # cause: bytes per frozen number, and per trained one
    "frozen weights in bf16 take 2 bytes each": (4, 16),
    "frozen weights have no gradient and no state of Adam": (16, 16),
    "frozen weights have no gradient": (4, 12),
    "the frozen weights take memory, too": (0, 16),
    "each trained number has a gradient, and Adam keeps two averages: 4 + 4 + 8 bytes":
        (2, 12),
    "a trained number is in fp32, and so are its gradient and Adam's two averages": (2, 8),
    "with gradient_as_bucket_view=True each gradient exists once, 4 bytes": (2, 20),
    "a trained number takes 4 bytes, its gradient 4, and Adam's averages 8": (2, 4),
}  # fmt: skip


def cause_of_r(case, r, answers):
    """The mistake that explains all answers; or the best guess for this one."""
    if r != int(r):
        return "r is a whole number: round down"
    for cause, (frozen, trained) in LOOKS_OF_R.items():
        guesses = [true_plan(case, frozen, trained)[0] for case, _ in answers]
        if all(max(0, guess) == max(0, r) for guess, (_, (r, _)) in zip(guesses, answers)):
            return cause
    if r == true_plan(case)[0] + 1:
        return "with this r, the bytes are just above the budget: round down"
    if r == true_plan(case)[0] - 1 and kept_with(case.layers, r + 1) == case.budget:
        return "with one more, the bytes are exactly the budget: that still fits"
    if r < 0:
        return "r cannot be negative: the frozen weights alone fit into the budget, so fewer bytes are needed than this"
    return "2 bytes per frozen weight, and 4 + 4 + 8 for each of the r * (inputs + outputs) trained numbers"


def cause_of_sent(ratio, case):
    n = case.ranks
    looks = {
        "in a ring, each rank sends (n - 1) / n of the bytes twice: for the sums, and for handing them out": [
            n / (n - 1) / 2, n / (n - 1), n / 2 / (n - 1),
        ],
        "this counts all ranks together: each rank sends its part": [n],
        "this is half of it: gradients are in fp32, 4 bytes each, and in a ring they travel twice, (n - 1) / n of them "
        "for the sums and as much for handing them out": [0.5],
        "only gradients are sent": [4, 2, 1 + kept_with(case.layers, 0) / 4],
    }  # fmt: skip
    for cause, ratios in looks.items():
        if any(abs(ratio - other) < 1e-6 for other in ratios):
            return cause
    return "only the gradients of the trained numbers are sent, 4 bytes each, 2 * (n - 1) / n times"
