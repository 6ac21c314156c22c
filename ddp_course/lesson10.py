"""Pretraining a GPT: tokens, the usual recipe, and samples of what the model writes.

python ddp_course/lesson10.py --nproc 2 --train-samples 128
python ddp_course/lesson10.py --nproc 2 --train-samples 128 --epochs 2 --resume
torchrun --nproc_per_node 2 ddp_course/lesson10.py --tokenizer bpe --train-samples 64
"""

import itertools
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course import lesson09, runs
from ddp_course.checkpoints.export import export
from ddp_course.checkpoints.resumable import arrange_buckets
from ddp_course.data.order import ResumableSampler, seed_workers
from ddp_course.data.text import load_windows
from ddp_course.files import check_alike
from ddp_course.lesson06 import PRECISIONS, grouped
from ddp_course.models import recipe
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.modern import ModernGPT
from ddp_course.models.muon import Together
from ddp_course.models.recipe import learning_rate, loss_of, parameter_groups
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.spawn import start_ranks

LOSSES = ["train_loss", "validation_loss", "bits_per_byte"]
MOST_ON_A_CPU = 8192  # windows to train on, unless --train-samples says more


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


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU, "per": "micro-batch"}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=16)
    flag, count = parser.add_argument, {"type": runs.count}
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--modern", action="store_true", help="a model like Llama, not like GPT-2")
    flag("--dropout", type=runs.share, default=0.0, help="probability (0)")
    flag("--precision", choices=["fp32", "bf16"], help="bf16 on a GPU, else fp32")
    flag("--compile", action="store_true", help="compile the model: pays in long runs")
    flag("--chunked-loss", action="store_true", help="never all logits at once")
    flag("--accumulate", **count, default=1, help="micro-batches per update (1)")
    flag("--learning-rate", type=runs.number, default=2e-3, help="the highest (2e-3)")
    schedule_help = "what the rate does after its warm-up (cosine)"
    flag("--schedule", choices=["cosine", "wsd"], default="cosine", help=schedule_help)
    optimizer_help = "adamw, or muon for the matrices of the blocks (adamw)"
    flag("--optimizer", choices=["adamw", "muon"], default="adamw", help=optimizer_help)
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=runs.number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=runs.number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-every", **count, default=50, help="updates per evaluation (50)")
    flag("--eval-windows", **count, default=32, help="of each text, to evaluate (32)")
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
    return join(args) if args.nproc * args.nnodes == 1 else start_ranks(begin, args)


def begin(args):
    """What each process does that `start_ranks` has started."""
    runs.start(lambda _: join(args))


def join(args):
    device = choose_device(args.device, deterministic=args.deterministic)
    args.precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def settings_of(args, fingerprint, train_set, world_size):
    """What a run must have in common with the run that it resumes."""
    names = "shape modern seed batch_size accumulate precision dropout learning_rate "
    names += "warmup schedule optimizer weight_decay max_norm"
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names.split()}
    data = {"data": fingerprint, "train-samples": len(train_set)}
    return chosen | data | {"ranks": world_size}


def restore(parts, device, shared, own):
    """Lesson 9's, for a checkpoint that has evaluations of the text, too."""
    check_alike(shared["evaluations"], {}, "the evaluations")
    lesson09.restore(parts, device, shared, own)


def prepare(args, rank, world_size, device):
    """What `train` needs: data, model, and where an earlier run has ended."""
    log, shape = runs.open_folder(args.out), SHAPES[args.shape]
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    train_set, held_out, tokenizer, fingerprint = load_windows(
        args.data, args.tokenizer, args.vocabulary, shape["context"],
        args.train_samples, most,
    )  # fmt: skip
    # all ranks get equally many windows; what is left over is dropped
    equal = len(train_set) - len(train_set) % world_size or len(train_set)
    runs.check_batch_size(args.batch_size * args.accumulate, equal, world_size)
    seen, held_out = (
        text.some(min(args.eval_windows, len(text))) for text in (train_set, held_out)
    )
    sampler = ResumableSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    generator = torch.Generator()  # from which workers are seeded, see lesson 9
    loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, generator=generator
    )
    per_epoch = len(loader) // args.accumulate  # whole updates only

    torch.manual_seed(args.seed)
    kind = ModernGPT if args.modern else GPT
    model = kind(tokenizer.vocabulary, dropout=args.dropout, **shape).to(device)
    model.head.chunked = args.chunked_loss
    groups = parameter_groups(model, args.weight_decay)
    by_name = recipe.optimizers(groups, args.optimizer, model)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    arrange_buckets(model, torch.zeros(1, 1, dtype=torch.long, device=device))
    if args.compile:
        model.compile()  # after wrapping; in place, so names of parameters stay
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    run = SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, loader=loader,
        texts=(seen, held_out), tokenizer=tokenizer, fingerprint=fingerprint,
        model=model, optimizer=Together(*by_name.values()), per_epoch=per_epoch,
        parts={"model": model.module, **by_name},
        updates=args.epochs * per_epoch, folder=args.out / "checkpoints",
        settings=settings_of(args, fingerprint, train_set, world_size),
        generator=generator, losses=[], evaluations={}, seconds=0.0,
    )  # fmt: skip
    if found := lesson09.go_on(run, restore):
        run.evaluations = found["evaluations"]
    return run


def train(run):
    """Train to the end; evaluate, and write checkpoints, on the way."""
    args, losses, per_epoch = run.args, run.losses, run.per_epoch
    for epoch in range(len(losses) // per_epoch, args.epochs):
        done = len(losses) - epoch * per_epoch  # in this epoch, before it was resumed
        run.loader.sampler.set_epoch(epoch)
        run.loader.sampler.start = done * args.accumulate * args.batch_size
        seed_workers(run.generator, args.seed, epoch, dist.get_rank())
        begin = time.perf_counter()
        grouped_batches = grouped(run.loader, args.accumulate)
        for micro_batches in itertools.islice(grouped_batches, per_epoch - done):
            rate = learning_rate(len(losses), run.updates, args)
            losses.append(
                update(run.model, micro_batches, run.optimizer, rate, args, run.device)
            )
            number, ends = len(losses), len(losses) == run.updates
            evaluates = number % args.eval_every == 0 or ends
            saves = number % args.save_every == 0 or ends
            if not (evaluates or saves):
                continue
            runs.check_finite(torch.stack(losses[epoch * per_epoch :])[:, 0])
            run.seconds += time.perf_counter() - begin
            if evaluates:
                how = args, PRECISIONS[args.precision], run.device
                what = run.model.module, run.texts, run.tokenizer
                run.evaluations[number] = found = recipe.evaluate_texts(*what, *how)
                run.log.info(recipe.in_words(number, losses[-1][1], found))
            if saves:
                lesson09.write_checkpoint(run, evaluations=run.evaluations)
            begin = time.perf_counter()
        run.seconds += time.perf_counter() - begin


def report(run):
    args, means = run.args, torch.stack(run.losses)
    dist.all_reduce(means, dist.ReduceOp.AVG)
    samples = args.batch_size * args.accumulate * dist.get_world_size()
    tokens = samples * run.train_set.context  # per update
    history = [
        {"step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate}
        | {"tokens": (step + 1) * tokens, **run.evaluations.get(step + 1, {})}
        for step, (loss, norm, rate) in enumerate(means.tolist())
    ]
    last, network = history[-1], run.model.module
    more = {
        "data_sha256": run.fingerprint,
        "parameters": sum(value.numel() for value in network.parameters()),
        **{name: round(last[name], 4) for name in LOSSES},
        "tokens": last["tokens"],
        "samples_per_second": None,
        "tokens_per_second": round(last["tokens"] / run.seconds),
    }
    if dist.get_rank() == 0:
        export(network, run.tokenizer, args.out / "model")
    trained = network, run.train_set, means[:, 0].tolist(), run.seconds
    result = runs.finish(args, run.device, *trained, more=more, metrics=history)
    return result | {"history": history}


if __name__ == "__main__":
    runs.start(main)
