"""Question 3: a training loop in plain PyTorch that is ported to DeepSpeed."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from ddp_course import lesson13
from ddp_course.checkpoints.deepspeed_configurations import BATCH
from ddp_course.checks.differences import parted
from ddp_course.checks.ex13.installed import TIMEOUT, deepspeed_is_needed
from ddp_course.checks.samples import CLASSES, WIDTH, Numbered
from ddp_course.checks.training import fill, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.2  # the notebook's loop names them


class Network(nn.Module):
    """A small network in 32 bits. It ignores its first input, a sample's number."""

    def __init__(self, seed):
        super().__init__()
        sizes = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.layers = fill(nn.Sequential(*sizes), seed).float()

    def forward(self, inputs):
        return self.layers(inputs[:, 1:])


def micro_batches(case, ranks):
    """For each rank, its micro-batches, pairs of inputs and labels."""
    count, size = case["length"], case["batch_size"]
    data = Numbered(count * ranks * size, case["seed"])
    inputs, labels = data.inputs.float().split(size), data.labels.split(size)
    pairs = list(zip(inputs, labels))
    return [pairs[rank::ranks] for rank in range(ranks)]


def observe_training(train, case):
    """Call train once; say what it returned, and what its engine has done and keeps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # two seconds

    with process_group(timeout=8) as (rank, ranks):
        deepspeed = lesson13.load_deepspeed(torch.device("cpu"))
        network = Network(case["seed"])
        seen = {"calls": 0, "forwards": 0, "optimizer_steps": 0}

        def count(what):
            seen[what] += 1

        def forward(module, _):
            if isinstance(module, deepspeed.DeepSpeedEngine):
                count("calls")
            elif module is network:
                count("forwards")

        hooks = [register_module_forward_pre_hook(forward)]
        step = register_optimizer_step_post_hook(lambda *_: count("optimizer_steps"))
        mine = micro_batches(case, ranks)[rank]
        arguments = (case["stage"], case["window"], case["max_norm"])
        with trying(f"train(network, batches, {', '.join(map(str, arguments))})"):
            returned = train(network, mine, *arguments)
        for hook in (*hooks, step):
            hook.remove()
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            return seen | {"returned": returned, "engine": None}
        engine, losses = returned
        seen["returned"] = as_numbers(losses)
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return seen | {"engine": None, "kind": type(engine).__name__}
        return seen | {"engine": look_at(engine)}


def as_numbers(losses):
    """A list of numbers as floats; anything else as it is."""
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError):
        return losses


def look_at(engine):
    """What an engine has understood, done and keeps, as plain values."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    kept = [
        value.numel()
        for of_parameter in optimizer.state.values()
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    names = ("lr", "momentum", "weight_decay", "nesterov", "dampening")
    return {
        "stage": engine.zero_optimization_stage(),
        "batch": [
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ],
        "clipping": float(engine.gradient_clipping()),
        "bucket": engine.zero_reduce_bucket_size(),
        "updates": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "optimizer": type(optimizer).__name__,
        "dtype": str(next(engine.module.parameters()).dtype),
        "schedule": engine.lr_scheduler is not None,
        "groups": [{name: group.get(name) for name in names} for group in optimizer.param_groups],
        "kept": sum(kept),
        "end": lesson13.whole_parameters(engine),
    }


@question(
    "Go through the loop line by line. Which lines become entries of the configuration, "
    "which become calls of the engine, and which does the engine make superfluous? What "
    "is left is how the two groups of parameters get into the engine, and the mean over "
    "the ranks.",
    "`deepspeed.initialize` takes `model_parameters`, a list of groups as torch's "
    "optimizers take them; `lr` and `momentum` are in the configuration's optimizer, of "
    "type SGD. Take over sizes, clipping and stage from the arguments. For each "
    "micro-batch call engine(inputs), engine.backward(loss) and engine.step(), without "
    "dividing the loss.",
    "config = {'train_micro_batch_size_per_gpu': len(batches[0][0]), "
    "'gradient_accumulation_steps': accumulate, 'gradient_clipping': max_norm, "
    "'optimizer': {'type': 'SGD', 'params': {'lr': 0.1, 'momentum': 0.9}}, "
    "'zero_allow_untested_optimizer': True, 'zero_optimization': {'stage': stage, "
    "'reduce_bucket_size': 1000}}; engine, *_ = lesson13.load_deepspeed("
    "torch.device('cpu')).initialize(model=network, model_parameters=groups, "
    "config=config, dist_init_required=False). Add up loss.detach() / accumulate, and "
    "dist.all_reduce(total, dist.ReduceOp.AVG) after each update.",
)
def check_train(answer, draw):
    """An engine in stage 0 without clipping, and one in stage 1, 2 or 3 that clips:
    parameters and losses are one process's, and each rank keeps its part of the state.
    """
    deepspeed_is_needed()
    # one after the other: what goes wrong in stage 0 is explained before stage 3 raises
    for stages, ranks, max_norm in (([0], draw.choice([2, 3]), 0.0), ([1, 2, 3], 2, 0.3)):
        window = draw.randint(2, 4)
        case = {"stage": draw.choice(stages), "window": window, "max_norm": max_norm}
        case |= {"seed": draw.randrange(10**6), "batch_size": draw.randint(2, 4)}
        # the last micro-batches make no update
        case["length"] = 4 * window + draw.randint(1, window - 1)
        of_ranks = answer.on_ranks(observe_training, case, nproc=ranks, timeout=TIMEOUT)
        for rank, seen in enumerate(of_ranks):
            judge_training(case, rank, ranks, seen)


def judge_training(case, rank, ranks, seen):
    checked = f"train with {case['length']} micro-batches per rank, stage {case['stage']}"
    checked += f", accumulate {case['window']}, max_norm {case['max_norm']}"

    def fail(what, expected, got, cause):
        raise Wrong(f"{what}: {checked}", rank=f"{rank} of {ranks}",
                    expected=expected, got=got, cause=cause)  # fmt: skip

    engine = seen["engine"]
    if engine is None:
        cause = "build an engine with deepspeed.initialize, train with it, and return "
        got = f"a {seen['kind']}" if "kind" in seen else seen["returned"]
        fail("what comes back", "an engine and the losses", got, f"{cause}(engine, losses)")
    judge_state(fail, case, ranks, engine)
    judge_calls(fail, case, seen)
    truth, losses = by_one_process(case, ranks)
    if not near(engine["end"], truth):
        cause = cause_of_drift(case, ranks, seen)
        fail(*first_difference(truth, engine["end"]), cause)
    judge_configuration(fail, case, ranks, engine)
    judge_losses(fail, seen["returned"], losses)


def judge_state(fail, case, ranks, engine):
    """Raise Wrong if the engine has another stage, with what it keeps on this rank."""
    if engine["stage"] != case["stage"]:
        parameters = sum(map(torch.Tensor.numel, engine["end"].values()))
        part = ranks if case["stage"] else 1
        expected = f"stage {case['stage']}, so {parameters // part} numbers, or a few more"
        got = f"stage {engine['stage']}, and {engine['kept']} numbers"
        cause = "the configuration's zero_optimization has the stage: take it from the "
        cause += "argument"
        fail("the optimizer's state on this rank", expected, got, cause)


def judge_calls(fail, case, seen):
    """Raise Wrong unless the engine was called as often as it should be."""
    window, engine = case["window"], seen["engine"]
    updates = case["length"] // window
    if seen["calls"] < seen["forwards"]:
        cause = "call engine(inputs): the network itself, and engine.module, go around "
        through = f"{seen['calls']} of {seen['forwards']}"
        fail("forwards through the engine", "all", through, f"{cause}the engine")
    if seen["calls"] != updates * window:
        cause = "each micro-batch of a whole update goes through the engine once"
        if seen["calls"] > updates * window:
            cause = "the micro-batches at the end that make no whole update are left out"
        fail("micro-batches", updates * window, seen["calls"], cause)
    if engine["updates"] != updates:
        cause = "call engine.step() after each micro-batch: it counts them, and makes an "
        cause += f"update after every {window} of them"
        if engine["micro_steps"] == 0:
            cause = "engine.step() is not called: nothing has been updated"
        elif engine["batch"][-1] != window:
            cause = f"an update takes {window} micro-batches, and the engine accumulates "
            cause += f"{engine['batch'][-1]}: the engine has to know the right number"
        fail("updates of the engine", updates, engine["updates"], cause)
    if engine["dtype"] != "torch.float32":
        cause = "the loop trains in 32 bits: leave out bf16 and fp16"
        fail("the weights", "torch.float32", engine["dtype"], cause)
    if case["stage"] == 0 and seen["optimizer_steps"] > updates:
        cause = "engine.step() calls the optimizer; do not call its step() as well"
        fail("steps of the optimizer", updates, seen["optimizer_steps"], cause)


def cause_of_drift(case, ranks, seen):
    """Why the parameters are not those of one process, as far as one can tell."""
    engine = seen["engine"]
    if engine["optimizer"] != "SGD":
        return f"the loop has SGD with momentum, and the engine has {engine['optimizer']}"
    if engine["schedule"]:
        return "the engine has a schedule, and the loop has none"
    settings = {"lr": RATE, "momentum": MOMENTUM, "nesterov": False, "dampening": 0}
    for name, value in settings.items():
        for group in engine["groups"]:
            if not abs(group[name] - value) <= 1e-9:  # NaN, too
                return f"the loop has {name} {value}, and the engine has {group[name]}"
    decays = {group["weight_decay"] for group in engine["groups"]}
    if decays == {DECAY}:
        return "all parameters decay here: in the loop, only the matrices do"
    if decays == {0}:
        return "nothing decays here: pass the two groups as model_parameters, or with an "\
            "optimizer of your own"  # fmt: skip
    if decays != {0, DECAY}:
        return f"the matrices decay with {DECAY}, and all else with 0"
    if engine["clipping"] != case["max_norm"]:
        used = engine["clipping"]
        return f"the engine clips at {used}, not at {case['max_norm']}; left out, " \
            "gradient_clipping is 1.0, and 0 does not clip"  # fmt: skip
    for mistake, cause in {
        "again": "the loss is divided twice: engine.backward() divides it by the accumulation already",
        "last": "only the last micro-batch of each update counts: engine.step() clears "
        "gradients when it is time, and nobody else should",
        "swapped": "the biases decay here, and the matrices do not: it is the other way round",
    }.items():
        if near(engine["end"], by_one_process(case, ranks, mistake)[0]):
            return cause
    return (
        "does something besides the engine change gradients? And is it the mean cross "
        "entropy of each micro-batch, in the given order, that goes into "
        "engine.backward()?"
    )


def judge_configuration(fail, case, ranks, engine):
    """Raise Wrong if the engine has other sizes than it trains with, or large buffers."""
    size, window = case["batch_size"], case["window"]
    expected = [size * window * ranks, size, window]
    if engine["batch"] != expected:
        as_words = [dict(zip(BATCH, sizes)) for sizes in (expected, engine["batch"])]
        cause = "the configuration has other sizes than the training: DeepSpeed's "
        fail("the sizes of a batch", *as_words, f"{cause}reports would be wrong")
    if case["stage"] and engine["bucket"] > 10**6:
        cause = "a bucket is a buffer in memory: give reduce_bucket_size; its default is "
        got = f"{engine['bucket']:,} numbers"
        cause += "500 million numbers, 2 GB"
        fail("the engine's bucket", "at most a million numbers", got, cause)


def judge_losses(fail, got, losses):
    what, updates = "what comes back, the losses", len(losses)
    if not isinstance(got, list) or not all(isinstance(loss, float) for loss in got):
        fail(what, f"a list of {updates} numbers", got, "return a loss for each update")
    by_micro_batch = [sum(column) / len(column) for of in losses for column in zip(*of)]
    if len(got) != updates:
        cause = "return one loss for each update, the mean over its micro-batches"
        if agree(got, by_micro_batch):
            cause = f"these are the losses of the micro-batches: {cause}"
        fail(what, f"a list of {updates} numbers", f"a list of {len(got)}", cause)
    means = [mean(map(mean, of_ranks)) for of_ranks in losses]
    if not agree(got, means):
        fail(what, rounded(means), rounded(got), cause_of_losses(got, losses, means))


def cause_of_losses(got, losses, means):
    """losses: for each update, those of each rank by micro-batch."""
    ranks, window = len(losses[0]), len(losses[0][0])
    own = zip(*([mean(of_rank) for of_rank in of_ranks] for of_ranks in losses))
    if any(agree(got, of_rank) for of_rank in own):
        return "this is the mean on this rank only: average it over the ranks"
    if agree(got, [loss * ranks * window for loss in means]):
        return "this is a sum over ranks and micro-batches: take the mean"
    over_ranks = agree(got, [loss * ranks for loss in means])
    over_micro_batches = agree(got, [loss * window for loss in means])
    if over_ranks and over_micro_batches:
        return "this is a sum, over the ranks or the micro-batches: take the mean"
    if over_ranks:
        return "this is a sum over the ranks: take the mean"
    if over_micro_batches:
        return "this is the sum over the micro-batches of an update: take the mean"
    if agree(got, [loss / window for loss in means]):
        return "this is divided by the accumulation twice: engine.backward() returns a " \
            "loss that is divided already"  # fmt: skip
    if agree(got, [mean(of_rank[-1] for of_rank in of_ranks) for of_ranks in losses]):
        return "this is the last micro-batch's only: an update has several"
    return "the mean over all micro-batches of an update, and over all ranks"


def by_one_process(case, ranks, mistake=None):
    """The notebook's loop in 64 bits on the batches of all ranks: (the parameters at the
    end, for each update its losses by rank and micro-batch).

    mistake: 'again', losses divided by the accumulation twice; 'last', gradients of the
    last micro-batch only; 'swapped', biases decay in place of matrices.
    """
    network, window, history = Network(case["seed"]).double(), case["window"], []
    parameters = list(network.parameters())
    averages = [torch.zeros_like(parameter) for parameter in parameters]
    of_ranks = micro_batches(case, ranks)
    for begin in range(0, case["length"] // window * window, window):
        losses = [
            [F.cross_entropy(network(inputs.double()), labels) for inputs, labels in mine[begin : begin + window]]
            for mine in of_ranks
        ]
        counted = [mine[-1:] if mistake == "last" else mine for mine in losses]
        total = sum(map(sum, counted)) / ranks / window
        total = total / window if mistake == "again" else total
        gradients = torch.autograd.grad(total, parameters)
        norm = sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
        clip = min(1.0, case["max_norm"] / norm.item()) if case["max_norm"] else 1.0
        with torch.no_grad():
            for parameter, gradient, average in zip(parameters, gradients, averages):
                decays = (parameter.dim() > 1) != (mistake == "swapped")
                decay = DECAY * parameter * decays
                average.mul_(MOMENTUM).add_(gradient * clip + decay)
                parameter -= RATE * average
        history.append([[loss.item() for loss in mine] for mine in losses])
    return state(network), history


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def agree(numbers, others):
    """Whether two lists hold the same numbers, to four digits."""
    others = list(others)
    return len(numbers) == len(others) and all(abs(a - b) <= 1e-4 * (1 + abs(b)) for a, b in zip(numbers, others))


def near(some, others):
    """Whether two states hold the same numbers, as far as 32 bits go."""
    return some.keys() == others.keys() and all(
        torch.allclose(some[name].double(), others[name], rtol=1e-3, atol=1e-4) for name in others
    )


def first_difference(truth, got):
    """The first parameter that differs: its name, and both from where they differ."""
    name = next(name for name in truth if not near({0: got[name]}, {0: truth[name]}))
    what = f"{name}, next to one process"
    return what, *parted(truth[name], got[name], rtol=1e-3, atol=1e-4)


def rounded(numbers):
    return ", ".join(f"{number:.4f}" for number in numbers)
