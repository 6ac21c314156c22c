"""Exercise 13: DeepSpeed."""

import copy
from itertools import combinations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from mutants import right, wrong

# ---- repair ----


def mend(name, config, **other):
    """The right repairs, but for those that `other` names: what to do instead."""
    do = {
        "arithmetic": lambda c: c.update(
            gradient_accumulation_steps=c["train_batch_size"]
            // (8 * c["train_micro_batch_size_per_gpu"])
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


@wrong("repair", "return the repaired configuration")
def returns_nothing(name, config):
    mend(name, config)


@wrong("repair", "change the accumulation")
def changes_the_batch(name, config):
    return mend(name, config, arithmetic=lambda c: c.update(train_batch_size=128))


@wrong("repair", "change the accumulation|micro batch")
def changes_the_micro_batch(name, config):
    micro = lambda c: c.update(
        train_micro_batch_size_per_gpu=c["train_micro_batch_size_per_gpu"] // 2
    )
    return mend(name, config, arithmetic=micro)


@wrong("repair", "micro batch")
def knows_the_first_number_only(name, config):
    return mend(
        name, config, arithmetic=lambda c: c.update(gradient_accumulation_steps=2)
    )


@wrong("repair", "trains without ZeRO")
def leaves_the_word(name, config):
    return mend(name, config, memory=lambda c: None)


@wrong("repair", "the misspelt one is still there")
def leaves_both_words(name, config):
    return mend(
        name,
        config,
        memory=lambda c: c.update(zero_optimization=c["zero_optimisation"]),
    )


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
    return mend(
        name, config, schedule=lambda c: c["scheduler"]["params"].pop("warmup_min_lr")
    )


@wrong("repair", "first two updates")
def begins_at_the_top(name, config):
    return mend(
        name,
        config,
        schedule=lambda c: c["scheduler"]["params"].update(warmup_min_lr=1.0),
    )


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

    return numpy.array(
        case_by_case(parameters, ranks, stage, precision, averages)
    ).astype(numpy.int64)


@right("checkpoint_bytes")
def rounds_shards_up(parameters, ranks, stage, precision, averages):
    """Whole bytes, and shards that are padded to the same length, as a tuple."""
    shard = -(-parameters // ranks) * (4 + 4 * averages)
    weights = parameters * (4 if precision == "fp32" else 2)
    if not stage:
        master = 4 if precision == "bf16" else 0
        return (weights + parameters * (master + 4 * averages), *[0] * (ranks - 1))
    return (shard + (weights if stage < 3 else 0), *[shard] * (ranks - 1))


@wrong("checkpoint_bytes", "only rank 0 writes")
def as_the_lesson_keeps(parameters, ranks, stage, precision, averages):
    """Lesson 13's formula for the memory of each rank."""
    weight = 4 if precision == "fp32" else 2
    master = 4 if precision == "bf16" or stage else 0
    weights = weight / ranks if stage == 3 else weight
    gradients = weights if stage == 3 else 0
    kept = weights + gradients + (master + 8) / (ranks if stage else 1)
    return [parameters * kept] * ranks


@wrong("checkpoint_bytes", "only rank 0 writes")
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
def rank_zero_writes_weights_in_stage_three(
    parameters, ranks, stage, precision, averages
):
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


@wrong("checkpoint_bytes", "only rank 0 writes")
def all_ranks_write_in_stage_zero(parameters, ranks, stage, precision, averages):
    found = case_by_case(parameters, ranks, stage, precision, averages)
    return found if stage else found[:1] * ranks


@wrong("checkpoint_bytes", "bytes per parameter, and not")
def the_last_rank_writes(parameters, ranks, stage, precision, averages):
    return case_by_case(parameters, ranks, stage, precision, averages)[::-1]


# ---- train ----


def whole_updates(engine, batches):
    """The batches of each whole update, a list of lists."""
    window = engine.gradient_accumulation_steps()
    whole = len(batches) // window * window
    return [batches[begin : begin + window] for begin in range(0, whole, window)]


def mean_of_all(losses):
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def loop(engine, batches, micro_step, after=lambda engine: None):
    """The right loop, but for what happens with a micro-batch, and after an update."""
    results = []
    for update in whole_updates(engine, batches):
        rate = engine.get_lr()[0]
        losses = [micro_step(engine, *batch) for batch in update]
        after(engine)
        results.append((mean_of_all(losses), rate))
    return results


def forward(engine, inputs, labels):
    return F.cross_entropy(engine(inputs), labels)


def plain_step(engine, inputs, labels):
    loss = forward(engine, inputs, labels)
    engine.backward(loss)
    engine.step()
    return loss.detach()


@right("train")
def an_update_at_a_time(engine, batches):
    return loop(engine, batches, plain_step)


@right("train")
def asks_for_the_boundary(engine, batches):
    """By the engine's own count, and with the loss that backward returns, divided."""
    results, total = [], 0.0
    for inputs, labels in batches[: sum(map(len, whole_updates(engine, batches)))]:
        total += engine.backward(forward(engine, inputs, labels)).detach()
        complete, rate = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
        engine.step()
        if complete:
            dist.all_reduce(total)
            results.append([total / dist.get_world_size(), rate])
            total = 0.0
    return results


@right("train")
def sets_the_boundary(engine, batches):
    """DeepSpeed's other way: one step for all micro-batches of an update."""
    results = []
    for update in whole_updates(engine, batches):
        losses = []
        for place, batch in enumerate(update, 1):
            engine.set_gradient_accumulation_boundary(place == len(update))
            losses.append(forward(engine, *batch))
            engine.backward(losses[-1])
        rate = engine.get_lr()[0]
        engine.step()
        results.append((mean_of_all([loss.detach() for loss in losses]), rate))
    return results


@wrong("train", "engine.step\\(\\) is not called")
def never_steps(engine, batches):
    def without_step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        return loss.detach()

    return loop(engine, batches, without_step)


@wrong("train", "it counts them, and only every \\dth call makes an update")
def steps_when_it_is_time(engine, batches):
    def without_step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        return loss.detach()

    return loop(engine, batches, without_step, lambda engine: engine.step())


@wrong("train", "Please use engine.backward", status="your code raised")
def backward_of_torch(engine, batches):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        loss.backward()
        engine.step()
        return loss.detach()

    return loop(engine, batches, step)


@wrong("train", "divides the loss by the accumulation, so do not divide it as well")
def divides_as_well(engine, batches):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss / engine.gradient_accumulation_steps())
        engine.step()
        return loss.detach()

    return loop(engine, batches, step)


@wrong("train", "moved the schedule on already")
def steps_the_schedule_too(engine, batches):
    return loop(engine, batches, plain_step, lambda engine: engine.lr_scheduler.step())


@wrong("train", "do not call its step\\(\\) as well")
def steps_the_optimizer_too(engine, batches):
    def step(engine, inputs, labels):
        loss = forward(engine, inputs, labels)
        engine.backward(loss)
        engine.optimizer.step()
        engine.step()
        return loss.detach()

    return loop(engine, batches, step)


@wrong("train", "only the last micro-batch of each update counts")
def clears_gradients(engine, batches):
    def step(engine, inputs, labels):
        engine.zero_grad()
        return plain_step(engine, inputs, labels)

    return loop(engine, batches, step)


@wrong("train", "leave that to the engine")
def updates_each_time(engine, batches):
    engine.set_gradient_accumulation_boundary(True)
    return loop(engine, batches, plain_step)


@wrong("train", "engine.module goes around")
def calls_the_module(engine, batches):
    def step(engine, inputs, labels):
        loss = F.cross_entropy(engine.module(inputs), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return loop(engine, batches, step)


@wrong("train", "that make no whole update are left out")
def takes_all_batches(engine, batches):
    results = loop(engine, batches, plain_step)
    for batch in batches[sum(map(len, whole_updates(engine, batches))) :]:
        plain_step(engine, *batch)
    return results


@wrong("train", "a pair of numbers for each update")
def as_in_the_lesson(engine, batches):
    losses = []
    for update in whole_updates(engine, batches):
        losses += [plain_step(engine, *batch) for batch in update]
    losses = torch.stack(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@wrong("train", "the mean on this rank only")
def keeps_its_own_losses(engine, batches):
    results = []
    for update in whole_updates(engine, batches):
        rate = engine.get_lr()[0]
        losses = [plain_step(engine, *batch) for batch in update]
        results.append((torch.stack(losses).mean().item(), rate))
    return results


@wrong("train", "the last micro-batch's only")
def keeps_the_last_loss(engine, batches):
    results = []
    for update in whole_updates(engine, batches):
        rate = engine.get_lr()[0]
        losses = [plain_step(engine, *batch) for batch in update]
        results.append((mean_of_all(losses[-1:]), rate))
    return results


@wrong("train", "returns a loss that is divided already")
def means_what_is_divided(engine, batches):
    def step(engine, inputs, labels):
        loss = engine.backward(forward(engine, inputs, labels))
        engine.step()
        return loss.detach()

    return loop(engine, batches, step)


@wrong("train", "take the mean")
def adds_up_the_losses(engine, batches):
    results = loop(engine, batches, plain_step)
    window = engine.gradient_accumulation_steps()
    return [(window * loss, rate) for loss, rate in results]


@wrong("train", "ask before it")
def asks_afterwards(engine, batches):
    results = []
    for update in whole_updates(engine, batches):
        losses = [plain_step(engine, *batch) for batch in update]
        results.append((mean_of_all(losses), engine.get_lr()[0]))
    return results


@right("train")
def asks_the_optimizer_for_its_rate(engine, batches):
    results = []
    for update in whole_updates(engine, batches):
        rate = engine.optimizer.param_groups[0]["lr"]
        losses = [plain_step(engine, *batch) for batch in update]
        results.append((mean_of_all(losses), rate))
    return results


@wrong("train", "take the mean")
def sums_over_the_ranks(engine, batches):
    results = loop(engine, batches, plain_step)
    return [(dist.get_world_size() * loss, rate) for loss, rate in results]


@wrong("train", "over all ranks|the mean on this rank only")
def on_rank_zero_only(engine, batches):
    results = []
    for update in whole_updates(engine, batches):
        rate = engine.get_lr()[0]
        mean = torch.stack([plain_step(engine, *batch) for batch in update]).mean()
        dist.reduce(mean, 0, dist.ReduceOp.AVG)
        results.append((mean.item(), rate))
    return results


@wrong("train", "over all micro-batches of an update, and over all ranks")
def a_running_mean(engine, batches):
    results, losses = [], []
    for update in whole_updates(engine, batches):
        rate = engine.get_lr()[0]
        losses += [plain_step(engine, *batch) for batch in update]
        results.append((mean_of_all(losses), rate))
    return results


@wrong("train", "is it the mean cross entropy")
def sums_the_cross_entropy(engine, batches):
    def step(engine, inputs, labels):
        loss = F.cross_entropy(engine(inputs), labels, reduction="sum")
        engine.backward(loss)
        engine.step()
        return loss.detach() / len(labels)

    return loop(engine, batches, step)


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
            needed, load = (
                (needed + 1, cost) if load + cost > limit else (needed, load + cost)
            )
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
        if (
            found[-1]
            and needed
            and (load + cost > mean or len(costs) - number == needed)
        ):
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
    limit, found, load = (
        slowest(costs, next(combinations(range(1, len(costs)), stages - 1))),
        [0],
        0,
    )
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
    cuts = min(
        combinations(range(1, len(costs)), stages - 1),
        key=lambda cuts: slowest(costs, cuts),
    )
    return [costs[a:b] for a, b in zip((0, *cuts), (*cuts, len(costs)))]


@wrong("place", "stages, not")
def where_to_cut(costs, stages):
    return list(
        min(
            combinations(range(1, len(costs)), stages - 1),
            key=lambda cuts: slowest(costs, cuts),
        )
    )
