"""Question 5: pretrain a small GPT within a budget of windows; what it has learnt is judged."""

import sysconfig
from functools import cache, partial
from pathlib import Path

import torch

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex10.pretraining_claims import CONTEXT, LIMIT, OURS, WIDTH, data_claims, learnt, weight_claims
from ddp_course.judge.question import question
from ddp_course.models.gpt import GPT
from ddp_course.ranks.environment import process_group

# ---- what a rank does ----


def observe(pretrain, case, text):
    """The network after pretraining, and the rows that went through it with gradients.

    text: uint8 (length,). A row comes back as the text of its bytes, in hexadecimal. With
    each batch come the embedding of a space and the first row of targets, if it has any.
    """
    with process_group() as (rank, _):
        network, tokens = network_of(case, rank), text.long()
        own, batches, copied, spaces, targets = network.token_embedding, [], [], [], []

        def note(table, given, _):
            if torch.is_grad_enabled():
                rows = given[0].reshape(-1, given[0].shape[-1]).tolist()
                batches.append([bytes(row).hex() for row in rows])
                copied.append(table is not own)
                spaces.append(table.weight[ord(" ")].detach().clone())

        def note_targets(_, given):
            if torch.is_grad_enabled():
                first = given[1][:1].flatten() if len(given) > 1 and given[1] is not None else []
                targets.append([int(token) for token in first])

        own.register_forward_hook(note)  # a copy of the network has the same hooks
        network.head.register_forward_pre_hook(note_targets)
        pretrain(network, tokens, case["windows"])
        return {
            "weights": dict(network.state_dict()), "gradients": torch.is_grad_enabled(), "batches": batches,
            "spaces": spaces, "targets": targets,
            "tied": network.head.weight is network.token_embedding.weight, "copied": bool(copied) and all(copied),
            "frozen": [name for name, value in network.named_parameters() if not value.requires_grad],
            "kept": torch.equal(tokens, text.long()),
        }  # fmt: skip


def network_of(case, rank):
    """The network as this rank gets it: each rank has drawn its own weights."""
    with torch.random.fork_rng():
        torch.manual_seed(case["seed"] + rank)
        return GPT(vocabulary=256, context=CONTEXT, layers=1, heads=4, width=WIDTH)


# ---- what is drawn ----

MODULES = "argparse configparser difflib inspect statistics subprocess tarfile typing".split()
PIECE, EVERY = 512, 24  # one of so many pieces of the text is held out


@cache
def pieces():
    """Sources of Python's standard library in pieces, uint8 (number, PIECE)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in MODULES)
    whole = len(text) // PIECE * PIECE
    return torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, PIECE)


def divided(first):
    """(the text to train on, one vector; the held-out pieces)."""
    held_out = torch.arange(len(pieces())) % EVERY == first
    return pieces()[~held_out].flatten(), pieces()[held_out]


@question(
    "Begin with the division: shuffle the numbers of all windows with the same seed on all ranks, take the first "
    "`windows` of them, and then each rank's part. Only then write the loop, with one batch per update.",
    "DistributedDataParallel(network) sends rank 0's weights to all ranks when it is created, and averages gradients in "
    "backward, if you call it, and not `network`. The budget counts windows, not updates: with 4 windows per rank and "
    "update there are 750 updates, with 64 only 47. AdamW with a rate of 0.001 to 0.005 does well.",
    "places = torch.randperm((len(tokens) - 1) // network.context, generator=torch.Generator().manual_seed(0)); mine = "
    "places[rank:windows:ranks] * network.context. For each batch of 8: rows = tokens[batch[:, None] + "
    "torch.arange(network.context + 1)]; loss = model(rows[:, :-1], rows[:, 1:]); then loss.backward(), optimizer.step(), "
    "optimizer.zero_grad(), with AdamW(model.parameters(), lr=0.002) and a rate that falls to 0 in a straight line.",
)
def check_pretrain(answer, draw):
    """Within the budget, each rank trains on its own part, all end with the same weights, and
    these give a held-out text few bits per byte.
    """
    case = {"n": 2, "windows": 64 * draw.randrange(94, 97), "seed": draw.randrange(10**6)}
    text, held_out = divided(draw.randrange(EVERY))
    of_ranks = answer.on_ranks(observe, case, text, nproc=case["n"], timeout=30)
    starts = [dict(network_of(case, rank).state_dict()) for rank in range(case["n"])]
    on_every_rank(partial(data_claims, case, bytes(text.tolist())), of_ranks)
    on_every_rank(partial(weight_claims, starts), of_ranks)
    value, claims = learnt(case, of_ranks, held_out.long())
    hold(claims)
    values = {"your network": value, "our solution": OURS, "required": LIMIT}
    return "bars", {"values": values, "xlabel": "bits per byte of the held-out text", "title": "What it has learnt"}
