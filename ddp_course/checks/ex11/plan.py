"""The largest r whose bytes fit, and what a step sends, against real ranks."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.checks.ex11.drawn import some, trained_of
from ddp_course.checks.predictions import numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.models.lora import LoRALinear
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import sent_in_a_ring


class Plan(NamedTuple):
    """layers: (inputs, outputs) of each; budget: bytes per rank."""

    layers: list
    ranks: int
    budget: int

    def in_words(self):
        return f"plan({self.layers}, {self.ranks}, {self.budget})"


def predictions(plan, cases):
    seen = []
    for case in cases:
        with trying(case.in_words()):
            seen.append(numbers(plan(*case), 2))
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
    # the whole budget; all but a byte of what one more would take; and something in between
    cases = [a_plan(draw, ranks, rest) for ranks, rest in [(3, 0), (2, -1), (draw.choice([8, 64]), None)]]
    [seen] = answer.on_ranks(predictions, cases)
    for case, pair in zip(cases, seen):
        hold([Claim(case.in_words(), isinstance(pair, list), True,
                    "return two numbers: r, and the bytes that each rank sends per step",
                    told="(r, bytes)", shown=pair)])  # fmt: skip
    for case, pair in zip(cases, seen):
        if case.ranks <= 3:
            has_been_measured(case, answer)
        hold(claims(case, *pair, list(zip(cases, seen))))


def a_plan(draw, ranks, rest):
    """A chain of layers, two of them alike, and a budget between two values of r.

    rest: what is left of it; -1 is one byte less than another r takes.
    """
    widths = [draw.randrange(20, 120) for _ in range(draw.randrange(2, 5))]
    widths += widths[:2]
    layers, r = list(zip(widths, widths[1:])), draw.randrange(5, 13)
    another = 16 * sum(map(sum, layers))
    rest = draw.randrange(another) if rest is None else rest % another
    return Plan(layers, ranks, kept_with(layers, r) + rest)


def kept_with(layers, r, frozen=2, trained=16):
    """Bytes per frozen and per trained number; a frozen bf16 weight has 2."""
    return sum(frozen * i * o + trained * r * (i + o) for i, o in layers)


def true_plan(case, frozen=2, trained=16):
    """(the largest r, the bytes sent with it). Other bytes per number: wrong ones."""
    ends = sum(map(sum, case.layers))
    r = (case.budget - kept_with(case.layers, 0, frozen)) // (trained * ends)
    return r, 2 * (case.ranks - 1) / case.ranks * 4 * r * ends


def has_been_measured(case, answer):
    """What counts is what ranks really keep and send: so do the formulas, with this r and one more."""
    r, sent = true_plan(case)
    fits, more = answer.without(measure, case.layers, [r, r + 1], nproc=case.ranks, timeout=30)[0]
    assert fits["kept"] <= case.budget < more["kept"], (fits, case.budget, more)
    assert abs(fits["sent"] - sent) < 1e-6, (fits, sent)


# ---- what is claimed ----


def claims(case, r, sent, answers):
    """answers: those to all cases, [(case, [r, sent]), ...]."""
    right, bytes_sent = true_plan(case)
    how = ", measured" if case.ranks <= 3 else ""
    yield Claim(f"r of {case.in_words()}", r, float(right), cause_of_r(case, r, answers),
                told=f"r = {right}: {kept_with(case.layers, right):,} bytes{how}", shown=f"r = {r:g}")  # fmt: skip
    yield Claim(f"the bytes sent, of {case.in_words()}", sent, Between(bytes_sent - 1, bytes_sent + 1),
                "only the gradients of the trained numbers are sent, 4 bytes each, 2 * (n - 1) / n times",
                [(ratio * bytes_sent, cause) for cause, ratios in ratios_of_sent(case).items() for ratio in ratios],
                told=f"{bytes_sent:,.0f} bytes sent{how}", shown=f"{sent:,.0f}")  # fmt: skip


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
    if r % 1 != 0:
        return "r is a whole number: round down"
    for cause, sizes in LOOKS_OF_R.items():
        if all(max(0, true_plan(other, *sizes)[0]) == max(0, its_r) for other, (its_r, _) in answers):
            return cause
    right = true_plan(case)[0]
    if r == right + 1:
        return "with this r, the bytes are just above the budget: round down"
    if r == right - 1 and kept_with(case.layers, right) == case.budget:
        return "with one more, the bytes are exactly the budget: that still fits"
    if r < 0:
        return "r cannot be negative: the frozen weights alone fit into the budget, so fewer bytes are needed than this"
    return "2 bytes per frozen weight, and 4 + 4 + 8 for each of the r * (inputs + outputs) trained numbers"


def ratios_of_sent(case):
    """How many times the right number of bytes a mistake gives."""
    n = case.ranks
    return {
        "in a ring, each rank sends (n - 1) / n of the bytes twice: for the sums, and for handing them out": [
            n / (n - 1) / 2, n / (n - 1), n / 2 / (n - 1),
        ],
        "this counts all ranks together: each rank sends its part": [n],
        "this is half of it: gradients are in fp32, 4 bytes each, and in a ring they travel twice, (n - 1) / n of them "
        "for the sums and as much for handing them out": [0.5],
        "only gradients are sent": [4, 2, 1 + kept_with(case.layers, 0) / 4],
    }  # fmt: skip
