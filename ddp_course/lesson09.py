"""Checkpoints that survive a kill at any moment, and runs that resume bit for bit.

torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 1 --save-every 5
torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 2 --resume
torchrun --max-restarts 3 --nproc_per_node 2 ddp_course/lesson09.py --epochs 1
python ddp_course/lesson09.py --epochs 1
"""

import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddp_course import UsageError, lesson06, runs
from ddp_course.checkpoints.resumable import (
    arrange_buckets,
    resume,
    save_checkpoint,
    updates_between,
)
from ddp_course.checkpoints.whole import check_numbers, load_state, remove_all
from ddp_course.data.images import load_images
from ddp_course.data.order import ResumableSampler, seed_workers
from ddp_course.files import Unusable, check_alike
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson06 import grouped, update
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.restarts import any_rank, goes_on, job, told_to_leave

# ---- what a checkpoint holds ----


def random_states(device):
    """The states of this rank's random number generators, {device: tensor}."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def settings_of(args, train_set, world_size):
    """What a run must have in common with the run that it resumes.

    The number of epochs is not among them: a run may be resumed for more epochs.
    """
    names = "seed batch_size accumulate precision max_norm no_dropout".split()
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names}
    data = {"data": train_set.name, "train-samples": len(train_set)}
    return chosen | data | {"ranks": world_size}


def snapshot(parts, losses, seconds, settings, device):
    """The state of a run between two updates: (shared, own), for save_checkpoint.

    parts: {name: object with a state_dict}. losses: of each update, on this rank. The
    epoch and the position in it follow from the number of updates.
    """
    shared = {name: part.state_dict() for name, part in parts.items()}
    shared |= {"updates": len(losses), "seconds": seconds, "settings": settings}
    own = {"losses": torch.stack(losses), "random": random_states(device)}
    return shared, own


def restore(parts, device, shared, own):
    """Load a snapshot into the parts of a run; raise an error if it does not fit."""
    check_alike(shared["updates"], 0, "the number of updates")
    check_alike(list(own["losses"].shape[:1]), [0], "the losses")
    check_alike(own["losses"].is_contiguous(), True, "the memory of the losses")
    losses, updates = len(own["losses"]), shared["updates"]
    if losses != updates:
        raise Unusable(f"it has {losses} losses of {updates} updates")
    check_alike(shared["seconds"], 0.0, "seconds")
    for name, part in parts.items():
        load_state(part, shared[name])
    optimizers = (part for part in parts.values() if isinstance(part, Optimizer))
    check_numbers(parts["model"], *optimizers)
    set_random_states(own["random"], device)


# ---- the program ----


def count_or_auto(text):
    return text if text == "auto" else runs.count(text)


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch")
    flag, count, precisions = parser.add_argument, runs.count, list(lesson06.PRECISIONS)
    flag("--accumulate", type=count, default=1, help="micro-batches per update (1)")
    flag("--precision", choices=precisions, default="fp32", help="of autocast (fp32)")
    flag("--max-norm", type=runs.number, default=1.0, help="clip longer gradients (1)")
    save_help = "updates per checkpoint, or auto: as often as pays (10; on a GPU, auto)"
    flag("--save-every", type=count_or_auto, help=save_help)
    flag("--keep", type=count, default=2, help="how many checkpoints stay (2)")
    flag("--resume", action="store_true", help="from the newest good checkpoint")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        with told_to_leave() as told:
            run = prepare(args, rank, world_size, device)
            return report(run) if train(run, told) else None


def prepare(args, rank, world_size, device):
    """What `train` needs: data, model, and where an earlier run has ended."""
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = ResumableSampler(train_set, world_size, rank, seed=args.seed)
    generator = torch.Generator()  # or each epoch would draw from dropout's
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, generator=generator
    )

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # rounded up: the short group at the end of an epoch makes an update, too
    per_epoch = -(-len(train_loader) // args.accumulate)
    updates = args.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR
    scheduler = schedule(optimizer, lambda update: 1 - update / updates)
    is_fp16 = args.precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=is_fp16)
    arrange_buckets(model, torch.zeros(1, 1, 28, 28, device=device))
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    parts = {"model": model.module, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "scaler": scaler}
    run = SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, test_set=test_set,
        loader=train_loader, model=model, optimizer=optimizer, scheduler=scheduler,
        scaler=scaler, parts=parts, per_epoch=per_epoch, updates=updates,
        settings=settings_of(args, train_set, world_size),
        folder=args.out / "checkpoints", generator=generator, losses=[], seconds=0.0,
    )  # fmt: skip
    if go_on(run, restore):
        # --epochs may be more than it was: take the rate of the new schedule
        scheduler.last_epoch -= 1
        scheduler.step()
        log.info(f"the learning rate is {scheduler.get_last_lr()[0]:.1e}")
    return run


def go_on(run, restore):
    """Go on where the run in this folder has ended, if asked to, or after a restart.

    Returns what all ranks share in the checkpoint that was restored, or None.
    """
    args, rank, found = run.args, dist.get_rank(), None
    if args.resume or goes_on(args.out):
        restore_parts = partial(restore, run.parts, run.device)
        found = resume(run.folder, run.settings, restore_parts)
    elif rank == 0:
        remove_all(run.folder)  # of an earlier run
    if rank == 0:
        runs.write_atomically(args.out / "job", job())
    if not found:
        return None
    shared, own = found
    run.losses, run.seconds = list(own["losses"].to(run.device)), shared["seconds"]
    if len(run.losses) > run.updates:
        problem = f"the checkpoints are {len(run.losses)} updates into their run"
        raise UsageError(f"{problem}; --epochs {args.epochs} has only {run.updates}")
    return shared


def train(run, told):
    """Train to the end, or until a rank is told to leave; return whether it ended."""
    losses, per_epoch = run.losses, run.per_epoch
    run.save_every = run.args.save_every or {"cuda": "auto"}.get(run.device.type, 10)
    run.every = 10 if run.save_every == "auto" else run.save_every
    # a run that was stopped at the end of an epoch evaluates that epoch again
    for epoch in range(max(0, len(losses) - 1) // per_epoch, run.args.epochs):
        if not train_one_epoch(run, epoch, told):
            return False
        runs.check_finite(torch.stack(losses[epoch * per_epoch :]))
        correct, run.seen = evaluate(run.model, run.test_set, run.device)
        run.accuracy, loss = correct / run.seen, losses[-1].clone()
        dist.all_reduce(loss)  # each rank has its part of the mean
        run.log.info(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {run.accuracy:.1%}")
    return True


def train_one_epoch(run, epoch, told):
    """Do the updates that are left of an epoch; False if a rank was told to leave."""
    args, losses, device = run.args, run.losses, run.device
    done = len(losses) - epoch * run.per_epoch  # in this epoch, before it was resumed
    run.loader.sampler.set_epoch(epoch)
    run.loader.sampler.start = done * args.accumulate * args.batch_size
    seed_workers(run.generator, args.seed, epoch, dist.get_rank())
    run.model.train()
    begin = time.perf_counter()
    for micro_batches in grouped(run.loader, args.accumulate):
        changed = run.optimizer, run.scheduler, run.scaler
        losses.append(update(run.model, micro_batches, *changed, device, args))
        asks = len(losses) % (10 if device.type == "cuda" else 1) == 0  # see any_rank
        leaves = asks and any_rank(told, device) and len(losses) < run.updates
        if leaves or len(losses) % run.every == 0 or len(losses) == run.updates:
            runs.check_finite(torch.stack(losses[epoch * run.per_epoch :]))
            run.seconds += time.perf_counter() - begin
            begin = time.perf_counter()
            path = write_checkpoint(run)
            if leaves:
                run.log.info(f"told to leave: {path.name} is written, see --resume")
                return False
            if run.save_every == "auto":
                saving = time.perf_counter() - begin
                run.every = updates_between(saving, run.seconds / len(losses), device)
            begin = time.perf_counter()
    run.seconds += time.perf_counter() - begin
    return True


def write_checkpoint(run, **more):
    """Write a checkpoint, with more for all ranks; return its path."""
    path = run.folder / f"step-{len(run.losses):08}"
    shared, own = snapshot(run.parts, run.losses, run.seconds, run.settings, run.device)
    save_checkpoint(path, shared | more, own, run.args.keep)
    return path


def report(run):
    save(run.model, run.args.out / "model.pt")
    # what is reported is what was saved
    load(run.model, run.args.out / "model.pt", run.device)
    losses = torch.stack(run.losses)
    dist.all_reduce(losses)
    trained = run.model.module, run.train_set, losses.tolist(), run.seconds
    return runs.finish(run.args, run.device, *trained, run.accuracy, run.seen)


if __name__ == "__main__":
    runs.start(main)
