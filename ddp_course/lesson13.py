"""The GPT of lesson 12 in DeepSpeed: sharding, precision and schedule by configuration.

torchrun --nproc_per_node 2 ddp_course/lesson13.py
torchrun --nproc_per_node 2 ddp_course/lesson13.py --epochs 2 --resume
deepspeed --num_gpus 2 ddp_course/lesson13.py --stage 3 --precision bf16 --warmup 4
python ddp_course/lesson13.py --stage 0 --train-samples 64
"""

import json
import logging
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.checkpoints.deepspeed_configurations import (
    ACCUMULATE,
    ALL,
    MICRO,
    check_batch,
    read_configuration,
    refusals_in_words,
)
from ddp_course.checkpoints.of_deepspeed import settings_in
from ddp_course.checkpoints.whole import check_settings
from ddp_course.data.text import Windows, load_text
from ddp_course.files import Unusable, check_alike
from ddp_course.lesson10 import loss_of
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.ranks.endings import SYMPTOMS
from ddp_course.ranks.environment import backend_for, choose_device, process_group


def configuration(args, world_size):
    """What a JSON file for DeepSpeed would say, made from the flags: a dict."""
    adamw = {"lr": args.learning_rate, "weight_decay": 0.01}
    adamw["torch_adam"] = True  # DeepSpeed's own has to be compiled first
    config = {
        ALL: args.batch_size * args.accumulate * world_size,
        MICRO: args.batch_size,
        ACCUMULATE: args.accumulate,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": args.max_norm,  # without this line it would be 1.0
        "zero_optimization": {"stage": args.stage, **buffers(args.shape, args.stage)},
    }
    if args.warmup:
        lowest, highest = args.learning_rate / args.warmup, args.learning_rate
        rates = {"warmup_min_lr": lowest, "warmup_max_lr": highest}
        rates |= {"warmup_num_steps": args.warmup, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": rates}
    if args.precision in ("bf16", "fp16"):
        config[args.precision] = {"enabled": True}
    return config


def buffers(shape, stage):
    """How many elements are gathered or reduced at once: those of one block."""
    block = 12 * SHAPES[shape]["width"] ** 2 + 13 * SHAPES[shape]["width"]
    if stage < 3:
        return {"reduce_bucket_size": block, "allgather_bucket_size": block}
    return {
        "reduce_bucket_size": block,
        "stage3_param_persistence_threshold": 0,  # shard the smallest parameters, too
        "stage3_max_live_parameters": block,  # free gathered weights beyond this ...
        "stage3_max_reuse_distance": block,  # ... even if they are needed again soon
        "stage3_prefetch_bucket_size": 0,
    }


def load_deepspeed(device):
    """DeepSpeed, told of the device and of the process group that is there already.

    Raises UsageError where it is not installed, or was imported for another device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # or it would look for GPUs
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        missing = f"lesson 13 needs {error.name}, which is not here"
        raise UsageError(f"{missing}: pip install deepspeed") from None
    chosen = deepspeed.accelerator.get_accelerator().device_name()
    if chosen != device.type:
        fix = "let this be the first to import it, or set DS_ACCELERATOR before"
        raise UsageError(f"DeepSpeed is here for {chosen}, not {device.type}: {fix}")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":
        # or it compiles collectives of its own, for a minute; gloo has them already
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed


def start_engine(network, config, device):
    """A DeepSpeed engine: the wrapped model, its optimizer and its schedule in one.

    Raises UsageError for a configuration that DeepSpeed refuses, or cannot compile.
    """
    deepspeed = load_deepspeed(device)
    zero = config.get("zero_optimization")
    sharded = isinstance(zero, dict) and zero.get("stage") == 3
    if sharded and "LOCAL_RANK" not in os.environ:  # which DeepSpeed reads then
        fix = "torchrun --nproc_per_node 1 for a single one"
        raise UsageError(f"stage 3 needs a launcher that numbers the ranks: {fix}")
    with refusals_in_words(config):
        engine, *_ = deepspeed.initialize(
            model=network, config=config, dist_init_required=False
        )
    return engine


def train_one_epoch(engine, loader, device):
    """Train on this rank's micro-batches; return each loss, averaged over the ranks."""
    losses = []
    for tokens, targets in loader:
        loss = loss_of(engine, tokens, targets, torch.float32, device)
        engine.backward(loss)  # divides by the accumulation
        engine.step()  # once per update: optimizer, zero_grad and schedule
        losses.append(loss.detach().float())
    losses = torch.stack(losses)
    runs.check_finite(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def whole_parameters(engine):
    """Copies of all parameters by name, on all ranks; in stage 3, out of the shards."""
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: value.detach().clone() for name, value in named.items()}


PROGRESS = ["epoch", "losses", "seconds"]


def load(engine, folder, settings, universal):
    """Load the newest checkpoint; return (finished epochs, their losses and seconds).

    A universal one may be of another number of ranks. Raises UsageError where there is
    none, and where it was made with other settings.
    """
    made_with = settings_in(folder, universal)
    if universal:
        free = dict.fromkeys(["ranks", MICRO, ACCUMULATE])
        made_with, settings = made_with | free, settings | free
    check_settings(made_with, settings, folder)
    try:
        _, progress = engine.load_checkpoint(str(folder))
        check_alike([progress.get(name) for name in PROGRESS], [0, [0.0], 0.0])
        if progress["epoch"] < 0 or progress["seconds"] < 0:
            raise Unusable("it counts below 0")
    except Exception as error:  # DeepSpeed has errors of many kinds
        if any(words in str(error) for words in SYMPTOMS):  # of another rank
            raise
        reason = Unusable.because(error)
        raise UsageError(f"{folder} cannot be used: {reason}") from None
    return [progress[name] for name in PROGRESS]


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="text", most=512, per="micro-batch")
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count = parser.add_argument, runs.count
    flag("--stage", type=int, choices=range(4), default=2, help="of ZeRO (2)")
    flag("--precision", choices=["fp32", "bf16", "fp16"], help="bf16 on a GPU")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--accumulate", type=count, default=1, help="micro-batches per update (1)")
    flag("--learning-rate", type=runs.number, default=1e-3, help="of AdamW (1e-3)")
    flag("--warmup", type=runs.whole, default=0, help="updates of warm-up (0)")
    flag("--max-norm", type=runs.number, default=0.0, help="clip longer gradients (0)")
    flag("--deepspeed_config", metavar="FILE", help="takes the place of these flags")
    flag("--resume", action="store_true", help="from the newest checkpoint in --out")
    flag("--universal", action="store_true", help="--resume from a universal one")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    args.precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    if args.deepspeed_config:
        config = read_configuration(args.deepspeed_config)
    else:
        config = configuration(args, world_size)
    batch, micro_batch, accumulation = check_batch(config, world_size)

    tokens, _, tokenizer, fingerprint = load_text(args.data)
    train_set = Windows(tokens, SHAPES[args.shape]["context"])
    most = len(train_set) if device.type == "cuda" else min(512, len(train_set))
    train_set = train_set.some(args.train_samples or most)
    samples = len(train_set) // world_size * world_size  # all ranks have equally many
    runs.check_batch_size(micro_batch * accumulation, samples, world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, micro_batch, sampler=sampler, drop_last=True)
    # whole updates only: the rest would count for the next epoch, or be lost at its end
    per_epoch = len(loader) // accumulation * accumulation

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape]).to(device)
    how = {"checkpoint": {"load_universal": True}} if args.universal else {}
    engine = start_engine(network, config | how, device)
    settings = {"ranks": world_size, "corpus": fingerprint, "seed": args.seed}
    settings |= {"train-samples": len(train_set), "shape": args.shape} | config
    folder, losses, done, seconds = args.out / "checkpoints", [], 0, 0.0
    if args.resume:
        done, losses, seconds = load(engine, folder, settings, args.universal)
        log.info(f"going on after epoch {done}")
    elif rank == 0:
        runs.empty_folder(folder)

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        losses += train_one_epoch(engine, islice(loader, per_epoch), device)
        seconds += time.perf_counter() - begin
        progress = {"epoch": epoch + 1, "losses": losses, "seconds": seconds}
        name = f"epoch-{epoch + 1}"
        if rank == 0:  # of the checkpoint that comes now, not of an attempt
            runs.write_atomically(folder / "settings.json", json.dumps(settings))
            runs.empty_folder(folder / name)
        engine.save_checkpoint(str(folder), name, progress)  # begins with a barrier
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")

    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape])
    network.load_state_dict(whole_parameters(engine), strict=False)  # tied ones are one
    result = {
        "lesson": args.lesson, "world_size": world_size, "backend": dist.get_backend(), "device": device.type,
        "data": str(args.data), "stage": engine.zero_optimization_stage(), "train_samples": len(train_set),
        "epochs": args.epochs, "batch_size": micro_batch, "updates": engine.global_steps, "samples_per_update": batch,
        "parameters": sum(value.numel() for value in network.parameters()), "learning_rate": engine.get_lr()[0],
        "train_loss": round(losses[-1], 4), "seconds": round(seconds, 2),
        "samples_per_second": round(len(losses) * micro_batch * world_size / seconds),
        "params_sha256": runs.params_sha256(network),
    }  # fmt: skip
    if rank == 0:
        runs.write_atomically(args.out / "deepspeed.json", json.dumps(config, indent=2))
        runs.write_result(args.out, result, runs.by_step(losses))
    return result | {"losses": losses}


if __name__ == "__main__":
    runs.start(main)
