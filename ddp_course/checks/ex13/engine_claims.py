"""What question 3 claims of an engine on a rank, and of the losses that come back."""

from functools import partial

from ddp_course.checkpoints.deepspeed_configurations import BATCH
from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex13.plain_loop import DECAY, MOMENTUM, RATE, by_one_process

BITS_32 = 5  # digits; rounding leaves more than 6 of them
LARGEST_BUCKET = 10**6  # numbers


def claims(case, alone, rank, of_ranks):
    """alone: the parameters and losses of one process, see `by_one_process`."""
    call = f"train with {case['length']} micro-batches per rank, stage {case['stage']}"
    call += f", accumulate {case['window']}, max_norm {case['max_norm']}"
    for claim in on_a_rank(case, *alone, rank, len(of_ranks), of_ranks[rank]):
        yield claim._replace(what=f"{claim.what}: {call}")


def on_a_rank(case, truth, losses, rank, ranks, seen):
    engine = seen["engine"]
    yield Claim("what comes back", engine is None, False, "build an engine with deepspeed.initialize, train with it, and "
                "return (engine, losses)", told="an engine and the losses", shown=seen["returned"])  # fmt: skip
    numbers = sum(value.numel() for value in truth.values()) // (ranks if case["stage"] else 1)
    yield Claim("the optimizer's state on this rank", engine["stage"], case["stage"], "the configuration's "
                "zero_optimization has the stage: take it from the argument",
                told=f"stage {case['stage']}, so {numbers} numbers, or a few more",
                shown=f"stage {engine['stage']}, and {engine['kept']} numbers")  # fmt: skip
    yield from calls(case, seen, engine)
    yield from parameters(case, ranks, truth, engine)
    yield from configuration(case, ranks, engine)
    yield from returned_losses(rank, losses, seen["losses"])


def calls(case, seen, engine):
    """Claims that the engine is called as often as it should be, and does the updates."""
    window, (*_, accumulated) = case["window"], engine["batch"]
    updates = case["length"] // window
    yield Claim("forwards through the engine", seen["calls"], Between(seen["forwards"]), "call engine(inputs): the network "
                "itself, and engine.module, go around the engine",
                told="all", shown=f"{seen['calls']} of {seen['forwards']}")  # fmt: skip
    yield Claim("micro-batches", seen["calls"], updates * window,
                "each micro-batch of a whole update goes through the engine once",
                [(case["length"], "the micro-batches at the end that make no whole update are left out")])  # fmt: skip
    yield Claim("calls of engine.step()", engine["micro_steps"], Between(1),
                "engine.step() is not called: nothing has been updated", told="one after each micro-batch")  # fmt: skip
    yield Claim("micro-batches per update of the engine", accumulated, window, f"an update takes {window} micro-batches, "
                f"and the engine accumulates {accumulated}: the engine has to know the right number")  # fmt: skip
    yield Claim("updates of the engine", engine["updates"], updates, "call engine.step() after each micro-batch: it counts "
                f"them, and makes an update after every {window} of them")  # fmt: skip
    yield Claim("the weights", engine["dtype"], "torch.float32", "the loop trains in 32 bits: leave out bf16 and fp16")
    if case["stage"] == 0:
        yield Claim("steps of the optimizer", seen["optimizer_steps"], range(updates + 1), "engine.step() calls the "
                    "optimizer; do not call its step() as well", told=updates)  # fmt: skip


# ---- parameters ----

DRIFTS = {  # mistakes of `by_one_process`
    "again": "the loss is divided twice: engine.backward() divides it by the accumulation already",
    "last": "only the last micro-batch of each update counts: engine.step() clears gradients when it is time, and nobody "
    "else should",
    "swapped": "the biases decay here, and the matrices do not: it is the other way round",
}
OTHERWISE = (
    "does something besides the engine change gradients? And is it the mean cross entropy of each micro-batch, in the "
    "given order, that goes into engine.backward()?"
)
SETTINGS = {"lr": RATE, "momentum": MOMENTUM, "nesterov": False, "dampening": 0.0}


def parameters(case, ranks, truth, engine):
    """Claims that the parameters are those of one process."""
    yield Claim("the names of the engine's parameters", sorted(engine["end"]), sorted(truth),
                "build the engine of the given network, not of another module")  # fmt: skip

    def drifts(name):
        return [(by_one_process(case, ranks, mistake)[0][name], cause) for mistake, cause in DRIFTS.items()]

    for name, value in truth.items():
        yield Claim(f"{name}, next to one process", engine["end"][name], value,
                    lambda: next(cause for is_so, cause in settings(case, engine) if is_so),
                    partial(drifts, name), digits=BITS_32, scale=1.0)  # fmt: skip


def settings(case, engine):
    """Why an engine trains differently: pairs of whether it is so, and the cause."""
    decays, clips = {group["weight_decay"] for group in engine["groups"]}, engine["clipping"]
    clipped = f"the engine clips at {clips}, not at {case['max_norm']}"
    return [
        (engine["optimizer"] != "SGD", f"the loop has SGD with momentum, and the engine has {engine['optimizer']}"),
        (engine["schedule"], "the engine has a schedule, and the loop has none"),
        *[
            (not agree(group[name], value), f"the loop has {name} {value}, and the engine has {group[name]}")
            for name, value in SETTINGS.items()
            for group in engine["groups"]
        ],
        (decays == {DECAY}, "all parameters decay here: in the loop, only the matrices do"),
        (
            decays == {0},
            "nothing decays here: pass the two groups as model_parameters, or with an optimizer of your own",
        ),
        (decays != {0, DECAY}, f"the matrices decay with {DECAY}, and all else with 0"),
        (clips != case["max_norm"], f"{clipped}; left out, gradient_clipping is 1.0, and 0 does not clip"),
        (True, OTHERWISE),
    ]


def configuration(case, ranks, engine):
    """Claims that the engine knows the sizes with which it trains, and has small buffers."""
    size, window = case["batch_size"], case["window"]
    sizes = [size * window * ranks, size, window]
    yield Claim("the sizes of a batch", engine["batch"], sizes, "the configuration has other sizes than the training: "
                "DeepSpeed's reports would be wrong",
                told=dict(zip(BATCH, sizes)), shown=dict(zip(BATCH, engine["batch"])))  # fmt: skip
    if case["stage"]:
        yield Claim("the engine's bucket", engine["bucket"], Between(0, LARGEST_BUCKET), "a bucket is a buffer in memory: "
                    "give reduce_bucket_size; its default is 500 million numbers, 2 GB",
                    told="at most a million numbers", shown=f"{engine['bucket']:,} numbers")  # fmt: skip


# ---- losses ----


def returned_losses(rank, losses, got):
    """Claims about the losses that come back. losses: for each update, those of each rank
    by micro-batch.
    """
    means = [mean(map(mean, of_ranks)) for of_ranks in losses]
    yield Claim("what comes back, the losses", isinstance(got, list), True, "return a loss for each update",
                told=f"a list of {len(means)} numbers", shown=got)  # fmt: skip
    otherwise = "the mean over all micro-batches of an update, and over all ranks"
    if len(got) != len(means):
        otherwise = "return one loss for each update, the mean over its micro-batches"
    yield Claim("what comes back, the losses", got, means, otherwise, partial(other_losses, rank, losses, means),
                digits=BITS_32, scale=1.0, told=listed(means), shown=listed(got))  # fmt: skip


def other_losses(rank, losses, means):
    ranks, window = len(losses[0]), len(losses[0][0])
    by_micro_batch = "these are the losses of the micro-batches: return one loss for each update, the mean over them"
    yield [mean(column) for of_ranks in losses for column in zip(*of_ranks)], by_micro_batch
    yield [loss for of_ranks in losses for loss in of_ranks[rank]], f"{by_micro_batch} and over the ranks"
    for r in [rank, *range(ranks)]:
        whose = "this rank" if r == rank else f"rank {r}"
        own = [mean(of_ranks[r]) for of_ranks in losses]
        yield own, f"this is the mean on {whose} only: average it over the ranks"
    both = "the ranks or the micro-batches"
    over = {ranks: "the ranks", window: "the micro-batches of an update"} if ranks != window else {ranks: both}
    for many, words in {ranks * window: "ranks and micro-batches", **over}.items():
        yield [loss * many for loss in means], f"this is a sum over {words}: take the mean"
    twice = {ranks: "the number of ranks twice"}
    twice[window] = "the accumulation twice: engine.backward() returns a loss that is divided already"
    for many, words in twice.items():
        yield [loss / many for loss in means], f"this is divided by {words}"
    last = [mean(of_rank[-1] for of_rank in of_ranks) for of_ranks in losses]
    yield last, "this is the last micro-batch's only: an update has several"


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def listed(numbers):
    return f"{len(numbers)} losses: {', '.join(f'{number:.4f}' for number in numbers)}"
