"""How fast lesson 10 trains: against the plain recipe that most public programs share,
and against the hardware.

python benchmarks/gpt.py
"""

import math
from statistics import mean, median

import torch
from claims import claim, report, rounds_in_turn
from torch import nn
from torch.nn import functional as F

from ddp_course.models import recipe
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.ranks.launch import launch

CPU = torch.device("cpu")
PRODUCTS = 30


class PlainAttention(nn.Module):
    """Attention written out, step by step: scores, mask, softmax, mix."""

    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer(
            "mask",
            torch.tril(torch.ones(context, context)).view(1, 1, context, context),
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(key.size(-1))
        scores = scores.masked_fill(
            self.mask[:, :, :tokens, :tokens] == 0, float("-inf")
        )
        mixed = F.softmax(scores, dim=-1) @ value
        return self.c_proj(
            mixed.transpose(1, 2).contiguous().view(batch, tokens, width)
        )


class PlainGELU(nn.Module):
    """The formula, operation by operation, as in BERT's own code."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


class PlainBlock(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = PlainAttention(width, heads, context)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), PlainGELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    def __init__(self, vocabulary, context, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        self.h = nn.Sequential(
            *(PlainBlock(width, heads, context) for _ in range(layers))
        )
        self.ln_f, self.lm_head = (
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )
        self.lm_head.weight = self.wte.weight
        for value in self.parameters():
            if (
                value.dim() == 2
            ):  # without it, scores get so large that softmax computes with denormal numbers, slowly
                nn.init.normal_(value, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flops_of_a_step(network, tokens, layers, width):
    """6 per parameter per token, plus 12 x layers x width x context per token:
    Chowdhery et al., "PaLM", 2022.
    """
    used = sum(
        value.numel()
        for name, value in network.named_parameters()
        if "position" not in name
    )
    return tokens.numel() * (6 * used + 12 * layers * width * tokens.shape[1])


def measure(shape, batch, rounds=9):
    """The seconds of a training step, ours and plain, and of a matrix product, in turn;
    and their floating-point operations.
    """
    size = SHAPES[shape]
    torch.manual_seed(0)
    tokens = torch.randint(256, (batch, size["context"]))
    works, networks = {}, {"ours": GPT(**size), "plain": PlainGPT(256, **size)}
    for name, network in networks.items():
        groups = recipe.parameter_groups(network, 0.1)
        # so small a rate that the numbers stay as they are
        optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=name == "ours")

        def step(network=network, optimizer=optimizer):
            optimizer.zero_grad()
            recipe.loss_of(network, tokens, tokens, torch.float32, CPU).backward()
            optimizer.step()

        step()
        works[name] = step
    factors = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def products():
        """As many as take about as long as a step, so that a short disturbance of the
        machine affects both.
        """
        for _ in range(PRODUCTS):
            factors[0] @ factors[1]

    times = rounds_in_turn(rounds, **works, products=products)
    # within a round: the machine may be half as fast in the next one
    middle = {
        name: median(of_one["ours"] / of_one[name] for of_one in times)
        for name in times[0]
    }
    ours = median(of_one["ours"] for of_one in times)
    needed = flops_of_a_step(networks["ours"], tokens, size["layers"], size["width"])
    of_the_products = PRODUCTS * 2 * 1024**3
    return {
        "share": needed / of_the_products / middle["products"], "times as fast": 1 / middle["plain"],
        "tokens/s": tokens.numel() / ours, "GFLOP/s": needed / ours / 1e9,
        "peak GFLOP/s": of_the_products / median(of_one["products"] for of_one in times) / 1e9,
    }  # fmt: skip


def on_each_core(shape, batch):
    """What a rank measures, in the mean over two of them, each with a core of its own,
    as the lesson's have.
    """
    ranks = launch(measure, shape, batch, nproc=2, timeout=200)
    return {figure: mean(rank[figure] for rank in ranks) for figure in ranks[0]}


def main():
    small, medium = on_each_core("small", 64), on_each_core("medium", 16)
    report(
        [
            claim(
                "a GPT of 4 x 128, tokens/s, times the plain recipe's",
                small["times as fast"],
                at_least=1.1,
            ),
            # 0.55 and 0.70 in most runs; with batches of 16 and 8, some hundredths less
            claim(
                "a GPT of 4 x 128, share of the matrix products' FLOP/s",
                small["share"],
                at_least=0.4,
            ),
            claim(
                "a GPT of 6 x 256, share of the matrix products' FLOP/s",
                medium["share"],
                at_least=0.62,
            ),
        ],
        small=small,
        medium=medium,
    )


if __name__ == "__main__":
    main()
