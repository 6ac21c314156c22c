"""Question 2: a desync detector that sends little, and names step, rank and tensor."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

QUIET, LOUD = 100, 2000  # bytes per rank in a check: if all agree, and if not


class Net(nn.Module):
    """Parameters of two dtypes, a tied one, one of a single number, and buffers of two
    dtypes.
    """

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("zeros", torch.zeros(3))
        self.register_buffer("thirds", torch.full((3,), 1 / 3, dtype=torch.float64))
        self.register_buffer("holes", torch.full((2,), torch.nan))  # equal, bit for bit
        self.first = nn.Linear(width, 9)
        self.norm = nn.BatchNorm1d(9)
        self.middle = nn.Linear(9, 5, bias=False, dtype=torch.bfloat16)
        self.last = nn.Linear(5, width)
        self.last.weight = nn.Parameter(self.last.weight.t().contiguous().t())

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).tanh()
        return self.scale * self.last(self.middle(hidden.bfloat16()).float())


def lowest_bit(tensor):
    """Flip the lowest bit of one number."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().view(sizes[tensor.element_size()])
    flat.flatten()  # a view, where it can be one
    place = tuple(size // 2 for size in flat.shape)
    flat[place] ^= 1


def swap(tensor):
    """Exchange two numbers."""
    numbers = tensor.detach()
    places = [(0,) * tensor.dim(), (1,) + (0,) * (tensor.dim() - 1)]
    first, second = (numbers[place].clone() for place in places)
    numbers[places[0]], numbers[places[1]] = second, first


def negate(tensor):
    """Change the sign of all numbers."""
    tensor.detach().neg_()


# what may happen to which tensors: (part, name, fault); the first is the one to name
FAULTS = {
    "the lowest bit of a parameter": [("model", "first.weight", lowest_bit)],
    "the only number of a parameter": [("model", "scale", lowest_bit)],
    "the lowest bit of a parameter in bf16": [("model", "middle.weight", lowest_bit)],
    "two numbers of a parameter, exchanged": [("model", "last.weight", swap)],
    "the signs of a parameter": [("model", "last.bias", negate)],
    "a buffer of BatchNorm": [("model", "norm.running_var", lowest_bit)],
    "BatchNorm's count of batches": [("model", "norm.num_batches_tracked", lowest_bit)],
    "Adam's average of a gradient": [("optimizer", "first.bias.exp_avg", lowest_bit)],
    "Adam's average of a squared gradient": [("optimizer", "last.weight.exp_avg_sq", lowest_bit)],
    "Adam's count of steps": [("optimizer", "norm.bias.step", lowest_bit)],
    "a parameter, and an average of another": [
        ("model", "norm.weight", lowest_bit),
        ("optimizer", "scale.exp_avg", lowest_bit),
    ],
    "the signs of zeros": [("model", "zeros", negate)],
    "the lowest bit of a zero": [("model", "zeros", lowest_bit)],
    "the lowest bit in 64 bits": [("model", "thirds", lowest_bit)],
    "a parameter, and a buffer after it": [
        ("model", "first.bias", lowest_bit),
        ("model", "norm.running_mean", lowest_bit),
    ],
    "a buffer, and a parameter after it": [
        ("model", "norm.running_mean", lowest_bit),
        ("model", "last.bias", lowest_bit),
    ],
}  # fmt: skip


def tensor_of(model, optimizer, part, name):
    if part == "model":
        return model.state_dict()[name]
    parameter, key = name.rsplit(".", 1)
    return optimizer.state[dict(model.named_parameters())[parameter]][key]


def observed(Agreement, cases, seed):
    """For each case: what each check returned, and whether the rules were kept."""
    seen = []
    with process_group() as (rank, _):
        for number, case in enumerate(cases):
            with trying(in_words(case)):
                seen.append(one_run(Agreement, case, rank, seed + number))
    return seen


def one_run(Agreement, case, rank, seed):
    """Equal training on each rank, of which one may go wrong."""
    torch.manual_seed(seed)
    model = Net(case["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Watch() as made:
        detector = Agreement(model, optimizer)
    checks, silent, untouched, same_numbers = [], not made.log, True, True
    for step in range(1, case["steps"] + 1):
        optimizer.zero_grad()
        model(torch.randn(6, case["width"])).pow(2).mean().backward()
        optimizer.step()
        if case["fault"] and (rank, step) == (case["rank"], case["step"]):
            for part, name, fault in FAULTS[case["fault"]]:
                fault(tensor_of(model, optimizer, part, name))
        before, random = snapshot(model, optimizer), torch.get_rng_state()
        with Watch() if step <= 2 else nullcontext() as watched:  # it is slow
            detector.after_step()
        silent = silent and (step > 2 or not watched.log)
        if step % case["every"] == 0:
            with Watch() as watched:
                result = detector.check()
            sent = sum(entry["whole"] for entry in watched.log)
            checks.append([step, in_a_row(result), sent / dist.get_world_size()])
        untouched = untouched and before == snapshot(model, optimizer)
        same_numbers = same_numbers and torch.equal(random, torch.get_rng_state())
        if checks and checks[-1][1] is not None:
            break  # as a job would
    dist.barrier()
    return {"checks": checks, "silent": silent, "untouched": untouched, "same_numbers": same_numbers}  # fmt: skip


def in_a_row(result):
    """A result as [step, rank, name]; None stays None, and another thing is a text."""
    if result is None:
        return None
    try:
        step, rank, name = result
        return [int(step), int(rank), str(name)]
    except (TypeError, ValueError):
        return repr(result)[:200]


def snapshot(model, optimizer):
    """The bytes of all state, so that NaN equals NaN."""
    tensors = [*model.state_dict().values()]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in tensors]
    return torch.cat(raw).numpy().tobytes()


def in_words(case):
    checks = f"{case['n']} ranks, a check after every {case['every']} steps"
    if case["fault"] is None:
        return f"a clean run of {case['steps']} steps on {checks}"
    return f"{case['fault']}, changed on rank {case['rank']} in step {case['step']}; {checks}"  # fmt: skip


@question(
    "In after_step, make one number for each tensor, a hash of its bits, and keep it: tensor.detach().contiguous()"
    ".view(torch.uint8) are its bytes (flatten first), and hashlib.sha256 or the lesson's digest makes a hash. In check, "
    "exchange one hash of all hashes first.",
    "model.state_dict() has parameters and buffers. optimizer.state[parameter] is a dict of tensors: exp_avg, "
    "exp_avg_sq, step; go through model.named_parameters() for the names. If the joint hashes differ, exchange one hash "
    "per step (8 bytes each), find the first step that differs, and only then its hashes, without names: all ranks have "
    "the same names in the same order.",
    "Whose hash is odd? collections.Counter(hashes).most_common(1) gives the value of the majority; the rank with "
    "another one is the odd one. With two ranks both values are equally frequent, and it counts as rank 1: then take "
    "rank 0's value. dist.all_gather of an int64 tensor sends 8 bytes per number; all_gather_object sends names, too.",
)
def check_agreement(answer, draw):
    """In runs with a drawn fault, it must name step, rank and tensor; in clean runs,
    nothing; and it must send little.
    """
    seed = draw.randrange(10**6)
    for n in (2, 3):
        cases = drawn_cases(n, draw)
        ranks = answer.on_ranks(observed, cases, seed, nproc=n, timeout=9)
        for number, case in enumerate(cases):
            judge_run(case, [seen[number] for seen in ranks])


def drawn_cases(n, draw):
    """A clean run, and some runs with faults, as the arguments of one_run."""
    common = {"n": n, "width": draw.randint(4, 7)}
    cases = [common | {"fault": None, "every": 14, "steps": 28, "rank": 0, "step": 0}]
    # half of them on two ranks, half on three; those of parameters come first, because
    # a hash that is too coarse misses the others, too
    for number, fault in enumerate(list(FAULTS)[n - 2 :: 2]):
        every, guilty = draw.choice([4, 6, 9]), number % n
        # a fault that is missed shows in the next step: not in that of a check
        step = draw.choice([s for s in range(2, 15) if s % every and (s + 1) % every])
        run = {"fault": fault, "rank": guilty, "step": step, "every": every}
        cases.append(common | run | {"steps": -(-step // every) * every})
    return cases


def judge_run(case, ranks):
    """Raise Wrong unless all ranks have found what is right, and kept the rules."""
    checked, clean = in_words(case), case["fault"] is None
    judge_rules(checked, ranks)
    for rank, seen in enumerate(ranks):
        for step, found, _ in seen["checks"]:
            if found is not None and (clean or step < case["step"]):
                where = f"{checked}: the check after step {step}"
                raise Wrong(where, rank=rank, expected=None, got=found, cause=ALARM)
    if clean:
        judge_bytes(checked, ranks, QUIET)
        return
    odd = case["rank"] if case["n"] > 2 else 1
    expected = [case["step"], odd, FAULTS[case["fault"]][0][1]]
    last = [seen["checks"][-1][1] for seen in ranks]
    for rank, found in enumerate(last):
        if found != expected:
            cause = likely_mistake(case, expected, found, last)
            raise Wrong(checked, rank=rank, expected=expected, got=found, cause=cause)
    judge_bytes(checked, ranks, LOUD)


ALARM = (
    "all ranks are equal there, bit for bit: a false alarm. (Python's own hash() of texts and bytes differs between "
    "processes.)"
)


def judge_rules(checked, ranks):
    """Raise Wrong if the detector has disturbed the training."""
    rules = {
        "untouched": "parameters, buffers or the optimizer's state have changed: work on copies",
        "same_numbers": "it draws from torch's global random generator, so the training's dropout masks change: use a "
        "generator of your own",
        "silent": "after_step, or the constructor, communicates: only check may",
    }
    for rank, seen in enumerate(ranks):
        for rule, cause in rules.items():
            if not seen[rule]:
                raise Wrong(checked, rank=rank, cause=cause)


def judge_bytes(checked, ranks, last):
    """Raise Wrong if a check has sent too much. last: the limit for the last check; for
    the others, in which all ranks agree, it is QUIET.
    """
    for rank, seen in enumerate(ranks):
        checks = seen["checks"]
        for number, (_, _, sent) in enumerate(checks, 1):
            limit = last if number == len(checks) else QUIET
            if sent > limit:
                words, cause = TOO_MUCH[limit]
                raise Wrong(
                    f"{checked}: the bytes of a check in which {words}",
                    rank=rank,
                    expected=f"at most {limit} per rank",
                    got=f"{sent:.0f}",
                    cause=cause,
                )


TOO_MUCH = {
    QUIET: (
        "all agree",
        "one hash of everything is enough then, whatever the number of steps and tensors",
    ),
    LOUD: (
        "they differ",
        "find the step first, with one hash per step, and then exchange only this step's hashes",
    ),
}


def likely_mistake(case, expected, found, last):
    """The likely cause of a wrong result."""
    step, odd, name = expected
    if isinstance(found, str):
        return "return None, or (step, rank, name of the tensor)"
    if len({str(one) for one in last}) > 1:
        return "the ranks return different results: all of them must decide from the same exchanged numbers"
    part, _, fault = FAULTS[case["fault"]][0]
    if found == [step - 1, odd, name]:
        return "steps are counted from 1: after the first call of after_step, the step is 1"
    if found is None or found[0] > step and found[0] % case["every"]:  # it was missed
        if part == "optimizer":
            return "the optimizer's state is missing: it changes the parameters, but only in later steps"
        if name.startswith("norm.") and "weight" not in name:
            return "buffers are missing: model.state_dict() has them, model.parameters() does not"
        if fault in (swap, negate):
            return "these changes leave sums or sizes as they were: hash the bits with their places"
        return "the change of a single bit must be noticed: hash the bits, and do not sum or round the numbers"
    if found[0] != step and found[0] % case["every"] == 0:
        return "that is the step of the check, and the ranks have differed for longer: keep the hashes of each step"
    if found[0] != step:
        return "another step is the first in which the ranks differ: take the first step, over all tensors"
    if found[1] != odd and case["n"] > 2:
        return "of three ranks, the odd one out is the one that the other two do not agree with, and that may be rank 0"
    if found[1] != odd:
        return "of two ranks, nobody can tell which is right: name rank 1"
    return (
        "another tensor is the first that differs: go through model.state_dict(), and then through the optimizer's "
        "state, with names such as first.weight and first.weight.exp_avg"
    )
