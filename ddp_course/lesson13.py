"""The GPT of lesson 12 in DeepSpeed: sharding, precision and schedule by settings.

torchrun --nproc_per_node 2 ddp_course/lesson13.py --train-samples 128
torchrun --nproc_per_node 2 ddp_course/lesson13.py --stage 3 --precision bf16 --warmup 4
deepspeed --num_gpus 2 ddp_course/lesson13.py --train-samples 128
python ddp_course/lesson13.py --stage 0 --train-samples 64
"""

import json
import logging
import os
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, lesson09, runs
from ddp_course.lesson10 import SHAPES, loss_of
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.scenery.models import GPT
from ddp_course.scenery.text import Windows, load_text

MOST_ON_A_CPU = 512  # windows to train on, where nobody says how many
BATCH = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
]
NO_COMPILER = (
    "DeepSpeed compiles its own optimizer: that takes a C++ compiler, and ninja on the PATH; "
    'or have torch\'s, with "torch_adam": true in the params of the optimizer'
)

# ---- the configuration ----


def configuration(args, world_size):
    """What DeepSpeed is told, a dict: what a JSON file of the same content would
    say.
    """
    # torch's AdamW: DeepSpeed's own would have to be compiled
    adamw = {"lr": args.learning_rate, "weight_decay": 0.01, "torch_adam": True}
    config = {
        "train_batch_size": args.batch_size * args.accumulate * world_size,
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": args.max_norm,  # left out, it is 1.0
        "zero_optimization": {"stage": args.stage, **buffers(args.shape, args.stage)},
    }
    if args.warmup:
        rates = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": args.learning_rate,
            "warmup_num_steps": args.warmup,
        }
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": rates | {"warmup_type": "linear"},
        }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    return config


def buffers(shape, stage):
    """How much is gathered and reduced at once, in elements: one block's. DeepSpeed's
    defaults are for large models.

    Its bucket for gradients has 500 million, 2 GB, and is there whatever the size of
    the model.
    """
    block = 12 * SHAPES[shape]["width"] ** 2 + 13 * SHAPES[shape]["width"]
    if stage < 3:
        return {"reduce_bucket_size": block, "allgather_bucket_size": block}
    return {
        "reduce_bucket_size": block,
        # even the smallest parameters are sharded
        "stage3_param_persistence_threshold": 0,
        # free what has been gathered, as soon as it is more than this
        "stage3_max_live_parameters": block,
        "stage3_max_reuse_distance": block,  # and would not be needed again at once
        "stage3_prefetch_bucket_size": 0,
    }


def read_configuration(path):
    """A configuration from a JSON file. Raises UsageError where there is none."""
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', error)}"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {error.lineno}, is no JSON: {error.msg}"
        ) from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path} must hold an object, in braces, and holds a {type(config).__name__}"
        )
    return config


def check_batch(config, world_size):
    """The three numbers of a batch, (all, micro, accumulation): all = micro x
    accumulation x ranks.

    One or two of them may be left out. Raises UsageError where they do not fit, with
    what does not.
    """
    given = [config.get(name) for name in BATCH]
    for name, value in zip(BATCH, given):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}, and must be a whole number from 1")
    whole, micro, accumulation = given
    if whole is None and micro is None:
        raise UsageError(f"the configuration must say {BATCH[0]} or {BATCH[1]}")
    if micro is None:
        accumulation = accumulation or 1
        micro = whole // (accumulation * world_size)
    elif accumulation is None:
        accumulation = whole // (micro * world_size) if whole else 1
    product = micro * accumulation * world_size
    if whole not in (None, product):
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        cure = (
            ": was it started with python, and not with torchrun?"
            if world_size == 1
            else ""
        )
        problem = (
            f"micro batch {micro} x accumulation {accumulation} x {ranks} = {product}"
        )
        raise UsageError(f"train_batch_size is {whole}, but {problem}{cure}")
    return product, micro, accumulation


# ---- the engine ----


def load_deepspeed(device):
    """DeepSpeed, told for which device, in the process group that is there. Raises
    UsageError where it is missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise UsageError(
            f"lesson 13 needs {error.name}, which is not here: pip install deepspeed"
        ) from None
    deepspeed.utils.logger.setLevel(
        logging.ERROR
    )  # it warns of what it has done itself
    if device.type == "cpu":
        # its own collectives, in shared memory, would need a compiler and a minute;
        # gloo needs neither
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed


def start_engine(network, config, device):
    """A DeepSpeed engine for a network: called, it computes; it has backward, step, and
    checkpoints.

    Raises UsageError for a configuration that DeepSpeed refuses, with its words, or
    cannot compile; and for fp16 in stage 0, where it divides gradients by a scale that
    the loss was not multiplied by (DeepSpeed's pull request 8393).
    """
    deepspeed = load_deepspeed(device)
    if "optimizer" not in config:
        raise UsageError("the configuration must say which optimizer")
    alone = "LOCAL_RANK" not in os.environ
    if alone:  # nobody has launched this process, but DeepSpeed insists
        os.environ["LOCAL_RANK"] = "0"
    try:
        engine, *_ = deepspeed.initialize(
            model=network, config=config, dist_init_required=False
        )
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split("For further information")[0].split())
        raise UsageError(f"DeepSpeed refuses the configuration: {reason}") from None
    except RuntimeError as error:
        if "JIT load" in str(error) or "building extension" in str(error):
            raise UsageError(NO_COMPILER) from None
        raise
    finally:
        if alone:
            del os.environ["LOCAL_RANK"]
    if engine.fp16_enabled() and engine.zero_optimization_stage() == 0:
        raise UsageError(
            "fp16 goes wrong in stage 0: DeepSpeed does not scale the loss there; take stage 1"
        )
    return engine


def train_one_epoch(engine, loader, device):
    """The loop: DeepSpeed divides the loss by the accumulation, and steps each time
    that enough have come.

    Return the mean loss of each micro-batch.
    """
    losses = []
    for tokens, targets in loader:
        loss = loss_of(engine, tokens, targets, torch.float32, device)
        engine.backward(loss)
        engine.step()  # also the schedule's, and zero_grad
        losses.append(loss.detach().float())
    losses = torch.stack(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def whole_parameters(engine):
    """All parameters by name, copies, on all ranks: where stage 3 has cut them into
    shards, they are gathered.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {
            name: value.detach().clone()
            for name, value in engine.module.named_parameters()
        }


# ---- a pipeline: each rank has some of the layers ----


class Embedding(nn.Module):
    """The first layer of a GPT. Takes tokens, int64 (batch, tokens); returns float
    (batch, tokens, width).
    """

    def __init__(self, network):
        super().__init__()
        self.tokens, self.positions = (
            network.token_embedding,
            network.position_embedding,
        )

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


def layers(network):
    """A GPT as a list of layers, each of which takes what the one before it returns.

    The head gets a matrix of its own: it lies on another rank than the embedding that
    it was tied to.
    """
    network.head.weight = nn.Parameter(network.head.weight.detach().clone())
    return [
        Embedding(network),
        *network.blocks,
        nn.Sequential(network.norm, network.head),
    ]


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bubble(stages, micro_batches):
    """The share of a step in which a stage waits, where all stages take equally long.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
    """
    return (stages - 1) / (micro_batches + stages - 1)


# ---- the program ----


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="text")
    parser.set_defaults(epochs=1, batch_size=8)
    parser.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        default=2,
        help="of ZeRO; 0 shares nothing (2)",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="bf16 on a GPU, else fp32"
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="small", help="of the model (small)"
    )
    parser.add_argument(
        "--accumulate", type=runs.count, default=1, help="micro-batches an update (1)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--warmup", type=int, default=0, help="updates until --learning-rate (0)"
    )
    parser.add_argument(
        "--max-norm", type=float, default=0.0, help="of gradients; 0 does not clip (0)"
    )
    parser.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        help="a configuration, in place of these flags",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out",
    )
    parser.add_argument(
        "--local_rank", type=int, help="DeepSpeed's launcher says so; it is not needed"
    )
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    if "LOCAL_SIZE" in os.environ:  # what DeepSpeed's launcher calls it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, world_size):
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
    most = (
        len(train_set) if device.type == "cuda" else min(MOST_ON_A_CPU, len(train_set))
    )
    train_set = train_set.some(args.train_samples or most)
    # all ranks have equally many, and what is left over is dropped
    equal = len(train_set) - len(train_set) % world_size or len(train_set)
    runs.check_batch_size(micro_batch * accumulation, equal, world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, micro_batch, sampler=sampler, drop_last=True)
    # only whole updates: DeepSpeed would take the rest into the next epoch, and lose it
    # in a --resume
    per_epoch = len(loader) // accumulation * accumulation

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape]).to(device)
    engine = start_engine(network, config, device)
    settings = {
        "ranks": world_size,
        "corpus": fingerprint,
        "train-samples": len(train_set),
    }
    settings |= {"shape": args.shape, "seed": args.seed} | config
    folder, losses, done, seconds = args.out / "checkpoints", [], 0, 0.0
    if args.resume:
        done, losses, seconds = load(engine, folder, settings)
        log.info(f"going on after epoch {done}")
    elif rank == 0:
        runs.empty_folder(folder)
        runs.write_atomically(folder / "settings.json", json.dumps(settings))

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        losses += train_one_epoch(engine, islice(loader, per_epoch), device)
        seconds += time.perf_counter() - begin
        progress = {"epoch": epoch + 1, "losses": losses, "seconds": seconds}
        engine.save_checkpoint(
            str(folder), tag=f"epoch-{epoch + 1}", client_state=progress
        )
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")

    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape])
    network.load_state_dict(
        whole_parameters(engine), strict=False
    )  # tied parameters come once
    result = {
        "lesson": args.lesson, "world_size": world_size, "backend": dist.get_backend(), "device": device.type,
        "data": str(args.data), "stage": engine.zero_optimization_stage(), "train_samples": len(train_set),
        "epochs": args.epochs, "batch_size": micro_batch, "updates": engine.global_steps, "samples_an_update": batch,
        "parameters": sum(value.numel() for value in network.parameters()), "learning_rate": engine.get_lr()[0],
        "train_loss": round(losses[-1], 4), "seconds": round(seconds, 2),
        "samples_per_second": round(len(losses) * micro_batch * world_size / seconds),
        "params_sha256": runs.params_sha256(network),
    }  # fmt: skip
    if rank == 0:
        runs.write_result(
            args.out,
            result,
            [{"step": step, "loss": loss} for step, loss in enumerate(losses)],
        )
    return result | {"losses": losses}


def load(engine, folder, settings):
    """Go on from the newest checkpoint; return (epochs that are done, their losses,
    their seconds).

    Raises UsageError where there is none, or where it was made with other settings,
    other ranks among them: DeepSpeed would fail on most of these, and go on with some.
    """
    if not (folder / "latest").exists():
        raise UsageError(f"there is no checkpoint in {folder} to --resume from")
    lesson09.check_settings(
        json.loads((folder / "settings.json").read_text()), settings, folder
    )
    _, progress = engine.load_checkpoint(str(folder))
    return progress["epoch"], progress["losses"], progress["seconds"]


if __name__ == "__main__":
    runs.start(main)
