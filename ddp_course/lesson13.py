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
from types import SimpleNamespace

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
from ddp_course.checkpoints.of_deepspeed import resume
from ddp_course.data.text import Windows, load_text
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.recipe import loss_of
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
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def prepare(args, rank, world_size, device):
    """What `train` needs: data, engine, and where an earlier run has ended."""
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

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape]).to(device)
    universal = {"checkpoint": {"load_universal": True}} if args.universal else {}
    engine = start_engine(network, config | universal, device)
    settings = {"ranks": world_size, "corpus": fingerprint, "seed": args.seed}
    settings |= {"train-samples": len(train_set), "shape": args.shape} | config
    run = SimpleNamespace(
        args=args, log=log, device=device, config=config, batch=batch, engine=engine,
        train_set=train_set, loader=loader, vocabulary=tokenizer.vocabulary,
        # whole updates only: the rest would count for the next epoch, or be lost
        per_epoch=len(loader) // accumulation * accumulation,
        settings=settings, folder=args.out / "checkpoints",
        done=0, losses=[], seconds=0.0,
    )  # fmt: skip
    if args.resume:
        found = resume(engine, run.folder, settings, args.universal)
        run.done, run.losses, run.seconds = found
        log.info(f"going on after epoch {run.done}")
    elif rank == 0:
        runs.empty_folder(run.folder)
    return run


def train(run):
    for epoch in range(run.done, run.args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin = time.perf_counter()
        batches = islice(run.loader, run.per_epoch)
        run.losses += train_one_epoch(run.engine, batches, run.device)
        run.seconds += time.perf_counter() - begin
        write_checkpoint(run, epoch + 1)
        run.log.info(f"epoch {epoch + 1}: loss {run.losses[-1]:.3f}")


def write_checkpoint(run, epoch):
    folder, name = run.folder, f"epoch-{epoch}"
    progress = {"epoch": epoch, "losses": run.losses, "seconds": run.seconds}
    if dist.get_rank() == 0:  # of the checkpoint that comes now, not of an attempt
        runs.write_atomically(folder / "settings.json", json.dumps(run.settings))
        runs.empty_folder(folder / name)
    run.engine.save_checkpoint(str(folder), name, progress)  # begins with a barrier


def report(run):
    args, losses, engine = run.args, run.losses, run.engine
    network = GPT(run.vocabulary, **SHAPES[args.shape])
    network.load_state_dict(whole_parameters(engine), strict=False)  # tied ones are one
    micro_batch = run.loader.batch_size
    trained = len(losses) * micro_batch * dist.get_world_size()
    more = {
        "stage": engine.zero_optimization_stage(),
        "batch_size": micro_batch,
        "updates": engine.global_steps,
        "samples_per_update": run.batch,
        "parameters": sum(value.numel() for value in network.parameters()),
        "learning_rate": engine.get_lr()[0],
        "train_loss": round(losses[-1], 4),
        "samples_per_second": round(trained / run.seconds),
    }
    if dist.get_rank() == 0:
        text = json.dumps(run.config, indent=2)
        runs.write_atomically(args.out / "deepspeed.json", text)
    found = network, run.train_set, losses, run.seconds
    return runs.finish(args, run.device, *found, more=more) | {"losses": losses}


if __name__ == "__main__":
    runs.start(main)
