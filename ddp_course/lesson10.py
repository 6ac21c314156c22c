"""Pretraining a GPT: tokens, the usual recipe, and samples of what the model writes.

python ddp_course/lesson10.py --nproc 2 --train-samples 128
python ddp_course/lesson10.py --nproc 2 --train-samples 128 --epochs 2 --resume
torchrun --nproc_per_node 2 ddp_course/lesson10.py --tokenizer bpe --train-samples 64
"""

import itertools
import json
import logging
import math
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ddp_course import UsageError, lesson09, runs
from ddp_course.data.text import load_windows
from ddp_course.files import check_alike
from ddp_course.lesson06 import PRECISIONS, grouped
from ddp_course.lesson09 import ResumableSampler, save_checkpoint, snapshot
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.store import host_store

MOST_ON_A_CPU = 8192  # windows to train on, unless --train-samples says more

# ---- the recipe ----


def learning_rate(step, steps, args):
    """The rate of an update, of 0 to steps - 1: up a line, then down half a cosine.

    It reaches --learning-rate after --warmup updates, and ends at a tenth of that.
    """
    if step < args.warmup:
        return args.learning_rate * (step + 1) / (args.warmup + 1)
    done = (step - args.warmup) / max(1, steps - 1 - args.warmup)
    return args.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def parameter_groups(model, weight_decay):
    """Groups for AdamW: matrices decay; biases and norms, which are vectors, do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def loss_of(model, tokens, targets, precision, device):
    """The mean cross entropy of the next token, in nats, which the model computes."""
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        return model(tokens.to(device), targets.to(device))


def update(model, micro_batches, optimizer, rate, args, device):
    """Do one update; return float (3,): this rank's loss, gradient norm, learning rate.

    All micro-batches of all ranks have the same number of tokens, so the mean of their
    means is the mean over all tokens. The norm is the one before clipping.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    mean, precision = 0.0, PRECISIONS[args.precision]
    for number, (tokens, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with nullcontext() if last else model.no_sync():
            loss = loss_of(model, tokens, targets, precision, device)
            (loss / len(micro_batches)).backward()
        mean = mean + loss.detach() / len(micro_batches)
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
    optimizer.step()
    return torch.stack([mean, norm, torch.full_like(mean, rate)])


@torch.no_grad()
def evaluate(network, windows, args, device):
    """The mean loss over all windows, shared by the ranks. network: not wrapped."""
    network.eval()
    mine = range(dist.get_rank(), len(windows), dist.get_world_size())
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens, targets in DataLoader(Subset(windows, mine), args.batch_size):
        loss = loss_of(network, tokens, targets, PRECISIONS[args.precision], device)
        total += torch.tensor([loss.item() * len(tokens), len(tokens)], device=device)
    dist.all_reduce(total)
    network.train()
    return (total[0] / total[1]).item()


def look(network, seen, unseen, tokenizer, args, device):
    """The loss on text of the training set and on held-out text, and a sample."""
    losses = {
        "train_loss": evaluate(network, seen, args, device),
        "validation_loss": evaluate(network, unseen, args, device),
    }
    tokens = tokenizer.encode(args.prompt.encode()).tolist()
    if dist.get_rank() == 0:  # the other ranks train on
        tokens = network.generate(tokens, args.sample_tokens)
    return losses | {"sample": tokenizer.decode(tokens)}


def in_words(number, norm, train_loss, validation_loss, sample):
    losses = f"loss {train_loss:.3f}, held out {validation_loss:.3f}"
    return f"update {number}: {losses}, gradient norm {norm:.2f}\n{sample}"


# ---- how it starts ----


def start_ranks(args):
    """Start --nproc ranks on this machine; return the result, on machine 0."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.nproc)))
    # on one machine this process serves the store, on loopback; otherwise rank 0 does
    store = host_store() if args.nnodes == 1 else None
    port = store.port if store else args.master_port
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (args, port, folder), nprocs=args.nproc)
        except mp.ProcessExitedException as error:  # the rank has said why
            sys.exit(error.exit_code if error.exit_code in (2, 130) else 1)
    if args.node_rank == 0:
        return json.loads((args.out / "result.json").read_text())


def rank_main(local_rank, args, port, folder):
    """What each process does first: set what torchrun would have set, and begin."""
    os.environ |= {
        "RANK": str(args.node_rank * args.nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(args.nnodes * args.nproc),
        "LOCAL_WORLD_SIZE": str(args.nproc),
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(args.nnodes == 1),
        "TORCHELASTIC_ERROR_FILE": f"{folder}/{local_rank}/error.json",
    }
    runs.start(lambda _: join(args))


def arguments(argv=()):
    parser = runs.parser(
        __file__, __doc__, trains="text", most=MOST_ON_A_CPU, per="micro-batch"
    )
    parser.set_defaults(epochs=1, batch_size=16)
    flag, count = parser.add_argument, {"type": runs.count}
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--dropout", type=runs.share, default=0.0, help="probability (0)")
    flag("--precision", choices=["fp32", "bf16"], help="bf16 on a GPU, else fp32")
    flag("--compile", action="store_true", help="compile the model: pays in long runs")
    flag("--chunked-loss", action="store_true", help="never all logits at once")
    flag("--accumulate", **count, default=1, help="micro-batches per update (1)")
    flag("--learning-rate", type=runs.number, default=2e-3, help="the highest (2e-3)")
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=runs.number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=runs.number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-every", **count, default=50, help="updates per evaluation (50)")
    flag("--prompt", default="def ", help="what samples begin with")
    flag("--sample-tokens", **count, default=160, help="length of samples (160)")
    flag("--save-every", **count, default=100, help="updates per checkpoint (100)")
    flag("--keep", **count, default=2, help="how many checkpoints stay (2)")
    flag("--resume", action="store_true", help="from the newest good checkpoint")
    flag("--nproc", **count, default=1, help="ranks to start without torchrun (1)")
    flag("--nnodes", **count, default=1, help="machines that start this program (1)")
    flag("--node-rank", type=runs.whole, default=0, help="number of this machine (0)")
    flag("--master-addr", default="127.0.0.1", help="address of machine 0 (127.0.0.1)")
    flag("--master-port", type=runs.port, default=29500, help="its port (29500)")
    args = parser.parse_args(argv)
    if "RANK" in os.environ and args.nproc * args.nnodes > 1:
        parser.error("torchrun has started the ranks: leave out --nproc and --nnodes")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank {args.node_rank} is none of {args.nnodes} machines")
    if args.chunked_loss and not hasattr(nn, "LinearCrossEntropyOptions"):
        parser.error("--chunked-loss needs torch 2.15 or later")
    if not args.prompt:
        parser.error("--prompt is empty: a sample needs something to begin with")
    return args


def main(argv=()):
    args = arguments(argv)
    return join(args) if args.nproc * args.nnodes == 1 else start_ranks(args)


def join(args):
    device = choose_device(args.device, deterministic=args.deterministic)
    args.precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        return train(args, rank, world_size, device)


# ---- the program ----


def settings_of(args, fingerprint, train_set, world_size):
    """What a run must have in common with the run that it resumes."""
    names = "shape seed batch_size accumulate precision dropout learning_rate warmup"
    names = [*names.split(), "weight_decay", "max_norm"]
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names}
    data = {"data": fingerprint, "train-samples": len(train_set)}
    return chosen | data | {"ranks": world_size}


def restore(parts, device, shared, own):
    """Lesson 9's, for a checkpoint that has looks at the validation text, too."""
    check_alike(shared["looks"], {}, "what was looked at")
    lesson09.restore(parts, device, shared, own)


def train(args, rank, world_size, device):
    log, shape = runs.open_folder(args.out), SHAPES[args.shape]
    train_set, unseen, tokenizer, fingerprint = load_windows(
        args.data,
        args.tokenizer,
        args.vocabulary,
        shape["context"],
        args.train_samples,
        most=None if device.type == "cuda" else MOST_ON_A_CPU,
    )
    # all ranks get equally many windows; what is left over is dropped
    equal = len(train_set) - len(train_set) % world_size or len(train_set)
    runs.check_batch_size(args.batch_size * args.accumulate, equal, world_size)
    seen, unseen = (text.some(min(32, len(text))) for text in (train_set, unseen))
    sampler = ResumableSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    generator = torch.Generator()  # from which workers are seeded, see lesson 9
    loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, generator=generator
    )
    per_epoch = len(loader) // args.accumulate  # whole updates only
    steps = args.epochs * per_epoch
    per_update = args.batch_size * args.accumulate * world_size * train_set.context

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, dropout=args.dropout, **shape).to(device)
    network.head.chunked = args.chunked_loss
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(
        network, device_ids=gpu, gradient_as_bucket_view=True
    )
    groups = parameter_groups(network, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    lesson09.arrange_buckets(model, torch.zeros(1, 1, dtype=torch.long, device=device))
    if args.compile:
        model.compile()  # after wrapping; in place, so names of parameters stay
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    parts = {"model": network, "optimizer": optimizer}
    settings = settings_of(args, fingerprint, train_set, world_size)
    folder, losses, looks, seconds = args.out / "checkpoints", [], {}, 0.0
    if args.resume or lesson09.goes_on(args.out):
        take_over = partial(restore, parts, device)
        if found := lesson09.resume(folder, settings, take_over):
            losses = list(found[1]["losses"].to(device))
            looks, seconds = found[0]["looks"], found[0]["seconds"]
    elif rank == 0:
        runs.empty_folder(folder)
    if rank == 0:
        runs.write_atomically(args.out / "job", lesson09.job())
    if len(losses) > steps:
        problem = f"the checkpoints are {len(losses)} updates into their run"
        raise UsageError(f"{problem}; --epochs {args.epochs} has only {steps}")

    for epoch in range(len(losses) // per_epoch, args.epochs):
        done = len(losses) - epoch * per_epoch  # in this epoch, before it was resumed
        sampler.set_epoch(epoch)
        sampler.start = done * args.accumulate * args.batch_size
        lesson09.seed_workers(generator, args.seed, epoch, rank)
        begin = time.perf_counter()
        updates = itertools.islice(grouped(loader, args.accumulate), per_epoch - done)
        for micro_batches in updates:
            rate = learning_rate(len(losses), steps, args)
            losses.append(update(model, micro_batches, optimizer, rate, args, device))
            number = len(losses)
            evaluates = number % args.eval_every == 0 or number == steps
            saves = number % args.save_every == 0 or number == steps
            if not (evaluates or saves):
                continue
            runs.check_finite(torch.stack(losses[epoch * per_epoch :])[:, 0])
            seconds += time.perf_counter() - begin
            if evaluates:
                looks[number] = look(network, seen, unseen, tokenizer, args, device)
                log.info(in_words(number, losses[-1][1], **looks[number]))
            if saves:
                shared, own = snapshot(parts, losses, seconds, settings, device)
                shared["looks"] = looks
                save_checkpoint(folder / f"step-{number:08}", shared, own, args.keep)
            begin = time.perf_counter()
        seconds += time.perf_counter() - begin

    means = torch.stack(losses)
    dist.all_reduce(means, dist.ReduceOp.AVG)
    history = [
        {"step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate}
        | {"tokens": (step + 1) * per_update, **looks.get(step + 1, {})}
        for step, (loss, norm, rate) in enumerate(means.tolist())
    ]
    result = {
        "lesson": args.lesson,
        "world_size": world_size,
        "backend": dist.get_backend(),
        "device": device.type,
        "data": str(args.data),
        "data_sha256": fingerprint,
        "train_samples": len(train_set),
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "parameters": sum(value.numel() for value in network.parameters()),
        "train_loss": round(history[-1]["train_loss"], 4),
        "validation_loss": round(history[-1]["validation_loss"], 4),
        "tokens": history[-1]["tokens"],
        "seconds": round(seconds, 2),
        "tokens_per_second": round(history[-1]["tokens"] / seconds),
        "params_sha256": runs.params_sha256(network),
    }
    if rank == 0:
        runs.write_result(args.out, result, history)
    return result | {"history": history}


if __name__ == "__main__":
    runs.start(main)
