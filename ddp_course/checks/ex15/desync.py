"""Question 2: a desync detector that sends little, and names step, rank and tensor."""

import builtins
import gc
import math
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, GeneratorType, ModuleType

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.ex15.diagnosing import number
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

QUIET, LOUD = 100, 2000  # bytes per rank in a check: if all agree, and if not


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
        self.register_buffer("table", torch.arange(800.0))
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
    "the lowest bit of a parameter": [("model", "first.weight", lowest_bit)],
    "the lowest bit of a parameter in bf16": [("model", "middle.weight", lowest_bit)],
    "the only number of a parameter": [("model", "scale", lowest_bit)],
    "two numbers of a parameter, exchanged": [("model", "last.weight", swap)],
    "BatchNorm's count of batches": [("model", "norm.num_batches_tracked", lowest_bit)],
    "the signs of a parameter": [("model", "last.bias", negate)],
    "Adam's count of steps": [("optimizer", "norm.bias.step", lowest_bit)],
    "the lowest bit of a zero": [("model", "zeros", lowest_bit)],
    "a buffer of BatchNorm": [("model", "norm.running_var", lowest_bit)],
    "Adam's average of a gradient": [("optimizer", "first.bias.exp_avg", lowest_bit)],
    "Adam's averages of two gradients": [
        ("optimizer", "first.weight.exp_avg_sq", lowest_bit),
        ("optimizer", "last.bias.exp_avg", lowest_bit),
    ],
    "Adam's average of a squared gradient": [("optimizer", "last.weight.exp_avg_sq", lowest_bit)],
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
    "the middle of a long buffer": [("model", "table", lowest_bit)],
}  # fmt: skip


def change(model, optimizer, case):
    """Apply the case's fault."""
    for part, name, fault in FAULTS[case["fault"]]:
        fault(tensor_of(model, optimizer, part, name))


def tensor_of(model, optimizer, part, name):
    if part == "model":
        return model.state_dict()[name]
    parameter, key = name.rsplit(".", 1)
    return optimizer.state[dict(model.named_parameters())[parameter]][key]


def observed(Agreement, cases, seed):
    """For each case: what each check returned, and which rules were broken."""
    seen = []
    with process_group() as (rank, _), own_hash(rank):
        for place, case in enumerate(cases):
            with trying(in_words(case)):
                seen.append(one_run(Agreement, case, rank, seed + place))
    return seen


@contextmanager
def own_hash(rank):
    """hash() of texts and bytes differs between the ranks, as it does under torchrun.
    Ranks that are forked from one process, as here, would agree.
    """
    common = builtins.hash

    def of_this_rank(thing):
        if isinstance(thing, tuple):
            return common(tuple(map(of_this_rank, thing)))
        return common(thing) ^ (rank * isinstance(thing, str | bytes | memoryview))

    builtins.hash = of_this_rank
    try:
        yield
    finally:
        builtins.hash = common


def one_run(Agreement, case, rank, seed):
    """Equal training on each rank, of which one may go wrong."""
    torch.manual_seed(seed)
    model = Net(case["width"])
    optimizer = in_two_groups(model)
    checks, broken = [], []

    def call(part, function, *args, watch=True):
        """What a part of the detector returns, and how many bytes it sends per rank."""
        before, random = snapshot(model, optimizer), torch.get_rng_state()
        with CheckedWatch() if watch else nullcontext() as watched:  # it is slow
            result = function(*args)
        log = watched.log if watch else []
        if log and part != "check":
            broken.append([part, "sends"])
        if before != snapshot(model, optimizer):
            broken.append([part, "changes"])
        if not torch.equal(random, torch.get_rng_state()):
            broken.append([part, "draws"])
        sent = sum(entry["whole"] for entry in log)
        return result, sent / dist.get_world_size()

    detector, _ = call("the constructor", Agreement, model, optimizer)
    for step in range(1, case["checks"][-1] + 1):
        optimizer.zero_grad()
        model(torch.randn(6, case["width"])).pow(2).mean().backward()
        watch = step <= 3 or step % 10 == 0
        with CheckedWatch() if watch else nullcontext() as watched:
            optimizer.step()
        if watch and watched.log:
            broken.append(["a hook in optimizer.step", "sends"])
        guilty = case["fault"] and rank == case["rank"] and step in case["steps"]
        if guilty:
            change(model, optimizer, case)
        call("after_step", detector.after_step, watch=watch)
        for _ in range(case["checks"].count(step)):
            result, sent = call("check", detector.check)
            checks.append([in_a_row(result), sent, held_by(detector)])
        if guilty and case["passing"]:
            change(model, optimizer, case)
    dist.barrier()
    return {"checks": checks, "broken": broken[:1]}


def in_two_groups(model):
    """AdamW without weight decay for biases and norms, as many use it: its parameters
    are in another order than the model's.
    """
    small = [value for value in model.parameters() if value.dim() < 2]
    large = [value for value in model.parameters() if value.dim() >= 2]
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large}]
    return torch.optim.AdamW(groups, lr=1e-3)


def held_by(detector):
    """The bytes of all objects that can be reached from a detector, except for the model
    and the optimizer.
    """
    elsewhere = (nn.Module, torch.optim.Optimizer, type)
    elsewhere += (ModuleType, FunctionType, GeneratorType)
    sizes, ahead = {}, [detector, *vars(type(detector)).values()]
    while ahead:
        thing = ahead.pop()
        if id(thing) not in sizes and not isinstance(thing, elsewhere):
            numbers = thing.nbytes if isinstance(thing, torch.Tensor) else 0
            sizes[id(thing)] = sys.getsizeof(thing, 0) + numbers
            ahead += gc.get_referents(thing)
    return sum(sizes.values())


def in_a_row(result):
    """A result as [step, rank, name]; None stays None, and another thing is a text."""
    if result is None:
        return None
    try:
        step, rank, name = result
        return [number(step), number(rank), str(name)]
    except (TypeError, ValueError):
        return repr(result)[:200]


def snapshot(model, optimizer):
    """The bytes of all state and gradients, so that NaN equals NaN; and the modes."""
    tensors = [*model.state_dict().values()]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in tensors]
    modes = bytes(module.training for module in model.modules())
    return torch.cat(raw).numpy().tobytes() + modes


def in_words(case):
    checks = ", ".join(map(str, case["checks"]))
    steps = "step" if len(case["checks"]) == 1 else "each of the steps"
    ranks = f"{case['n']} ranks, with a check after {steps} {checks}"
    if case["fault"] is None:
        return f"a clean run on {ranks}"
    passing = ", and changed back after it" if case["passing"] else ""
    when = " and in step ".join(map(str, case["steps"]))
    return f"{case['fault']}, changed on rank {case['rank']} in step {when}{passing}; {ranks}"


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
    nothing; it must send little, and keep no old steps.
    """
    seed = draw.randrange(10**6)
    for n in (2, 3, 4):
        cases = drawn_cases(n, draw)
        ranks = answer.on_ranks(observed, cases, seed, nproc=n, timeout=20)
        for case, of_ranks in zip(cases, zip(*ranks)):
            on_every_rank(partial(rules, case), of_ranks)
            for place in range(len(case["checks"])):
                on_every_rank(partial(result, case, place), of_ranks)
                on_every_rank(partial(sent, case, place), of_ranks)
            if case["checks"] == LONG:
                on_every_rank(partial(memory, case), of_ranks)


LONG = [30, 60, 90]  # with that many steps, a little for each step is too much


def drawn_cases(n, draw):
    """A clean run, in which a check may come right after another, and some runs with
    faults, as the arguments of one_run.
    """
    common = {"n": n, "width": draw.randint(4, 7), "passing": False}
    clean = {"fault": None, "checks": LONG if n == 2 else [14, 28, 28]}
    cases = [common | clean]
    # a third of them on each number of ranks; on two, those of parameters come first,
    # because a hash that is too coarse misses the others, too
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


# ---- what is claimed ----


def right_results(case):
    """What each check has to return: None, but for the one after the fault."""
    if case["fault"] is None:
        return [None for _ in case["checks"]]
    odd = case["rank"] if case["n"] > 2 else 1
    name, found = FAULTS[case["fault"]][0][1], {}
    for step in reversed(case["steps"]):
        found[min(check for check in case["checks"] if check >= step)] = [step, odd, name]
    return [found.get(step) for step in case["checks"]]


RULES = {
    "changes": "changes parameters, buffers, gradients, the optimizer's state or the training mode: work on copies",
    "draws": "draws from torch's global random generator, so the training's dropout masks change: use a generator of "
    "your own",
    "sends": "communicates: only check may",
}


def rules(case, rank, of_ranks):
    broken = of_ranks[rank]["broken"]
    part, rule = broken[0] if broken else ("it", "sends")
    yield Claim(in_words(case), broken, [], f"{part} {RULES[rule]}", told=f"{part} only looks", shown=f"{part} {rule}")


def result(case, place, rank, of_ranks):
    """The claim that a check has found what is right. place: which check it is."""
    results = [seen["checks"][place][0] for seen in of_ranks]
    expected = right_results(case)[place]
    cause = likely_mistake(case, place, expected, results, rank) if results[rank] != expected else ""
    yield Claim(where(case, place), results[rank], expected, cause)


def where(case, place):
    return f"{in_words(case)}: the check after step {case['checks'][place]}"


def sent(case, place, rank, of_ranks):
    """Claims that a check has sent something, and not too much."""
    limit = QUIET if right_results(case)[place] is None else LOUD
    number, (words, cause) = of_ranks[rank]["checks"][place][1], TOO_MUCH[limit]
    yield Claim(f"{where(case, place)}: its bytes, {words}", number, Between(0, limit), cause,
                told=f"at most {limit} per rank", shown=f"{number:.0f}")  # fmt: skip
    first = case["checks"][place] not in case["checks"][:place]
    yield Claim(f"{where(case, place)}: its bytes", number > 0 or not first, True, SILENT, told="some", shown=0)


SILENT = "a rank knows nothing of the others' parameters but what it is sent: exchange a hash in each check"
TOO_MUCH = {
    QUIET: ("while all agree", "one hash of everything is enough then, whatever the number of steps and tensors"),
    LOUD: ("as they differ", "find the step first, with one hash per step, and then exchange only this step's hashes"),
}


def memory(case, rank, of_ranks):
    """The claim that a detector does not keep something of each step for ever."""
    first, second, third = [held for _, _, held in of_ranks[rank]["checks"]]
    steps = LONG[-1] - LONG[-2]
    # a dict or list may grow once without being longer
    yield Claim(f"{in_words(case)}: the memory that the detector holds after a check", min(second - first, third - second),
                Between(-math.inf, steps), "it keeps something of each step for ever: after a check, forget the steps that "
                "it has compared", told="as much as after the check before it",
                shown=f"{third - second} bytes more, with {steps} steps between them")  # fmt: skip


def likely_mistake(case, place, expected, results, rank):
    """The likely cause of a wrong result of a check. place: which check it is."""
    found, begin = results[rank], ([0] + case["checks"])[place]
    if isinstance(found, str):
        return "return None, or (step, rank, name of the tensor)"
    if len({str(one) for one in results}) > 1:
        return "the ranks return different results: all of them must decide from the same exchanged numbers"
    told_before = case["fault"] and begin >= case["steps"][0]
    if expected is None and told_before and found[2] == FAULTS[case["fault"]][0][1]:
        return "all ranks have agreed since the last check, which has told of the difference: forget its steps"
    if expected is None:
        return ALARM
    if found is None and told_before:
        return "a check looks at the steps since the last one, whatever has been found before"
    if found is None or found[0] > expected[0]:
        return why_missed(case, case["checks"][place], found)
    step, odd, name = expected
    if begin and found[0] in (step - begin, step - begin - 1):
        return "steps are counted from the beginning of the job, not from the last check: keep a count of all steps"
    if found[0] == step - 1:
        return "steps are counted from 1: after the first call of after_step, the step is 1"
    if found[0] != step:
        return (
            "another step is the first in which the ranks differ: take the first step, over all tensors; and keep hashes "
            "or copies of each step, because the tensors themselves change"
        )
    if found[1] != odd and case["n"] == 2:
        return "of two ranks, nobody can tell which is right: name rank 1"
    if found[1] != odd and case["n"] == 3:
        return "of three ranks, the odd one out is the one that the other two do not agree with, and that may be rank 0"
    if found[1] != odd:
        return "it finds the odd one of three ranks, but not of four: count how many ranks have each hash"
    if FAULTS[case["fault"]][0][0] == "optimizer":
        return (
            "another tensor is the first that differs: go through model.named_parameters(), and look for the state of "
            "each in optimizer.state[parameter]; the optimizer's own order may be another"
        )
    return (
        "another tensor is the first that differs: go through model.state_dict(), and then through the optimizer's "
        "state, with names such as first.weight and first.weight.exp_avg"
    )


ALARM = (
    "all ranks are equal there, bit for bit: a false alarm. (Python's own hash() of texts and bytes differs between "
    "processes.)"
)


def why_missed(case, step_of_check, found):
    """The likely cause if a difference is found too late, or not at all."""
    part, name, fault = FAULTS[case["fault"]][0]
    if found and found[0] == step_of_check:
        return "that is the step of the check, and the ranks have differed for longer: keep the hashes of each step"
    if case["passing"]:
        return (
            "the ranks differ after this step only, and agree again at the check: keep hashes or copies of each step, "
            "and compare them all"
        )
    looked_at = found and found[2] == name  # but it was found too late
    if part == "optimizer" and not looked_at:
        return "the optimizer's state is missing: it changes the parameters, but only in later steps"
    if name.startswith("norm.") and "weight" not in name and not looked_at:
        return "buffers are missing: model.state_dict() has them, model.parameters() does not"
    if fault in (swap, negate):
        return "these changes leave sums or sizes as they were: hash the bits with their places"
    return "the change of a single bit must be noticed: hash the bits, and do not sum or round the numbers"
