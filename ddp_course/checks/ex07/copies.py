"""Question 4: processes that each train a network of their own."""

import os
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from ddp_course.checks.claims import Claim, agree, hold, on_every_rank
from ddp_course.checks.ex07.networks import PRELOADED, changed, in_words, inputs_unchanged
from ddp_course.checks.ported import RecordingNetwork, never_trained, trained_on
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import descend, unwrapped
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

LEARNING_RATE = 0.1
DIGITS = 8  # of parameters, in 64 bits


def copies(together, samples, batch_size, seed):
    """The result, Accelerate's number of processes, and what the network saw. No GPU is
    seen here.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}
    from accelerate import PartialState

    data, network = Numbered(samples, seed), RecordingNetwork(seed + int(os.environ["RANK"]))
    returned, end = together(network, data.inputs, data.labels, batch_size), None
    copied = False
    match returned:
        case (nn.Module() as network, int() as number) if isinstance(unwrapped(network), RecordingNetwork):
            returned, end = number, parameters_of(unwrapped(network))
            copied = never_trained(unwrapped(network))
        case _:
            returned = in_words(returned)
    counted = PartialState().num_processes
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return {
        "returned": returned,
        "end": end,
        "counted": counted,
        "trained": trained_on(),
        "copied": copied,
        "changed": changed(data, Numbered(samples, seed)),
    }


def parameters_of(network):
    """All parameters, as one vector."""
    return parameters_to_vector(network.parameters()).detach().clone()


@question(
    "Print accelerator.num_processes in the function, run the check, and read what it says under `printed`. How "
    "many should there be? The reason is number 1 under `Break it` in the lesson.",
    "The other two bugs appear only with several processes. Follow the network, the loader and the optimizer: does "
    "each go through prepare, and does the loop use what prepare returns?",
    "accelerator = Accelerator(cpu=True); model, optimizer, loader = accelerator.prepare(network, optimizer, "
    "loader); and in the loop model(inputs): network(inputs) bypasses the averaging of gradients.",
)
def check_together(answer, draw):
    """The accelerator must count all processes; they must divide the samples and end
    with the parameters of one process.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(3, 5), draw.randrange(10**6)
        samples = n * batch_size * draw.randint(4, 6)
        seen = answer.on_ranks(copies, samples, batch_size, seed, nproc=n)
        checked = f"together with {samples} samples, batch_size={batch_size}, on {n} processes"
        on_every_rank(partial(one_of_all, checked), seen)
        hold(shares(checked, [of_rank["trained"] for of_rank in seen], samples, batch_size))
        on_every_rank(partial(like_one_process, checked, Numbered(samples, seed), seed), seen)


# ---- what is claimed ----


def one_of_all(checked, rank, of_ranks):
    n, seen = len(of_ranks), of_ranks[rank]
    yield Claim(f"the accelerator's num_processes in {checked}", seen["counted"], n, "Accelerator() looks for GPUs: "
                "without GPUs, each process runs as if it were alone, and trains its own copy, unless you pass "
                "cpu=True")  # fmt: skip
    yield Claim(f"what comes back from {checked}", seen["returned"], n, "return both, as in the "
                "given program: network, accelerator.num_processes", told=f"the network, and {n}",
                shown=seen["returned"])  # fmt: skip
    yield from inputs_unchanged(checked, seen["changed"])


def shares(checked, trained, samples, batch_size):
    """Claims that the processes divided the samples, batch by batch, in order. trained: for
    each process, the samples of each of its batches.
    """
    n, counts = len(trained), [sum(map(len, batches)) for batches in trained]
    yield Claim(f"the sizes of the batches in {checked}", sorted({len(batch) for batches in trained for batch in batches}),
                [batch_size], "batch_size is the batch size per process: the accelerator leaves it unchanged, and so should "
                "you", [([], "no samples went through the network that should be trained")])  # fmt: skip
    otherwise = "each sample must go through the network once in each epoch, on one process"
    if any(len(set(sum(batches, []))) == samples for batches in trained):
        otherwise = (
            "every process goes through all samples: prepare the loader, too, and loop over what prepare returns"
        )
    elif min(counts) < samples // n:
        otherwise = (
            "samples are left out: if a sampler divides them, and then prepare does, too, each process has a share of a "
            "share"
        )
    yield Claim(f"how many samples each process is trained on, in {checked}", counts, [samples // n] * n, otherwise)
    for update, of_ranks in enumerate(zip(*trained)):
        together, begin = sorted(sum(of_ranks, [])), update * n * batch_size
        otherwise = (
            "the samples come in a different order: without a shuffle, and distributed batch by batch, each update must "
            "use the next samples of the data"
        )
        if len(set(together)) < len(together):
            otherwise = "several processes are trained on the same samples: each sample must go to one process"
        yield Claim(f"the samples of update {update + 1}, of all processes together, in {checked}", together,
                    list(range(begin, begin + n * batch_size)), otherwise,
                    told=f"samples {begin} to {begin + n * batch_size - 1}",
                    shown=", ".join(f"{numbers} on rank {rank}" for rank, numbers in enumerate(of_ranks)))  # fmt: skip


def like_one_process(checked, data, seed, rank, of_ranks):
    end = of_ranks[rank]["end"]
    alone = of_ranks[rank]["trained"]
    joined = [sum(parts, []) for parts in zip(*(of_rank["trained"] for of_rank in of_ranks))]
    mistakes = [
        (descended(data, seed, alone), "the processes start from the same parameters, but do not average gradients: call "
         "the model that prepare returns, not the network inside it"),
        (descended(data, seed + rank, alone), "each process trains its own network from the beginning: prepare the network, "
         "too, and call what prepare returns"),
    ]  # fmt: skip
    otherwise = "do you use plain SGD with the given learning rate, on the mean cross entropy of the batch?"
    if any(of_rank["copied"] for of_rank in of_ranks):
        mistakes, otherwise = (), (
            "another network was trained, such as a copy, and not the one that comes back: return the one that the "
            "optimizer changes"
        )  # fmt: skip
    elif not all(agree(of_rank["end"], end, DIGITS) for of_rank in of_ranks):
        otherwise = "the processes end with different networks: does each of them take every step?"
    elif agree(end, descended(data, seed, []), DIGITS):
        otherwise = "the network has not changed: does the optimizer step, and does it have these parameters?"
    yield Claim(f"the parameters after {checked}, compared with one process on the joined batches", end,
                descended(data, seed, joined), otherwise, mistakes, DIGITS)  # fmt: skip


def descended(data, seed, batches):
    """The parameters of one process after SGD on these batches, lists of samples."""
    network = RecordingNetwork(seed)
    for numbers in batches:
        F.cross_entropy(network.layers(data.inputs[numbers, 1:]), data.labels[numbers]).backward()
        descend(network, LEARNING_RATE)
    return parameters_of(network)
