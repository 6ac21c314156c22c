"""Exercise 13: DeepSpeed."""

import copy
import json
import tempfile
from itertools import combinations

import torch
import torch.distributed as dist
from ddp_course import lesson13
from torch.nn import functional as F

from mutants import right, wrong

# ---- repair ----


def mend(name, config, **other):
    """The right repairs, but for those that `other` names: what to do instead."""
    do = {
        "arithmetic": lambda c: c.update(
            gradient_accumulation_steps=c["train_batch_size"] // (8 * c["train_micro_batch_size_per_gpu"])
        ),
        "memory": lambda c: c.update(zero_optimization=c.pop("zero_optimisation")),
        "clipping": lambda c: c.update(gradient_clipping=0.0),
        "precision": lambda c: c.pop("fp16"),
        "schedule": lambda c: c["scheduler"]["params"].update(warmup_min_lr=1e-7),
    } | other
    do[name](config)
    return config


@right("repair")
def by_a_table(name, config):
    return mend(name, config)


@right("repair")
def of_a_copy(name, config):
    mended = copy.deepcopy(config)
    if name == "arithmetic":
        del mended["gradient_accumulation_steps"]  # DeepSpeed derives it
    elif name == "precision":
        mended["fp16"]["enabled"] = False
    elif name == "clipping":
        mended["gradient_clipping"] = 0
    else:
        mended = mend(name, mended)
    return mended


@wrong("repair", "micro batch .* = 128")
def changes_nothing(name, config):
    return config


@wrong("repair", "accumulation|micro batch")
def for_seven_ranks(name, config):
    fewer = lambda c: c.update(  # noqa: E731
        gradient_accumulation_steps=c["train_batch_size"] // 7 // c["train_micro_batch_size_per_gpu"]
    )
    return mend(name, config, arithmetic=fewer)


@wrong("repair", "change what is wrong, and nothing else")
def leaves_a_key_without_a_value(name, config):
    mended = mend(name, config)
    return mended | {"zero_optimisation": None} if name != "memory" else mended


@wrong("repair", "return the repaired configuration")
def returns_nothing(name, config):
    mend(name, config)


@wrong("repair", "change the accumulation")
def changes_the_batch(name, config):
    return mend(name, config, arithmetic=lambda c: c.update(train_batch_size=128))


@wrong("repair", "change the accumulation|micro batch")
def changes_the_micro_batch(name, config):
    micro = lambda c: c.update(train_micro_batch_size_per_gpu=c["train_micro_batch_size_per_gpu"] // 2)
    return mend(name, config, arithmetic=micro)


@wrong("repair", "micro batch")
def knows_the_first_number_only(name, config):
    return mend(name, config, arithmetic=lambda c: c.update(gradient_accumulation_steps=2))


@wrong("repair", "trains without ZeRO")
def leaves_the_word(name, config):
    return mend(name, config, memory=lambda c: None)


@wrong("repair", "the misspelt one is still there")
def leaves_both_words(name, config):
    return mend(name, config, memory=lambda c: c.update(zero_optimization=c["zero_optimisation"]))


@wrong("repair", "its contents were right")
def another_stage(name, config):
    def to_stage_0(c):
        del c["zero_optimisation"]
        c["zero_optimization"] = {"stage": 0}

    return mend(name, config, memory=to_stage_0)


@wrong("repair", "left out, gradient_clipping is 1.0")
def says_nothing_of_clipping(name, config):
    return mend(name, config, clipping=lambda c: None)


@wrong("repair", "0 does not clip")
def clips_at_one(name, config):
    return mend(name, config, clipping=lambda c: c.update(gradient_clipping=1.0))


@wrong("repair", "exactly one of the two")
def keeps_both_precisions(name, config):
    return mend(name, config, precision=lambda c: None)


@wrong("repair", "exactly one of the two")
def keeps_fp16(name, config):
    return mend(name, config, precision=lambda c: c.pop("bf16"))


@wrong("repair", "first two updates")
def sleeps_at_first(name, config):
    return mend(name, config, schedule=lambda c: None)


@wrong("repair", "first two updates")
def takes_out_the_number(name, config):
    return mend(name, config, schedule=lambda c: c["scheduler"]["params"].pop("warmup_min_lr"))


@wrong("repair", "first two updates")
def begins_at_the_top(name, config):
    return mend(name, config, schedule=lambda c: c["scheduler"]["params"].update(warmup_min_lr=1.0))


@wrong("repair", "change what is wrong, and nothing else")
def without_a_schedule(name, config):
    return mend(name, config) | ({} if name == "schedule" else {"scheduler": None})


@wrong("repair", "change what is wrong, and nothing else")
def another_rate(name, config):
    mended = mend(name, config)
    mended["optimizer"]["params"]["lr"] = 1e-3
    return mended


@wrong("repair", "first two updates")
def takes_out_the_schedule(name, config):
    return mend(name, config, schedule=lambda c: c.pop("scheduler"))


@wrong("repair", "first two updates")
def with_a_rate_as_text(name, config):
    rate = lambda c: c["scheduler"]["params"].update(warmup_min_lr="1e-6")
    return mend(name, config, schedule=rate)


@wrong("repair", "must be a whole number")
def divides_with_a_fraction(name, config):
    def accumulation(c):
        share = c["train_batch_size"] / 8
        c["gradient_accumulation_steps"] = share / c["train_micro_batch_size_per_gpu"]

    return mend(name, config, arithmetic=accumulation)


@wrong("repair", "stage|its contents were right")
def always_stage_two(name, config):
    def rename(c):
        c.pop("zero_optimisation")
        c["zero_optimization"] = {"stage": 2, "overlap_comm": True}

    return mend(name, config, memory=rename)


@wrong("repair", "change what is wrong, and nothing else")
def warms_up_for_less_long(name, config):
    def shorter(c):
        c["scheduler"]["params"] |= {"warmup_min_lr": 1e-6, "warmup_num_steps": 10}

    return mend(name, config, schedule=shorter)


@wrong("repair", "0 does not clip")
def clips_far_away(name, config):
    return mend(name, config, clipping=lambda c: c.update(gradient_clipping=1e9))


@right("repair")
def in_a_new_dict(name, config):
    """Of new dicts, in another order."""
    mended = dict(reversed(mend(name, config).items()))
    return {key: copy.copy(value) for key, value in mended.items()}


# ---- checkpoint_bytes ----


def per_rank(parameters, ranks, from_rank_0, from_each):
    sizes = [parameters * from_each] * ranks
    sizes[0] += parameters * from_rank_0
    return sizes


@right("checkpoint_bytes")
def case_by_case(parameters, ranks, stage, precision, averages):
    weight = {"fp32": 4, "bf16": 2}[precision]
    if stage == 0:
        master = 0 if precision == "fp32" else 4
        whole = weight + master + 4 * averages
        return per_rank(parameters, ranks, whole, 0)
    state = 4 * (1 + averages) / ranks
    return per_rank(parameters, ranks, 0 if stage == 3 else weight, state)


@right("checkpoint_bytes")
def in_numpy_integers(parameters, ranks, stage, precision, averages):
    import numpy

    return numpy.array(case_by_case(parameters, ranks, stage, precision, averages)).astype(numpy.int64)


@right("checkpoint_bytes")
def rounds_shards_up(parameters, ranks, stage, precision, averages):
    """Whole bytes, and shards that are padded to the same length, as a tuple."""
    shard = -(-parameters // ranks) * (4 + 4 * averages)
    weights = parameters * (4 if precision == "fp32" else 2)
    if not stage:
        master = 4 if precision == "bf16" else 0
        return (weights + parameters * (master + 4 * averages), *[0] * (ranks - 1))
    return (shard + (weights if stage < 3 else 0), *[shard] * (ranks - 1))


@wrong("checkpoint_bytes", "only rank 0 writes|bytes per parameter, and not")
def as_the_lesson_keeps(parameters, ranks, stage, precision, averages):
    """Lesson 13's formula for the memory of each rank."""
    weight = 4 if precision == "fp32" else 2
    master = 4 if precision == "bf16" or stage else 0
    weights = weight / ranks if stage == 3 else weight
    gradients = weights if stage == 3 else 0
    kept = weights + gradients + (master + 8) / (ranks if stage else 1)
    return [parameters * kept] * ranks


@wrong("checkpoint_bytes", "only rank 0 writes|bytes per parameter, and not")
def as_the_lesson_keeps_with_averages(parameters, ranks, stage, precision, averages):
    """The same formula with the optimizer's own numbers, and without gradients."""
    weight = 4 if precision == "fp32" else 2
    master = 4 if precision == "bf16" or stage else 0
    weights = weight / ranks if stage == 3 else weight
    kept = weights + (master + 4 * averages) / (ranks if stage else 1)
    return [parameters * kept] * ranks


@wrong("checkpoint_bytes", "hold no weights")
def weights_in_each_shard(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    weight = 4 if precision == "fp32" else 2
    return [size + parameters * weight / ranks * (stage == 3) for size in found]


@wrong("checkpoint_bytes", "no rank has the whole weights")
def rank_zero_writes_weights_in_stage_three(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    found[0] += parameters * (4 if precision == "fp32" else 2) * (stage == 3)
    return found


@wrong("checkpoint_bytes", "its own copy of the weights in 32 bits, also in fp32")
def no_copy_in_fp32(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    if stage and precision == "fp32":
        found = [size - 4 * parameters / ranks for size in found]
    return found


@wrong("checkpoint_bytes", "it updates the weights themselves")
def a_copy_in_stage_zero(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    found[0] += 4 * parameters * (stage == 0 and precision == "fp32")
    return found


@wrong("checkpoint_bytes", "also in bf16")
def averages_in_two_bytes(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, 0)
    each = 4 if precision == "fp32" else 2
    state = parameters * each * averages
    if not stage:
        return [found[0] + state, *found[1:]]
    return [size + state / ranks for size in found]


@wrong("checkpoint_bytes", "keeps two")
def knows_adam_only(parameters, ranks, stage, precision, averages):
    return case_by_case(parameters, ranks, stage, precision, 2)


@wrong("checkpoint_bytes", "only its part of the optimizer's state")
def all_write_all(parameters, ranks, stage, precision, averages):
    alone = case_by_case(parameters, 1, stage, precision, averages)[0]
    if not stage:
        return [alone, *[0] * (ranks - 1)]
    weights = parameters * (4 if precision == "fp32" else 2) * (stage < 3)
    return [alone, *[alone - weights] * (ranks - 1)]


@wrong("checkpoint_bytes", "in stage 0 nothing is sharded")
def shards_in_stage_zero(parameters, ranks, stage, precision, averages):
    if stage:
        return case_by_case(parameters, ranks, stage, precision, averages)
    weight, master = (4, 0) if precision == "fp32" else (2, 4)
    return per_rank(parameters, ranks, weight, (master + 4 * averages) / ranks)


@wrong("checkpoint_bytes", "a checkpoint holds no gradients")
def with_gradients(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    gradients = parameters * (4 if precision == "fp32" else 2)
    if not stage:
        return [found[0] + gradients, *found[1:]]
    return [size + gradients / ranks for size in found]


@wrong("checkpoint_bytes", "one for each rank")
def the_sum_of_all(parameters, ranks, stage, precision, averages):
    return sum(case_by_case(parameters, ranks, stage, precision, averages))


@wrong("checkpoint_bytes", "one number for each rank: these are 1 number")
def the_first_rank_only(parameters, ranks, stage, precision, averages):
    return case_by_case(parameters, ranks, stage, precision, averages)[:1]


@wrong("checkpoint_bytes", "bytes per parameter, and not")
def counts_numbers_not_bytes(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, "fp32", averages)
    return [size / 4 for size in found]


@wrong("checkpoint_bytes", "only rank 0 writes|bytes per parameter, and not")
def all_ranks_write_in_stage_zero(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    return found if stage else found[:1] * ranks


@wrong("checkpoint_bytes", "bytes per parameter, and not")
def the_last_rank_writes(parameters, ranks, stage, precision, averages):
    return case_by_case(parameters, ranks, stage, precision, averages)[::-1]


@wrong("checkpoint_bytes", "only rank 0 writes|bytes per parameter, and not")
def equal_parts(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    return [sum(found) / ranks] * ranks


@wrong("checkpoint_bytes", "bytes per parameter, and not")
def rank_zero_writes_all(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    return [sum(found)] + [0] * (ranks - 1)


@wrong("checkpoint_bytes", "return a list of")
def by_rank(parameters, ranks, stage, precision, averages):
    return dict(enumerate(case_by_case(parameters, ranks, stage, precision, averages)))


@wrong("checkpoint_bytes", "the network's own weights have 2 bytes each")
def all_weights_in_four_bytes(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    found[0] += 2 * parameters * (stage < 3 and precision == "bf16")
    return found


@wrong("checkpoint_bytes", "do not depend on the optimizer")
def no_master_weights_for_plain_sgd(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    weights = parameters * (4 if precision == "fp32" else 2) * (stage < 3)
    return found if averages else [weights] + [0] * (ranks - 1)


@wrong("checkpoint_bytes", "in stages 1 and 2 the weights are not sharded")
def weights_as_shards(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    if stage not in (1, 2):
        return found
    weights = parameters * (4 if precision == "fp32" else 2)
    return [size + weights / ranks - weights * (rank == 0) for rank, size in enumerate(found)]


@wrong("checkpoint_bytes", "master weights in 32 bits")
def no_master_weights_in_bf16(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    if precision == "fp32":
        return found
    part = 4 * parameters / (ranks if stage else 1)
    return [size - part * (stage > 0 or rank == 0) for rank, size in enumerate(found)]


@wrong("checkpoint_bytes", "IndexError|ValueError|ZeroDivisionError", "your code raised")
def the_rest_to_all_others(parameters, ranks, stage, precision, averages):
    """Divides by the number of other ranks, of which there may be none."""
    first, *others = case_by_case(parameters, ranks, stage, precision, averages)
    return [first] + [sum(others) / (ranks - 1)] * (ranks - 1)


@wrong("checkpoint_bytes", "one for each rank")
def in_words(parameters, ranks, stage, precision, averages):
    return ", ".join(map(str, case_by_case(parameters, ranks, stage, precision, averages)))


@wrong("checkpoint_bytes", "bytes per parameter, and not")
def in_megabytes(parameters, ranks, stage, precision, averages):
    return [size / 10**6 for size in case_by_case(parameters, ranks, stage, precision, averages)]


@right("checkpoint_bytes")
def from_a_list_of_parts(parameters, ranks, stage, precision, averages):
    """What each rank has, as pairs (bytes, where)."""
    parts = [(2 if precision == "bf16" else 4, "nowhere" if stage == 3 else "rank 0")]
    parts += [(4, "shards" if stage else "rank 0")] * (averages + (stage > 0 or precision == "bf16"))
    sizes = {"nowhere": lambda rank: 0, "rank 0": lambda rank: rank == 0, "shards": lambda rank: 1 / ranks}
    return [parameters * sum(size * sizes[where](rank) for size, where in parts) for rank in range(ranks)]


@right("checkpoint_bytes")
def with_the_headers(parameters, ranks, stage, precision, averages):
    """3 KB more for each file that is written."""
    found = case_by_case(parameters, ranks, stage, precision, averages)
    return torch.tensor([size + 3000 * (size > 0) for size in found])


# ---- train ----

SETTINGS = {"lr": 0.1, "momentum": 0.9}
CPU = torch.device("cpu")


def groups_of(network, matrices=0.2, others=0.0):
    decayed = [p for p in network.parameters() if p.ndim > 1]
    rest = [p for p in network.parameters() if p.ndim < 2]
    return [{"params": decayed, "weight_decay": matrices}, {"params": rest, "weight_decay": others}]


def configured(batches, stage, accumulate, max_norm):
    """The right configuration."""
    return {
        "train_micro_batch_size_per_gpu": len(batches[0][1]),
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": max_norm,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
    }


def initialize(network, config, groups=None, **more):
    import deepspeed

    return deepspeed.initialize(model=network, model_parameters=groups, config=config, **more)[0]


def forward(engine, inputs, labels):
    return F.cross_entropy(engine(inputs), labels)


def plain_step(engine, inputs, labels):
    loss = forward(engine, inputs, labels)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def mean_of_all(losses):
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def whole_updates(batches, accumulate):
    whole = len(batches) // accumulate * accumulate
    return [batches[begin : begin + accumulate] for begin in range(0, whole, accumulate)]


def loop(engine, batches, accumulate, micro_step, after=lambda: None, mean=mean_of_all):
    losses = []
    for update in whole_updates(batches, accumulate):
        of_update = [micro_step(engine, *batch) for batch in update]
        after()
        losses.append(mean(of_update))
    return losses


def ported(network, batches, stage, accumulate, max_norm, groups=groups_of, step=plain_step, **other):
    """The right answer, but for what the rest says; other: lines of the configuration."""
    config = configured(batches, stage, accumulate, max_norm) | other
    engine = initialize(network, config, groups(network))
    return engine, loop(engine, batches, accumulate, step)


@right("train")
def by_parts(network, batches, stage, accumulate, max_norm):
    return ported(network, batches, stage, accumulate, max_norm)


@right("train")
def with_an_optimizer_of_its_own(network, batches, stage, accumulate, max_norm):
    """The groups are in torch's optimizer, which the engine wraps; and by name."""
    named = list(network.named_parameters())
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.2)
    sgd.add_param_group({"params": biases, "weight_decay": 0})
    config = configured(batches, stage, accumulate, max_norm)
    del config["optimizer"]
    config["zero_optimization"]["allgather_bucket_size"] = 10**5
    engine = initialize(network, config, optimizer=sgd)
    return engine, loop(engine, batches, accumulate, plain_step)


@right("train")
def by_the_boundary(network, batches, stage, accumulate, max_norm):
    """By the engine's own count, with what backward returns; the losses as tensors."""
    config = configured(batches, stage, accumulate, max_norm)
    config["train_batch_size"] = len(batches[0][0]) * accumulate * dist.get_world_size()
    engine = initialize(network, config, groups_of(network))
    losses, total = [], 0.0
    for inputs, labels in batches[: len(batches) // accumulate * accumulate]:
        total += engine.backward(forward(engine, inputs, labels)).detach()
        if engine.is_gradient_accumulation_boundary():
            dist.all_reduce(total)
            losses.append(total / dist.get_world_size())
            total = 0.0
        engine.step()
    return [engine, torch.stack(losses)]


@right("train")
def reduces_all_losses_at_the_end(network, batches, stage, accumulate, max_norm):
    deepspeed = lesson13.load_deepspeed(CPU)
    config = configured(batches, stage, accumulate, max_norm)
    config["optimizer"]["params"]["weight_decay"] = 0.2
    decayed, rest = groups_of(network)
    del decayed["weight_decay"]
    engine, *_ = deepspeed.initialize(model=network, model_parameters=[decayed, rest], config=config)
    whole = batches[: len(batches) // accumulate * accumulate]
    losses = torch.stack([plain_step(engine, *batch) for batch in whole])
    losses = losses.view(-1, accumulate).mean(dim=1)
    dist.all_reduce(losses)
    return engine, [loss / dist.get_world_size() for loss in losses.tolist()]


@wrong("train", "only the matrices do|nothing decays|AdamW")
def as_in_the_lesson(network, batches, stage, accumulate, max_norm):
    """Lesson 13's configuration, engine and loop."""
    flags = ["--stage", stage, "--accumulate", accumulate, "--max-norm", max_norm]
    flags += ["--batch-size", len(batches[0][0]), "--precision", "fp32"]
    args = lesson13.arguments(list(map(str, flags)))
    config = lesson13.configuration(args, dist.get_world_size())
    engine = lesson13.start_engine(network, config, CPU)
    return engine, loop(engine, batches, accumulate, plain_step)


@wrong("train", "nothing decays here")
def starts_the_lessons_engine(network, batches, stage, accumulate, max_norm):
    config = configured(batches, stage, accumulate, max_norm)
    engine = lesson13.start_engine(network, config, CPU)
    return engine, loop(engine, batches, accumulate, plain_step)


@wrong("train", "these are the losses of the micro-batches")
def returns_the_lessons_losses(network, batches, stage, accumulate, max_norm):
    """As lesson 13's loop: the ranks' mean for each micro-batch."""
    config = configured(batches, stage, accumulate, max_norm)
    engine = initialize(network, config, groups_of(network))
    whole = batches[: len(batches) // accumulate * accumulate]
    losses = torch.stack([plain_step(engine, *batch) for batch in whole])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return engine, losses.tolist()


def alone(network, batches, accumulate, max_norm, average=False):
    """The notebook's loop, and with averaged gradients if asked for."""
    optimizer, losses = torch.optim.SGD(groups_of(network), **SETTINGS), []
    for update in whole_updates(batches, accumulate):
        of_update = [forward(network, *batch) for batch in update]
        (sum(of_update) / accumulate).backward()
        if average:
            for parameter in network.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_all([loss.detach() for loss in of_update]))
    return losses


@wrong("train", "build an engine with deepspeed.initialize")
def without_an_engine(network, batches, stage, accumulate, max_norm):
    return network, alone(network, batches, accumulate, max_norm, average=True)


@wrong("train", "go around the engine|goes through the engine once")
def trains_beside_the_engine(network, batches, stage, accumulate, max_norm):
    config = configured(batches, stage, accumulate, max_norm)
    engine = initialize(network, config, groups_of(network))
    return engine, alone(engine.module, batches, accumulate, max_norm, average=True)


@wrong("train", "build an engine with deepspeed.initialize")
def in_torchs_ddp(network, batches, stage, accumulate, max_norm):
    model = torch.nn.parallel.DistributedDataParallel(network)
    return model, alone(model, batches, accumulate, max_norm)


@wrong("train", "return \\(engine, losses\\)")
def returns_losses_only(network, batches, stage, accumulate, max_norm):
    return ported(network, batches, stage, accumulate, max_norm)[1]


@wrong("train", "zero_optimization has the stage")
def always_in_stage_two(network, batches, stage, accumulate, max_norm):
    return ported(network, batches, 2, accumulate, max_norm)


@wrong("train", "zero_optimization has the stage")
def stage_under_another_key(network, batches, stage, accumulate, max_norm):
    sharding = {"zero_optimization": {}, "zero": {"stage": stage}}
    return ported(network, batches, stage, accumulate, max_norm, **sharding)


@wrong("train", "left out, gradient_clipping is 1.0")
def never_says_how_to_clip(network, batches, stage, accumulate, max_norm):
    config = configured(batches, stage, accumulate, max_norm)
    del config["gradient_clipping"]
    engine = initialize(network, config, groups_of(network))
    return engine, loop(engine, batches, accumulate, plain_step)


@wrong("train", "the engine clips at 0")
def clips_by_hand_after_backward(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)
        engine.step()
        return loss.detach()

    none = {"gradient_clipping": 0.0}
    return ported(network, batches, stage, accumulate, max_norm, step=step, **none)


@wrong("train", "in the loop, only the matrices do")
def decays_all(network, batches, stage, accumulate, max_norm):
    sgd = {"type": "SGD", "params": SETTINGS | {"weight_decay": 0.2}}
    no_groups = lambda network: list(network.parameters())
    return ported(network, batches, stage, accumulate, max_norm, no_groups, optimizer=sgd)


@wrong("train", "it is the other way round")
def decays_the_biases(network, batches, stage, accumulate, max_norm):
    swapped = lambda network: groups_of(network, 0.0, 0.2)
    return ported(network, batches, stage, accumulate, max_norm, swapped)


@wrong("train", "the loop has momentum 0.9")
def without_momentum(network, batches, stage, accumulate, max_norm):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return ported(network, batches, stage, accumulate, max_norm, **sgd)


@wrong("train", "the loop has lr 0.1, and the engine has 0.001")
def with_the_default_rate(network, batches, stage, accumulate, max_norm):
    sgd = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
    return ported(network, batches, stage, accumulate, max_norm, **sgd)


@wrong("train", "the engine has AdamW")
def with_adamw(network, batches, stage, accumulate, max_norm):
    adamw = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    return ported(network, batches, stage, accumulate, max_norm, optimizer=adamw)


@wrong("train", "engine.step\\(\\) is not called")
def never_steps(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "it counts them, and makes an update after every \\d of them")
def steps_when_it_is_time(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        return loss.detach()

    config = configured(batches, stage, accumulate, max_norm)
    engine = initialize(network, config, groups_of(network))
    return engine, loop(engine, batches, accumulate, step, engine.step)


@wrong("train", "the engine accumulates 1")
def tells_the_engine_nothing_of_accumulation(network, batches, stage, accumulate, max_norm):
    once = {"gradient_accumulation_steps": 1}
    return ported(network, batches, stage, accumulate, max_norm, **once)


@wrong("train", "the configuration has other sizes than the training")
def says_a_micro_batch_of_one(network, batches, stage, accumulate, max_norm):
    one = {"train_micro_batch_size_per_gpu": 1}
    return ported(network, batches, stage, accumulate, max_norm, **one)


@wrong("train", "not equal to micro_batch_per_gpu", status="your code raised")
def forgets_the_ranks_in_the_batch(network, batches, stage, accumulate, max_norm):
    whole = {"train_batch_size": len(batches[0][0]) * accumulate}
    return ported(network, batches, stage, accumulate, max_norm, **whole)


@wrong("train", "give reduce_bucket_size|allocate memory", status="failed|your code raised")
def with_the_default_buckets(network, batches, stage, accumulate, max_norm):
    sharding = {"zero_optimization": {"stage": stage}}
    return ported(network, batches, stage, accumulate, max_norm, **sharding)


@wrong("train", "Please use engine.backward", status="your code raised")
def backward_of_torch(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        loss.backward()
        engine.step()
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "the loss is divided twice")
def divides_as_well(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss / accumulate)
        engine.step()
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "do not call its step\\(\\) as well")
def steps_the_optimizer_too(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        engine.optimizer.step()
        engine.step()
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "only the last micro-batch of each update counts")
def clears_gradients(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        engine.zero_grad()
        return plain_step(engine, inputs, labels)

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "go around the engine")
def calls_the_network(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = F.cross_entropy(network(inputs), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "that make no whole update are left out")
def takes_all_batches(network, batches, stage, accumulate, max_norm):
    engine, losses = ported(network, batches, stage, accumulate, max_norm)
    for batch in batches[len(batches) // accumulate * accumulate :]:
        plain_step(engine, *batch)
    return engine, losses


@wrong("train", "the mean cross entropy of each micro-batch")
def sums_the_cross_entropy(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = F.cross_entropy(engine(inputs), labels, reduction="sum")
        engine.backward(loss)
        engine.step()
        return loss.detach() / len(labels)

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@right("train")
def from_a_file(network, batches, stage, accumulate, max_norm):
    """The configuration is a JSON file; without a section on ZeRO in stage 0."""
    config = configured(batches, stage, accumulate, max_norm)
    if not stage:
        del config["zero_optimization"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        engine = initialize(network, file.name, groups_of(network))
    return engine, loop(engine, batches, accumulate, plain_step)


@right("train")
def of_a_copied_network(network, batches, stage, accumulate, max_norm):
    copied = copy.deepcopy(network)
    return ported(copied, batches, stage, accumulate, max_norm)


@wrong("train", "goes through the engine once")
def joins_micro_batches(network, batches, stage, accumulate, max_norm):
    """One large batch per update needs the memory that accumulation saves."""
    joined = [tuple(torch.cat(parts) for parts in zip(*update)) for update in whole_updates(batches, accumulate)]
    return ported(network, joined, stage, 1, max_norm)


@wrong("train", "the engine accumulates \\d+: the engine has to know")
def accumulates_for_all_ranks(network, batches, stage, accumulate, max_norm):
    more = {"gradient_accumulation_steps": accumulate * dist.get_world_size()}
    return ported(network, batches, stage, accumulate, max_norm, **more)


@wrong("train", "the loop trains in 32 bits")
def in_sixteen_bits(network, batches, stage, accumulate, max_norm):
    halves = [(inputs.bfloat16(), labels) for inputs, labels in batches]
    bf16 = {"bf16": {"enabled": True}}
    return ported(network, halves, stage, accumulate, max_norm, **bf16)


@wrong("train", "the loop has none")
def warms_up(network, batches, stage, accumulate, max_norm):
    rates = {"warmup_max_lr": 0.1, "warmup_num_steps": 4}
    schedule = {"scheduler": {"type": "WarmupLR", "params": rates}}
    return ported(network, batches, stage, accumulate, max_norm, **schedule)


@wrong("train", "the loop has nesterov False")
def looks_ahead(network, batches, stage, accumulate, max_norm):
    sgd = {"type": "SGD", "params": SETTINGS | {"nesterov": True}}
    return ported(network, batches, stage, accumulate, max_norm, optimizer=sgd)


@wrong("train", "does something besides the engine change gradients")
def sums_gradients_as_well(network, batches, stage, accumulate, max_norm):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        for parameter in network.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        engine.step()
        return loss.detach()

    return ported(network, batches, stage, accumulate, max_norm, step=step)


@wrong("train", "build an engine with deepspeed.initialize")
def returns_the_network(network, batches, stage, accumulate, max_norm):
    engine, losses = ported(network, batches, stage, accumulate, max_norm)
    return engine.module, losses


@wrong("train", "build an engine with deepspeed.initialize")
def the_losses_first(network, batches, stage, accumulate, max_norm):
    engine, losses = ported(network, batches, stage, accumulate, max_norm)
    return losses, engine


def with_losses(change):
    """The right training, with other losses. change: takes an update's losses."""

    def train(network, batches, stage, accumulate, max_norm):
        config = configured(batches, stage, accumulate, max_norm)
        engine = initialize(network, config, groups_of(network))
        return engine, loop(engine, batches, accumulate, plain_step, mean=change)

    return train


@wrong("train", "the mean on this rank only")
def keeps_its_own_losses(*arguments):
    return with_losses(lambda losses: torch.stack(losses).mean().item())(*arguments)


@wrong("train", "the last micro-batch's only")
def keeps_the_last_loss(*arguments):
    return with_losses(lambda losses: mean_of_all(losses[-1:]))(*arguments)


@wrong("train", "divided already")
def divides_what_is_divided(*arguments):
    return with_losses(lambda losses: mean_of_all(losses) / len(losses))(*arguments)


@wrong("train", "take the mean")
def adds_up_the_losses(*arguments):
    return with_losses(lambda losses: mean_of_all(losses) * len(losses))(*arguments)


@wrong("train", "take the mean")
def sums_over_the_ranks(*arguments):
    def summed(losses):
        return mean_of_all(losses) * dist.get_world_size()

    return with_losses(summed)(*arguments)


@wrong("train", "over all ranks|the mean on this rank only")
def on_rank_zero_only(*arguments):
    def reduced(losses):
        mean = torch.stack(losses).mean()
        dist.reduce(mean, 0, dist.ReduceOp.AVG)
        return mean.item()

    return with_losses(reduced)(*arguments)


@wrong("train", "over all micro-batches of an update, and over all ranks")
def a_running_mean(*arguments):
    so_far = []

    def running(losses):
        so_far.extend(losses)
        return mean_of_all(so_far)

    return with_losses(running)(*arguments)


# ---- place ----


def slowest(costs, cuts):
    return max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs))))


def lengths(costs, cuts):
    return [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)))]


@right("place")
def by_trying_all(costs, stages):
    every = combinations(range(1, len(costs)), stages - 1)
    return lengths(costs, min(every, key=lambda cuts: slowest(costs, cuts)))


@right("place")
def by_recursion(costs, stages):
    def solve(begin, left):
        if left == 1:
            return sum(costs[begin:]), [len(costs) - begin]
        options = []
        for end in range(begin + 1, len(costs) - left + 2):
            rest, found = solve(end, left - 1)
            options.append((max(sum(costs[begin:end]), rest), [end - begin, *found]))
        return min(options)

    return solve(0, stages)[1]


@right("place")
def as_a_tuple(costs, stages):
    return tuple(by_trying_all(costs, stages))


@right("place")
def in_numpy(costs, stages):
    import numpy

    return numpy.array(by_trying_all(costs, stages))


@right("place")
def by_bisection(costs, stages):
    """Searches the limit by halves, and fills from the end."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        needed, load = 1, 0
        for cost in costs:
            needed, load = (needed + 1, cost) if load + cost > limit else (needed, load + cost)
        low, high = (low, limit) if needed <= stages else (limit + 1, high)
    found, load, left = [0], 0, stages
    for place in reversed(range(len(costs))):
        must_cut = place + 1 == left - len(found)
        if found[0] and (load + costs[place] > low or must_cut):
            found.insert(0, 0)
            load = 0
        found[0] += 1
        load += costs[place]
    return found


@wrong("place", "sets the pace for all")
def heaviest_alone(costs, stages):
    """Cuts off the largest cost, and shares the rest by number."""
    cuts = sorted({max(1, costs.index(max(costs)))})
    cuts += [c for c in range(1, len(costs)) if c not in cuts]
    return lengths(costs, sorted(cuts[: stages - 1]))


@wrong("place", "sets the pace for all")
def halves_and_halves(costs, stages):
    """Cuts the stage with the largest sum in two, until there are enough."""
    cuts = []
    while len(cuts) < stages - 1:
        edges = [0, *cuts, len(costs)]
        pairs = [(a, b) for a, b in zip(edges, edges[1:]) if b - a > 1]
        a, b = max(pairs, key=lambda pair: sum(costs[slice(*pair)]))
        best = min(range(a + 1, b), key=lambda c: max(sum(costs[a:c]), sum(costs[c:b])))
        cuts = sorted([*cuts, best])
    return lengths(costs, cuts)


@wrong("place", "a rank without work")
def limits_below_a_layer(costs, stages):
    """Fills from limits that are less than one layer: the first stage is empty then."""
    for limit in range(1, sum(costs)):
        found, load = [0], 0
        for cost in costs:
            if load + cost > limit:
                found, load = [*found, 0], 0
            found[-1], load = found[-1] + 1, load + cost
        if len(found) == stages:
            return found
    return by_trying_all(costs, stages)


@wrong("place", "each is on one stage")
def sorts_first(costs, stages):
    """Gives the largest to the stage with the least: layers are no longer neighbours."""
    load, found = [0] * stages, [0] * stages
    for cost in sorted(costs)[1:]:
        stage = load.index(min(load))
        load[stage] += cost
        found[stage] += 1
    return [max(1, size) for size in found]


@wrong("place", "how many layers each stage has")
def in_fractions(costs, stages):
    return [float(size) for size in by_trying_all(costs, stages)]


@wrong("place", "how many layers each stage has")
def returns_the_pace(costs, stages):
    return slowest(costs, [1] * 0)


@wrong("place", "equally many layers are not equally much work")
def equally_many(costs, stages):
    cuts = [len(costs) * stage // stages for stage in range(1, stages)]
    return lengths(costs, cuts)


@wrong("place", "sets the pace for all")
def up_to_the_mean(costs, stages):
    mean, found, load = sum(costs) / stages, [0], 0
    for number, cost in enumerate(costs):
        needed = stages - len(found)
        if found[-1] and needed and (load + cost > mean or len(costs) - number == needed):
            found.append(0)
            load = 0
        found[-1] += 1
        load += cost
    while len(found) < stages:
        large = found.index(max(found))
        found[large : large + 1] = [1, found[large] - 1]
    return found


@wrong("place", "stages, not")
def as_few_as_it_takes(costs, stages):
    limit, found, load = (slowest(costs, next(combinations(range(1, len(costs)), stages - 1))), [0], 0)
    for cost in costs:
        if load + cost > limit:
            found.append(0)
            load = 0
        found[-1] += 1
        load += cost
    return found


@wrong("place", "a rank without work")
def leaves_one_idle(costs, stages):
    return [len(costs)] + [0] * (stages - 1)


@wrong("place", "each is on one stage")
def leaves_out_the_last(costs, stages):
    found = by_trying_all(costs, stages)
    return [*found[:-1], found[-1] + 1]


@wrong("place", "how many layers each stage has")
def the_layers_themselves(costs, stages):
    cuts = min(combinations(range(1, len(costs)), stages - 1), key=lambda cuts: slowest(costs, cuts))
    return [costs[a:b] for a, b in zip((0, *cuts), (*cuts, len(costs)))]


@wrong("place", "stages, not")
def where_to_cut(costs, stages):
    return list(min(combinations(range(1, len(costs)), stages - 1), key=lambda cuts: slowest(costs, cuts)))


# ---- answers that are remembered ----


remembered = {}


@wrong("place", "sets the pace for all")
def remembers_by_the_sum(costs, stages):
    key = sum(costs), len(costs), stages
    return remembered.setdefault(key, by_trying_all(costs, stages))
