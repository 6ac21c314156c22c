"""DistributedDataParallel, in full: sampler, seeds, wrapper, evaluation, saving.

torchrun ddp_course/lesson04.py
torchrun --nproc_per_node 2 ddp_course/lesson04.py --epochs 1
torchrun --nproc_per_node 3 ddp_course/lesson04.py --data digits --learning-rate 2e-3
python ddp_course/lesson04.py --epochs 1
"""

import io
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import lesson01, runs
from ddp_course.data.images import load_images
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, rendezvous


def train_one_epoch(model, loader, optimizer, device):
    """Lesson 1's loop as it is, since backward() averages the gradients.

    Return the loss of each step, averaged over the ranks: a list of floats.
    """
    losses = lesson01.train_one_epoch(model, loader, optimizer, device)
    losses = torch.tensor(losses, device=device)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def evaluate(model, test_set, device):
    """Count, over all ranks, the samples that the model gets right, and all samples.

    Without DistributedSampler, which repeats samples until all ranks have equally many.
    Without the DDP wrapper, whose forward may communicate: here a rank may have one
    batch more than another.
    """
    mine = range(dist.get_rank(), len(test_set), dist.get_world_size())
    loader = DataLoader(Subset(test_set, mine), batch_size=250)
    counts = torch.tensor(
        lesson01.evaluate(model.module, loader, device), device=device
    )
    dist.all_reduce(counts)
    correct, seen = counts.tolist()
    return correct, seen


def save(model, path):
    """Rank 0 writes the parameters, whole or not at all; the others wait for it."""
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(
            model.module.state_dict(), file
        )  # without .module, names get a prefix
        runs.write_atomically(path, file.getvalue())
    dist.barrier()


def load(model, path, device):
    """Every rank reads the file, onto its own device."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(state)


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag = parser.add_argument
    flag("--learning-rate", type=runs.number, default=1e-3, help="of AdamW (1e-3)")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    dist.init_process_group(
        backend_for(device),
        timeout=timedelta(seconds=args.timeout),
        device_id=device if device.type == "cuda" else None,  # nccl's, from the start
        **rendezvous(args.timeout),
    )
    try:
        dist.barrier()  # or a rank could leave while another is still connecting to it
        return train(args, dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
