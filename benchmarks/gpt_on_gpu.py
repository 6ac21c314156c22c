"""Lesson 10 at 124 million parameters on one GPU, beside a loop like nanoGPT's and
transformers' GPT-2; an epoch of MNIST from each way to feed lesson 1's loop; and what
--deterministic brings and costs.

python benchmarks/gpt_on_gpu.py
python benchmarks/gpt_on_gpu.py --windows 16 --shape medium

The rows are for comparing with each other: 32 windows of 1,024 tokens per step, bf16
autocast, fused AdamW, clipping. On an H100 with torch 2.11, "ours, compiled" reached 0.92
of the speed of the loop like nanoGPT's, which has no DDP, and an MFU of 0.37.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from claims import claim, report
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course import lesson01, lesson04, lesson10
from ddp_course.data.images import OneByOne, load_images
from ddp_course.models import recipe
from ddp_course.models.convnets import ConvNet
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.ranks.environment import process_group

# FLOP/s of dense bf16 products, by NVIDIA's data sheets; MFU is a share of them
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12}
RATE = 6e-4
VOCABULARY = 50257  # GPT-2's
ROUNDS, STEPS = 3, 8


# ---- ways to train a GPT: each returns a step, a function without arguments ----


def batch(args, device):
    shape = args.windows, SHAPES[args.shape]["context"] + 1
    tokens = torch.randint(VOCABULARY, shape, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(args, device, compile=None, chunked=False, on="cpu"):
    """lesson10.update as the program calls it.

    compile: None, "model" (the program's: after wrapping) or "network" (before). on:
    where the batch is; the program's comes from the CPU.
    """
    network = GPT(VOCABULARY, **SHAPES[args.shape]).to(device)
    network.head.chunked = chunked
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(
        network, device_ids=gpu, gradient_as_bucket_view=True
    )
    groups = recipe.parameter_groups(network, 0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    if compile:
        (model if compile == "model" else network).compile()
    settings = SimpleNamespace(precision="bf16", max_norm=1.0)
    micro_batches = [batch(args, on)]
    return lambda: lesson10.update(
        model, micro_batches, optimizer, RATE, settings, device
    )


def like_nanogpt(args, device):
    """What nanoGPT's train.py does: no DDP on one GPU, a padded vocabulary of 50,304, and
    a function that is compiled with its loss.
    """
    network = GPT(50304, **SHAPES[args.shape]).to(device)
    groups = recipe.parameter_groups(network, 0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    tokens, targets = batch(args, device)

    @torch.compile
    def loss_of(tokens, targets):
        logits = network(tokens).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())

    return plain_step(network, optimizer, loss_of, tokens, targets)


def of_transformers(args, device, compile=False):
    """transformers' GPT2LMHeadModel, of the same shape, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = SHAPES[args.shape]
    config = GPT2Config(
        n_positions=shape["context"], n_layer=shape["layers"], n_head=shape["heads"],
        n_embd=shape["width"], resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    network = GPT2LMHeadModel(config).to(device)
    if compile:
        network.compile()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tokens, _ = batch(args, device)
    loss_of = lambda tokens, labels: network(tokens, labels=labels).loss
    return plain_step(network, optimizer, loss_of, tokens, tokens)


def plain_step(network, optimizer, loss_of, *inputs):
    def step():
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            loss = loss_of(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ways(args, device):
    """{row: a function that makes its step}"""
    here = args, device
    rows = {
        "ours, eager": partial(ours, *here),
        "ours, compiled": partial(ours, *here, "model"),
        "ours, the network compiled before wrapping": partial(ours, *here, "network"),
        "ours, compiled, batch on the GPU": partial(ours, *here, "model", on=device),
        "like nanoGPT": partial(like_nanogpt, *here),
        "transformers' GPT-2, eager": partial(of_transformers, *here),
        "transformers' GPT-2, compiled": partial(of_transformers, *here, compile=True),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # torch 2.15
        chunked = {"ours, eager, --chunked-loss": None}
        chunked |= {"ours, compiled, --chunked-loss": "model"}
        for row, compile in chunked.items():
            rows[row] = partial(ours, *here, compile, chunked=True)
    return rows


# ---- measuring ----


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_seconds(step, device, steps=STEPS):
    """The median of ROUNDS rounds of some steps, in seconds per step, after three steps."""
    for _ in range(3):
        step()
    rounds = []
    for _ in range(ROUNDS):
        wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        rounds.append((time.perf_counter() - begin) / steps)
    return statistics.median(rounds)


def flops_of_products(device, size):
    """The FLOP/s of a product of two square matrices in bf16."""
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    return 2 * size**3 / median_seconds(lambda: left @ right, device)


def measure(make, args, device, peak, products):
    """One row: speed, MFU, memory, and what the first step took."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    step = make()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    wait(device)
    first = time.perf_counter() - begin
    seconds = median_seconds(step, device)
    with torch.device("meta"):
        per_token = GPT(VOCABULARY, **SHAPES[args.shape]).flops_per_token()
    tokens = args.windows * SHAPES[args.shape]["context"]
    speed = tokens / seconds
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {
        "tokens_per_second": round(speed),
        "mfu": peak and round(speed * per_token / peak, 3),
        "share_of_matrix_products": round(speed * per_token / products, 3),
        "peak_gib": memory and round(memory, 1),
        "ms": round(1e3 * seconds, 1),
        "first_step_seconds": round(first, 1),
    }


def epochs_of_mnist(device, samples):
    """The seconds of an epoch of lesson 1's loop, by the way in which images come."""
    on_cpu = load_images("auto", samples)[0]
    slow = OneByOne(on_cpu)
    pinned = {"pin_memory": device.type == "cuda"}
    workers = pinned | {"num_workers": 4, "persistent_workers": True}
    loaders = {
        "one by one": (slow, pinned),
        "one by one, 4 workers": (slow, workers),
        "whole batches": (on_cpu, {}),
        "whole batches, on the device": (on_cpu.to(device), {}),
    }
    return {
        f"{name}, batches of {size}": seconds_per_epoch(
            DataLoader(images, size, shuffle=True, **options), device
        )
        for size in (64, 512)
        for name, (images, options) in loaders.items()
    }


def seconds_per_epoch(loader, device):
    """Of the second epoch: the first one also starts the workers."""
    model = ConvNet(dropout=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        wait(device)
        begin = time.perf_counter()
        lesson01.train_one_epoch(model, loader, optimizer, device)
        wait(device)
    return round(time.perf_counter() - begin, 2)


def bits_of_lesson_4(device):
    """Two runs of lesson 4 with --deterministic, and two without: how many different
    ends they have, and the seconds of training.
    """
    rows = {}
    for flag in ([], ["--deterministic"]):
        command = [sys.executable, lesson04.__file__, *flag, "--device", device.type]
        ends, seconds = set(), []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(
                    [*command, "--out", folder], check=True, stdout=subprocess.DEVNULL
                )
                result = json.loads(Path(folder, "result.json").read_text())
            ends.add(result["params_sha256"])
            seconds.append(result["seconds"])
        rows[" ".join(flag) or "without"] = {"ends": len(ends), "seconds": seconds}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=32, help="per step (32)")
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--samples", type=int, default=60_000, help="of MNIST (60000)")
    parser.add_argument("--cpu", action="store_true", help="only to see that it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.cpu:
        report([], needs="a GPU")
    device = torch.device("cpu") if args.cpu else torch.device("cuda", 0)
    name = "CPU" if args.cpu else torch.cuda.get_device_name(device)
    peak = next((peak for kind, peak in PEAKS.items() if kind in name), None)
    products = flops_of_products(device, 512 if args.cpu else 8192)
    with process_group("gloo" if args.cpu else "nccl"):
        rows = {
            row: measure(make, args, device, peak, products)
            for row, make in ways(args, device).items()
        }
    speed = {row: figures["tokens_per_second"] for row, figures in rows.items()}
    claims = [
        claim(
            "lesson 10, compiled, tokens/s, times a loop like nanoGPT's",
            speed["ours, compiled"] / speed["like nanoGPT"],
            at_least=0.9,
        )
    ]
    bits = bits_of_lesson_4(device)
    ends = bits["--deterministic"]["ends"]
    claims.append(claim("ends of two runs with --deterministic", ends, at_most=1))
    if peak == 989e12:
        mfu = rows["ours, compiled"]["mfu"]
        claims.append(claim("its MFU on an H100 or H200", mfu, at_least=0.35))
    report(
        [] if args.cpu else claims,  # they are about GPUs
        device=name,
        torch=torch.__version__,
        tflops_of_products=round(products / 1e12, 1),
        rows=rows,
        bits_of_lesson_4=bits,
        seconds_per_epoch_of_mnist=epochs_of_mnist(device, args.samples),
    )


if __name__ == "__main__":
    main()
