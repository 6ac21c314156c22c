"""Question 2: a desync detector that sends little, and names step, rank and tensor."""

import gc
import sys
from contextlib import nullcontext
from functools import partial
from types import FunctionType, GeneratorType, ModuleType

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex15.desync_cases import FAULTS, LONG, Net, drawn_cases, in_words
from ddp_course.checks.ex15.desync_claims import memory, result, rules, sent
from ddp_course.checks.ex15.diagnosing import number
from ddp_course.checks.salted import salted_hash
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observed(Agreement, cases, seed):
    """For each case: what each check returned, and which rules were broken."""
    seen = []
    with process_group() as (rank, _), salted_hash(rank):
        for place, case in enumerate(cases):
            with trying(in_words(case)):
                seen.append(one_run(Agreement, case, rank, seed + place))
    return seen


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


def change(model, optimizer, case):
    """Apply the case's fault."""
    for part, name, fault in FAULTS[case["fault"]]:
        fault(tensor_of(model, optimizer, part, name))


def tensor_of(model, optimizer, part, name):
    if part == "model":
        return model.state_dict()[name]
    parameter, key = name.rsplit(".", 1)
    return optimizer.state[dict(model.named_parameters())[parameter]][key]


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
