"""Question 2: the bytes of a checkpoint, compared with those that real engines write."""

import re
import tempfile
from itertools import combinations, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_course import lesson13
from ddp_course.checkpoints.deepspeed_configurations import MICRO
from ddp_course.checks.claims import Between, Claim, agree, hold
from ddp_course.checks.ex13.installed import TIMEOUT, deepspeed_is_needed
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

WIDTH = 400  # of two layers, so that a file's header is less than 2 % of the file
OPTIMIZERS = [  # by the numbers that each keeps per parameter
    {"type": "SGD", "params": {"lr": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
]
NAMES = "plain SGD", "SGD with momentum", "AdamW"

CAUSES = {
    "gradients": "a checkpoint holds no gradients: the next step computes new ones",
    "all write the weights": "in stages 0 to 2 all ranks have the same weights, and only rank 0 writes them",
    "all write the state": "in stage 0 all ranks have the same optimizer state, and only rank 0 writes it",
    "sharded in stage 0": "in stage 0 nothing is sharded: rank 0 writes all of it",
    "not sharded": "from stage 1 on, each rank writes only its part of the optimizer's state",
    "sharded weights": "in stages 1 and 2 the weights are not sharded: rank 0 writes them whole",
    "whole weights in stage 3": "in stage 3 no rank has the whole weights, and none writes them",
    "weights in stage 3": "in stage 3 the files of model states hold no weights, as "
    "lesson 13 shows: the weights are in the optimizer's 32 bits only",
    "no master weights in fp32": "from stage 1 on, DeepSpeed's optimizer has its own "
    "copy of the weights in 32 bits, also in fp32, and the checkpoint has it, too",
    "no master weights in bf16": "in bf16 the optimizer updates master weights in 32 "
    "bits, and they are in the checkpoint",
    "no master weights for plain SGD": "the master weights do not depend on the optimizer: with plain SGD, which keeps no "
    "numbers of its own, they are in the checkpoint, too",
    "master weights in stage 0": "in stage 0 and fp32 the optimizer has no master "
    "weights: it updates the weights themselves",
    "averages in bf16": "the optimizer keeps its numbers in 32 bits, also in bf16",
    "weights in fp32": "in bf16, the network's own weights have 2 bytes each",
    "always AdamW": "`averages` says how many numbers the optimizer keeps: it is not always AdamW, which keeps two",
}


def true_bytes(parameters, ranks, stage, precision, averages, mistakes=()):
    """The bytes that each rank writes, a list. mistakes: some of CAUSES to make."""
    fp32 = precision == "fp32"
    weight = 4 if fp32 or "weights in fp32" in mistakes else 2
    average = weight if "averages in bf16" in mistakes else 4
    averages = 2 if "always AdamW" in mistakes else averages
    state = average * averages
    if not fp32:
        state += 4 * ("no master weights in bf16" not in mistakes)
    elif stage:
        state += 4 * ("no master weights in fp32" not in mistakes)
    else:
        state += 4 * ("master weights in stage 0" in mistakes)
    if "no master weights for plain SGD" in mistakes and not averages:
        state = 0
    state += weight * ("gradients" in mistakes)
    sharded = "not sharded" not in mistakes if stage else "sharded in stage 0" in mistakes
    every_rank = state / ranks if sharded else 0.0
    if not sharded and (stage or "all write the state" in mistakes):
        every_rank = state
    rank_0 = 0.0 if every_rank else state
    if stage == 3:
        rank_0 += weight * ("whole weights in stage 3" in mistakes)
        every_rank += weight / ranks * ("weights in stage 3" in mistakes)
    elif "all write the weights" in mistakes:
        every_rank += weight
    elif stage and "sharded weights" in mistakes:
        every_rank += weight / ranks
    else:
        rank_0 += weight
    per_parameter = [every_rank + rank_0, *[every_rank] * (ranks - 1)]
    return [size * parameters for size in per_parameter]


def observe_predictions(checkpoint_bytes, cases):
    seen = []
    for case in cases:
        with trying(f"checkpoint_bytes({words(case)})"):
            seen.append(numbers(checkpoint_bytes(**case)))
    return seen


def numbers(returned):
    """A list of numbers of any kind as floats; anything else as it is."""
    if isinstance(returned, dict | str):
        return returned
    try:
        return [float(number) for number in returned]
    except (TypeError, ValueError, RuntimeError):
        return returned


def words(case):
    return ", ".join(f"{name}={value!r}" for name, value in case.items())


def observe_checkpoints(cases):
    """Of real engines: the bytes that each rank has written."""
    found = []
    with process_group(timeout=20) as (rank, _):
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                names = [folder]
                dist.broadcast_object_list(names, src=0)  # rank 0's is for all
                save(case, names[0])
                dist.barrier()
                found.append(written(names[0], dist.get_world_size()))
                dist.barrier()  # before rank 0 removes it
    return found


def save(case, folder):
    """One step of a real engine, then its checkpoint."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    sharding = {"stage": case["stage"], "reduce_bucket_size": case["parameters"]}
    if case["stage"] < 3:
        sharding["allgather_bucket_size"] = case["parameters"]
    config = {
        MICRO: 2,
        "optimizer": OPTIMIZERS[case["averages"]],
        "zero_allow_untested_optimizer": True,
        "zero_optimization": sharding,
        "bf16": {"enabled": case["precision"] == "bf16"},
    }
    network = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    engine = lesson13.start_engine(network, config, torch.device("cpu"))
    inputs = torch.randn(2, WIDTH).to(next(network.parameters()).dtype)
    engine.backward(engine(inputs).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(folder, "after one step")


def written(folder, ranks):
    """The bytes of the files of each rank. All files without a rank are rank 0's."""
    sizes = [0] * ranks
    for path in Path(folder).rglob("*.pt"):
        named = re.search(r"zero_pp_rank_(\d+)_", path.name)
        sizes[int(named[1]) if named else 0] += path.stat().st_size
    return sizes


def some_cases(draw):
    """Cases to measure, and larger ones, which the formula answers."""
    ranks = draw.choice([2, 3])
    measured = []
    for stage in (0, draw.choice([1, 2]), 3):
        case = {"parameters": 2 * WIDTH**2, "ranks": ranks, "stage": stage}
        case |= {"precision": draw.choice(["fp32", "bf16"])}
        measured.append(case | {"averages": draw.randrange(3)})
    large = []
    for stage, precision, averages in product(range(4), ("fp32", "bf16"), (0, None)):
        case = {"parameters": draw.randrange(1, 70) * 10**8, "ranks": draw.choice([2, 4, 8, 16]), "stage": stage}
        averages = draw.choice([1, 2]) if averages is None else averages
        large.append(case | {"precision": precision, "averages": averages})
    large += [large[0] | {"ranks": 1}, large[-4] | {"ranks": 1}]
    return measured, large


@question(
    "Make a list of what a checkpoint holds: the network's weights, master weights where "
    "there are any, and the numbers that the optimizer keeps. For each, ask which ranks "
    "have it: what all ranks have, only rank 0 writes.",
    "Weights: 4 or 2 bytes, from rank 0, but in stage 3 from nobody. The optimizer's "
    "state: 4 bytes for each of its numbers, and 4 for the master weights, which bf16 "
    "always has, and fp32 from stage 1 on. In stage 0 rank 0 writes the state, and from "
    "stage 1 on each rank writes an equal part.",
    "weight = 4 if precision == 'fp32' else 2; master = 4 if stage or precision == "
    "'bf16' else 0; state = parameters * (master + 4 * averages). Stage 0: rank 0 has "
    "parameters * weight + state, all others 0. Else each has state / ranks, and rank 0 "
    "has parameters * weight on top, unless the stage is 3.",
)
def check_checkpoint_bytes(answer, draw):
    """Checkpoints of three real engines on 2 or 3 ranks, and those of larger ones by the
    formula: what each rank writes.
    """
    deepspeed_is_needed()
    measured, large = some_cases(draw)
    [predictions] = answer.on_ranks(observe_predictions, measured + large)
    ranks = measured[0]["ranks"]
    found = answer.without(observe_checkpoints, measured, nproc=ranks, timeout=TIMEOUT)[0]
    cause = cause_of(measured + large, predictions)
    for place, (case, got) in enumerate(zip(measured + large, predictions)):
        if place < len(found):
            hold(claims(case, got, found[place], "the files that a real engine has written", 0.03, cause))
        else:
            hold(claims(case, got, true_bytes(**case), "a larger network", 1e-3, cause))


# ---- what is claimed ----


def claims(case, got, expected, what, tolerance, cause):
    """cause: what explains the predictions of all cases, or None."""
    call = f"checkpoint_bytes({words(case)}), with {NAMES[case['averages']]}: {what}"
    in_bytes, ranks = f"bytes, from rank 0 on: {listed(expected)}", case["ranks"]
    yield Claim(call, is_list(got), True, f"return a list of {ranks} numbers, one for each rank",
                told=in_bytes, shown=str(got))  # fmt: skip
    many = f"{len(got)} number{'s' * (len(got) != 1)} for {ranks} ranks"
    yield Claim(call, len(got), ranks, f"return one number for each rank: these are {many}",
                told=in_bytes, shown=listed(got))  # fmt: skip
    yield Claim(call, got, about(expected, tolerance, slack=4096),
                lambda: cause or cause_of([case], [got]) or most_different(case, got),
                told=in_bytes, shown=listed(got))  # fmt: skip


def listed(sizes):
    return ", ".join(f"{size:,.0f}" for size in sizes[:8]) + ", ..." * (len(sizes) > 8)


def is_list(got):
    return isinstance(got, list) and all(isinstance(size, float) for size in got)


def about(sizes, tolerance, slack):
    """In the place of each size, what may be there instead."""
    return [Between(size - tolerance * size - slack, size + tolerance * size + slack) for size in sizes]


def cause_of(cases, predictions):
    """The fewest of CAUSES, one or two, that explain all predictions; else None."""
    if not all(map(is_list, predictions)):
        return None
    for number in (1, 2):
        for mistakes in combinations(CAUSES, number):
            made = [true_bytes(**case, mistakes=mistakes) for case in cases]
            if all(agree(a, about(b, 0.01, slack=1)) for a, b in zip(predictions, made)):
                return "; and ".join(CAUSES[mistake] for mistake in mistakes)
    return None


def most_different(case, got):
    """Where one prediction is off, in bytes per parameter."""
    true = true_bytes(**case)
    rank = max(range(case["ranks"]), key=lambda rank: abs(got[rank] - true[rank]))
    sizes = [f"{some[rank] / case['parameters']:.6g}" for some in (true, got)]
    return (
        f"rank {rank} writes {sizes[0]} bytes per parameter, and not {sizes[1]}: what of "
        "weights, master weights and the optimizer's numbers does this rank write?"
    )
