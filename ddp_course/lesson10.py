"""Pretraining a GPT from scratch: tokens, the usual recipe, and samples of its text.

python ddp_course/lesson10.py --nproc 2 --train-samples 128 --batch-size 8
python ddp_course/lesson10.py --nproc 2 --train-samples 128 --batch-size 8 --resume
torchrun --nproc_per_node 2 ddp_course/lesson10.py --train-samples 64 --accumulate 2
"""

import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ddp_course import UsageError, lesson09, runs
from ddp_course.lesson06 import PRECISIONS, grouped
from ddp_course.lesson09 import (
    ResumableSampler,
    random_states,
    save_checkpoint,
    set_random_states,
)
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    host_store,
    process_group,
)
from ddp_course.scenery.models import GPT
from ddp_course.scenery.text import Windows, load_text

# each head is 64 wide; small trains in minutes on two cores; gpt2 is GPT-2's smallest,
# of 124 million parameters
SHAPES = {
    "small": {"context": 128, "layers": 4, "heads": 2, "width": 128},
    "medium": {"context": 256, "layers": 6, "heads": 4, "width": 256},
    "gpt2": {"context": 1024, "layers": 12, "heads": 12, "width": 768},
}
GPT2_VOCABULARY = 50257
MOST_ON_A_CPU = 8192  # windows to train on, where nobody says how many

# ---- the recipe ----


def learning_rate(step, steps, args):
    """Of the update of this number, from 0: up a line to --learning-rate, then down a
    cosine to --last-rate.

    The cosine is that of I. Loshchilov and F. Hutter, "SGDR", 2017, without its
    restarts.
    """
    if step < args.warmup:
        return (
            args.first_rate
            + (args.learning_rate - args.first_rate) * step / args.warmup
        )
    done = (step - args.warmup) / max(1, steps - 1 - args.warmup)
    return (
        args.last_rate
        + (args.learning_rate - args.last_rate) * (1 + math.cos(math.pi * done)) / 2
    )


def parameter_groups(model, weight_decay):
    """Matrices shrink by weight decay; biases and the norms' factors, which are
    vectors, do not.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def update(model, window, optimizer, rate, max_norm, precision, device):
    """One optimizer step for a window of batches, at this learning rate; return its
    loss, the mean over all ranks.

    All batches of all ranks have equally many tokens, so here the mean of their means
    is the mean. max_norm: None does not clip.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    mean = torch.zeros((), device=device)
    for number, (tokens, targets) in enumerate(window, 1):
        with nullcontext() if number == len(window) else model.no_sync():
            loss = loss_of(model, tokens, targets, precision, device) / len(window)
            loss.backward()
        mean += loss.detach()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def loss_of(model, tokens, targets, precision, device):
    """The mean cross entropy of the next token, in nats."""
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        logits = model(tokens.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())


@torch.no_grad()
def evaluate(model, text, device, precision):
    """The mean loss over all windows of a text, each rank a part of them. model: not
    wrapped.
    """
    model.eval()
    mine = range(dist.get_rank(), len(text), dist.get_world_size())
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens, targets in DataLoader(Subset(text, mine), batch_size=16):
        loss = loss_of(model, tokens, targets, precision, device)
        total += torch.tensor([loss.item() * len(tokens), len(tokens)], device=device)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


# ---- how it starts ----


def start_ranks(args):
    """Start --nproc ranks on this machine with mp.spawn, as torchrun would; return the
    job's result, on the first.
    """
    cores = (os.cpu_count() or 1) // args.nproc
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    store = (
        host_store() if args.nnodes == 1 else None
    )  # on loopback; else rank 0 listens on --master-port
    # what is wrong, the ranks will say themselves
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(
                rank_main,
                (args, store.port if store else None, folder),
                nprocs=args.nproc,
            )
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code if error.exit_code in (2, 130) else 1)
    return (
        json.loads((args.out / "result.json").read_text())
        if args.node_rank == 0
        else None
    )


def rank_main(local_rank, args, own_port, folder):
    """What mp.spawn calls in each process: set what torchrun would have set, and
    begin.
    """
    rank, world_size = (
        args.node_rank * args.nproc + local_rank,
        args.nnodes * args.nproc,
    )
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
    }
    os.environ |= {"LOCAL_WORLD_SIZE": str(args.nproc), "MASTER_ADDR": args.master_addr}
    os.environ["MASTER_PORT"] = str(own_port or args.master_port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(
        bool(own_port)
    )  # it is served by who has started us
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{local_rank}/error.json"
    runs.start(lambda _: join(args))


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="text")
    parser.set_defaults(epochs=1, batch_size=16)
    number = {"type": runs.count}
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="small", help="of the model (small)"
    )
    parser.add_argument("--tokenizer", choices=["bytes", "bpe"], default="bytes")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="bf16 on a GPU, else fp32"
    )
    parser.add_argument(
        "--accumulate", **number, default=1, help="micro-batches an update (1)"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--first-rate", type=float, default=1e-5, help="where the warm-up begins"
    )
    parser.add_argument(
        "--last-rate", type=float, default=2e-4, help="where the cosine ends"
    )
    parser.add_argument(
        "--warmup", **number, default=20, help="updates until --learning-rate (20)"
    )
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--max-norm",
        type=float,
        default=1.0,
        help="of gradients, after the warm-up (1.0)",
    )
    parser.add_argument("--eval-every", **number, default=50, help="updates (50)")
    parser.add_argument("--prompt", default="def ", help="what the samples go on from")
    parser.add_argument(
        "--sample-tokens", **number, default=160, help="how long they are (160)"
    )
    parser.add_argument("--save-every", **number, default=100, help="updates (100)")
    parser.add_argument(
        "--keep", **number, default=2, help="how many checkpoints stay (2)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        help="from the newest whole checkpoint, or this step's",
    )
    parser.add_argument(
        "--nproc",
        **number,
        default=1,
        help="ranks to start on this machine, without torchrun",
    )
    parser.add_argument(
        "--nnodes",
        **number,
        default=1,
        help="machines, each of which starts this program",
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, help="which of them this is, from 0"
    )
    parser.add_argument("--master-addr", default="127.0.0.1", help="of machine 0")
    parser.add_argument(
        "--master-port", type=int, default=29500, help="where machine 0 listens"
    )
    args = parser.parse_args(argv)
    if "RANK" in os.environ and args.nproc * args.nnodes > 1:
        parser.error(
            "torchrun has started the ranks already: leave out --nproc and --nnodes"
        )
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(
            f"--node-rank {args.node_rank} is none of {args.nnodes} machines, which count from 0"
        )
    if not args.prompt:
        parser.error("--prompt is empty: a sample needs something to go on from")
    if args.resume not in (None, "newest") and not args.resume.isdecimal():
        parser.error(f"--resume {args.resume} is no number of an update")
    return args


def main(argv=()):
    args = arguments(argv)
    return join(args) if args.nproc * args.nnodes == 1 else start_ranks(args)


def join(args):
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, world_size):
        return train(args, rank, world_size, device)


# ---- the program ----


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_tokens, validation_tokens, tokenizer, fingerprint = load_text(
        args.data, args.tokenizer
    )
    shape = SHAPES[args.shape]
    train_set, validation_set = (
        Windows(part, shape["context"]) for part in (train_tokens, validation_tokens)
    )
    if not (len(train_set) and len(validation_set)):
        raise UsageError(
            f"--data {args.data} is too short: a window has {shape['context']} tokens, {args.shape} needs one"
        )
    most = (
        len(train_set) if device.type == "cuda" else min(MOST_ON_A_CPU, len(train_set))
    )
    train_set = train_set.some(args.train_samples or most)
    # all ranks have equally many, and what is left over is dropped
    equal = len(train_set) - len(train_set) % world_size or len(train_set)
    runs.check_batch_size(args.batch_size * args.accumulate, equal, world_size)
    seen, unseen = (
        text.some(min(32, len(text))) for text in (train_set, validation_set)
    )
    sampler = ResumableSampler(
        train_set, world_size, rank, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        generator=torch.Generator(),
    )
    per_epoch = (
        len(loader) // args.accumulate
    )  # whole windows only: so all batches count alike
    steps = args.epochs * per_epoch
    precision = PRECISIONS[
        args.precision or ("bf16" if device.type == "cuda" else "fp32")
    ]

    torch.manual_seed(args.seed)
    vocabulary = max(
        tokenizer.vocabulary, GPT2_VOCABULARY if args.shape == "gpt2" else 0
    )
    network = GPT(vocabulary, dropout=args.dropout, **shape).to(device)
    model = DistributedDataParallel(
        network,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    groups = parameter_groups(network, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    lesson09.arrange_buckets(model, torch.zeros(1, 1, dtype=torch.long, device=device))
    torch.manual_seed(
        args.seed + rank
    )  # the same model everywhere, but each rank its own dropout

    settings = settings_of(args, fingerprint, len(train_set), world_size)
    position, history, folder = (
        {"epoch": 0, "updates": 0, "seconds": 0.0},
        [],
        args.out / "checkpoints",
    )
    if checkpoint := checkpoint_of(args, folder):
        shared, own = lesson09.load_checkpoint(checkpoint, settings)
        network.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        position, history = shared["position"], shared["history"]
        set_random_states(own["random"], device)
        log.info(f"going on from {checkpoint.name}")
    elif rank == 0:
        runs.empty_folder(folder)

    model.train()
    while position["epoch"] < args.epochs:
        sampler.set_epoch(position["epoch"])
        sampler.start = position["updates"] * args.accumulate * args.batch_size
        begin = time.perf_counter()
        for window in grouped(loader, args.accumulate):
            if len(window) < args.accumulate:
                break  # what is left over; another epoch leaves out something else
            step = len(history)
            rate = learning_rate(step, steps, args)
            max_norm = args.max_norm if step >= args.warmup else None
            loss = update(model, window, optimizer, rate, max_norm, precision, device)
            tokens = (
                (step + 1)
                * args.accumulate
                * args.batch_size
                * world_size
                * shape["context"]
            )
            history.append(
                {"step": step, "loss": loss, "learning_rate": rate, "tokens": tokens}
            )
            position["updates"] += 1
            position["seconds"] += time.perf_counter() - begin
            if (step + 1) % args.eval_every == 0 or step + 1 == steps:
                history[-1] |= look(
                    network, seen, unseen, tokenizer, args, device, precision
                )
                log.info(report(history[-1]))
            if (step + 1) % args.save_every == 0 or step + 1 == steps:
                shared = {
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "position": position,
                }
                shared |= {"settings": settings, "history": history}
                own = {"random": random_states(device)}
                save_checkpoint(folder / f"step-{step + 1:08}", shared, own, args.keep)
            begin = time.perf_counter()
        position |= {"epoch": position["epoch"] + 1, "updates": 0}

    seconds = position["seconds"]
    result = {
        "lesson": args.lesson, "world_size": world_size, "backend": dist.get_backend(), "device": device.type,
        "data": str(args.data), "corpus_sha256": fingerprint, "train_samples": len(train_set), "epochs": args.epochs,
        "batch_size": args.batch_size, "parameters": sum(value.numel() for value in network.parameters()),
        "train_loss": round(history[-1]["train_loss"], 4), "validation_loss": round(history[-1]["validation_loss"], 4),
        "tokens": history[-1]["tokens"], "seconds": round(seconds, 2),
        "tokens_per_second": round(history[-1]["tokens"] / seconds), "params_sha256": runs.params_sha256(network),
    }  # fmt: skip
    if rank == 0:
        runs.write_result(args.out, result, history)
    return result | {"history": history}


def look(network, seen, unseen, tokenizer, args, device, precision):
    """What there is to see of a model: its loss on text that it has and has not trained
    on, and a sample of its own.
    """
    losses = {
        name: evaluate(network, text, device, precision)
        for name, text in {"train_loss": seen, "validation_loss": unseen}.items()
    }
    prompt = tokenizer.encode(args.prompt.encode()).tolist()
    if dist.get_rank() == 0:  # the others may go on
        prompt = network.generate(prompt, args.sample_tokens)
    return losses | {"sample": tokenizer.decode(prompt)}


def report(row):
    losses = f"training text {row['train_loss']:.3f}, other text {row['validation_loss']:.3f}"
    return (
        f"update {row['step'] + 1}, {row['tokens']:,} tokens: {losses}\n{row['sample']}"
    )


def settings_of(args, fingerprint, train_samples, world_size):
    """What a run must share with the one that it goes on from."""
    names = [
        "shape",
        "tokenizer",
        "seed",
        "epochs",
        "batch_size",
        "accumulate",
        "precision",
        "dropout",
    ]
    names += [
        "learning_rate",
        "first_rate",
        "last_rate",
        "warmup",
        "weight_decay",
        "max_norm",
        "eval_every",
    ]
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names}
    return chosen | {
        "corpus": fingerprint,
        "train-samples": train_samples,
        "ranks": world_size,
    }


def checkpoint_of(args, folder):
    """The checkpoint to go on from: the newest, or the one that --resume names; None to
    begin anew.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if args.resume in (None, "newest"):
        return lesson09.newest(folder) if args.resume or restarted else None
    chosen = folder / f"step-{int(args.resume):08}"
    if not lesson09.is_whole(chosen):
        there = ", ".join(path.name for path in lesson09.checkpoints(folder)) or "none"
        raise UsageError(f"{chosen} is not there, or damaged; there are: {there}")
    dist.barrier()  # nobody looks any more
    if dist.get_rank() == 0:
        for path in lesson09.checkpoints(folder):
            if path > chosen:
                shutil.rmtree(path)  # this run's own come in their place
    return chosen


if __name__ == "__main__":
    runs.start(main)
