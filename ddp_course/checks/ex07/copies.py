"""Question 4: processes that each train a network of their own."""

import os

import torch.distributed as dist
from torch import nn

from ddp_course.checks.ex07.networks import (
    PRELOADED,
    RecordingNetwork,
    changed,
    ends,
    in_words,
    judge_ends,
    judge_inputs,
    judge_samples,
    never_trained,
    trained_on,
)
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import state, unwrapped
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import start_server

LEARNING_RATE = 0.1


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
            returned, end = number, state(unwrapped(network))
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
        judge_copies(seen, samples, batch_size, seed)


def judge_copies(seen, samples, batch_size, seed):
    n, data = len(seen), Numbered(samples, seed)
    checked = f"together with {samples} samples, batch_size={batch_size}, on {n} processes"
    for rank, of_rank in enumerate(seen):
        where = f"{rank} of {n}"
        if of_rank["counted"] != n:
            cause = "Accelerator() looks for GPUs: without GPUs, each process runs as if it were alone, "
            cause += "and trains its own copy, unless you pass cpu=True"
            raise Wrong(f"the accelerator's num_processes in {checked}", rank=where, expected=n,
                        got=of_rank["counted"], cause=cause)  # fmt: skip
        if of_rank["end"] is None or of_rank["returned"] != n:
            cause = "return both, as in the given program: network, accelerator.num_processes"
            raise Wrong(f"what comes back from {checked}", rank=where, expected=f"the network, and {n}",
                        got=of_rank["returned"], cause=cause)  # fmt: skip
        judge_inputs(checked, of_rank["changed"], where)
    trained = [of_rank["trained"] for of_rank in seen]
    judge_samples(checked, trained, samples, batch_size)

    def those_that(seeds=(seed,) * n, **mistakes):
        return ends([RecordingNetwork(one) for one in seeds], data, trained, LEARNING_RATE, **mistakes)

    looks = [
        ([{"averaged": False}], "the processes start from the same parameters, but do not average gradients: call "
         "the model that prepare returns, not the network inside it"),
        ([{"averaged": False, "seeds": range(seed, seed + n)}], "each process trains its own network from the "
         "beginning: prepare the network, too, and call what prepare returns"),
    ]  # fmt: skip
    judge_ends(
        checked,
        [of_rank["end"] for of_rank in seen],
        state(RecordingNetwork(seed)),
        those_that,
        looks,
        copied=any(of_rank["copied"] for of_rank in seen),
    )
