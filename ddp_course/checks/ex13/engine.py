"""Question 3: a training loop in plain PyTorch that is ported to DeepSpeed."""

from functools import partial

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ddp_course import lesson13
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex13.engine_claims import claims
from ddp_course.checks.ex13.installed import TIMEOUT, deepspeed_is_needed
from ddp_course.checks.ex13.plain_loop import Network, by_one_process, micro_batches
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


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

        step = register_optimizer_step_post_hook(lambda *_: count("optimizer_steps"))
        hooks = [register_module_forward_pre_hook(forward), step]
        mine = micro_batches(case, ranks)[rank]
        arguments = (case["stage"], case["window"], case["max_norm"])
        with trying(f"train(network, batches, {', '.join(map(str, arguments))})"):
            returned = train(network, mine, *arguments)
        for hook in hooks:
            hook.remove()
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            return seen | {"engine": None, "returned": repr(returned)}
        engine, losses = returned
        seen["returned"] = f"a {type(engine).__name__} and a {type(losses).__name__}"
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return seen | {"engine": None}
        return seen | {"engine": look_at(engine), "losses": as_numbers(losses)}


def as_numbers(losses):
    """A list of numbers as floats; anything else in words."""
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError):
        return repr(losses)


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
        alone = by_one_process(case, ranks)
        on_every_rank(partial(claims, case, alone), of_ranks)
