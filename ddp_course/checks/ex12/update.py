"""An update of several micro-batches with FSDP, against real ranks."""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, agree, hold, is_number
from ddp_course.checks.ex12.counted import least_in_use
from ddp_course.checks.functions import results_of
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline, sent_in_a_ring


class Update(NamedTuple):
    """What the function gets. blocks, rest: numbers of parameters."""

    blocks: list
    rest: int
    ranks: int
    micro_batches: int
    sync_each: bool

    def in_words(self):
        return "update_bytes({}, {}, {}, {}, {})".format(*self)


# ---- the same update on ranks ----


class Network(nn.Module):
    """Blocks of two layers, and a layer before and after them."""

    def __init__(self, width, widths):
        super().__init__()
        self.first, self.last = linear(width, width), linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(width, hidden), nn.Tanh(), linear(hidden, width)) for hidden in widths
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def measure(width, widths, micro_batches, sync_each, expected):
    """Train with FSDP; return what this rank keeps after the first backward of an
    update, and what it sends in all of it.

    expected: the bytes that it should keep, for which it waits a moment.
    """
    with process_group(timeout=30) as (_, n):
        x, mesh = torch.ones(2, width), init_device_mesh("cpu", (n,))
        with memory_timeline() as timeline:
            network = Network(width, widths)
            for part in (*network.blocks, network):
                fully_shard(part, mesh=mesh)
            optimizer = torch.optim.AdamW(network.parameters())

            def update(micro_batches):
                """One update; return what is kept after each backward."""
                optimizer.zero_grad()
                kept = []
                for number in range(micro_batches):
                    last = number == micro_batches - 1
                    network.set_requires_gradient_sync(sync_each or last)
                    network(x).sum().backward()
                    kept.append(least_in_use(timeline, expected))
                optimizer.step()
                return kept

            update(1)  # makes Adam's averages
            with CheckedWatch() as watched:
                kept = update(micro_batches)[0]
        shared = {}
        for entry in watched.log:
            shared[entry["name"]] = shared.get(entry["name"], 0) + entry["whole"]
        return [kept, sent_in_a_ring(shared, n)]


# ---- the formula ----


def true_bytes(case, state=8, whole=None, gathers=2, of_rest=1, gathering=None, scatters=None, share=None):
    """(bytes kept after the first backward, bytes sent). The other arguments are for
    wrong ones.

    state: Adam's bytes per parameter. whole: whether gradients are whole between two
    micro-batches; gathers, of_rest: how often a micro-batch gathers the blocks and the
    rest; gathering: in how many micro-batches; scatters: how often the gradients are reduced; share: of the bytes, what a
    rank sends.
    """
    n, blocks, rest = case.ranks, sum(case.blocks), case.rest
    whole = not case.sync_each if whole is None else whole
    if scatters is None:
        scatters = case.micro_batches if case.sync_each else 1
    share = (n - 1) / n if share is None else share
    parameters = blocks + rest
    kept = (4 + state) * parameters / n + 4 * parameters / (1 if whole else n)
    gathered = (gathering or case.micro_batches) * (gathers * blocks + of_rest * rest)
    return kept, 4 * share * (gathered + scatters * parameters)


@question(
    "Draw one micro-batch as a line: which collective runs when, for a block and for the rest? Then ask which of them "
    "runs in every micro-batch and which only in the last. For the memory, ask of weights, gradients and Adam's "
    "averages: whole or a shard?",
    "Each micro-batch gathers a block twice, in forward and in backward, and the rest once, because it stays gathered "
    "in between. Gradients are reduce-scattered in each micro-batch that syncs. Until then they are whole: 4 bytes per "
    "parameter on each rank. In a ring, each rank sends (ranks - 1) / ranks of what is gathered or scattered.",
    "total = sum(blocks) + rest; kept = 12 * total / ranks + 4 * total / (ranks if sync_each else 1); gathered = "
    "micro_batches * (2 * sum(blocks) + rest); scattered = total * (micro_batches if sync_each else 1); sent = 4 * "
    "(gathered + scattered) * (ranks - 1) / ranks.",
)
def check_update_bytes(answer, draw):
    """What is kept and sent, as fully_shard does it on real ranks and as the formula
    has it for many.
    """
    small = [a_small_case(draw, 3, False), a_small_case(draw, 2, True)]
    cases = [updated for updated, _ in small]
    cases += [a_case(draw, 64, False), a_case(draw, draw.choice([8, 16]), True)]
    called = 0, "update_bytes", [tuple(case) for case in cases], draw.randrange(10**6)
    [pairs] = answer.on_ranks(results_of, *called)
    hold(forms(cases, pairs))
    for place, (case, pair) in enumerate(zip(cases, pairs)):
        measured = place < len(small)  # what counts is what ranks have really kept and sent
        if measured:
            args, truth = small[place][1], torch.tensor(true_bytes(case))
            found = answer.without(measure, *args, truth[0].item(), nproc=case.ranks, timeout=40)[0]
            assert torch.allclose(torch.tensor(found), truth, 1e-3), found
        hold(claims(case, pair, list(zip(cases, pairs)), ", measured" if measured else ""))


def a_small_case(draw, ranks, sync_each):
    """(an Update, and what measure takes for it)."""
    width, widths = 12, draw.sample(range(6, 48, 6), 2)
    micro_batches = draw.choice([2, 3])
    blocks = [2 * width * hidden for hidden in widths]
    case = Update(blocks, 2 * width**2, ranks, micro_batches, sync_each)
    return case, (width, widths, micro_batches, sync_each)


def a_case(draw, ranks, sync_each):
    """A model that is too large to be measured here."""
    blocks = [ranks * draw.randrange(10**4, 10**6) for _ in range(draw.randrange(4, 9))]
    rest = ranks * draw.randrange(10**4, 10**6)
    return Update(blocks, rest, ranks, draw.randrange(2, 9), sync_each)


# ---- what is claimed ----


def forms(cases, pairs):
    for case, pair in zip(cases, pairs):
        two = isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        yield Claim(case.in_words(), two, True, "return two numbers: the bytes that are kept, and the bytes that are sent",
                    told="(kept, sent)", shown=pair)  # fmt: skip


def claims(case, pair, answers, how):
    """answers: those to all cases. how: in which way the truth was found, in words."""
    for place, (name, (otherwise, changes)) in enumerate(LOOKS.items()):
        truth = true_bytes(case)[place]
        explaining = [cause for cause, change in changes.items() if explains(change, place, answers)]
        yield Claim(f"{case.in_words()}: bytes {name}", pair[place], about(truth), (explaining or [otherwise])[0],
                    told=f"{truth:,.0f}{how}", shown=f"{pair[place]:,.0f}")  # fmt: skip


def explains(change, place, answers):
    """Whether a mistake gives what the answer gives, in all cases."""
    wrong = (true_bytes(case, **change(case))[place] for case, _ in answers)
    return all(agree(pair[place], about(number)) for number, (_, pair) in zip(wrong, answers))


def about(number):
    """These bytes, also if they were computed in fp32, or rounded."""
    allowed = max(1, 1e-6 * number)
    return Between(number - allowed, number + allowed)


LOOKS = {  # what may be wrong with each number: in general, and mistakes of true_bytes
    "kept": ("shards of weights and of Adam's averages, 4 + 8 bytes per parameter, and the gradients, 4: whole until they "
             "are reduced, and then shards", {
        "gradients that have not been reduced are whole on each rank, 4 bytes per parameter: only a "
        "reduce-scatter makes them shards": lambda case: {"whole": False},
        "with sync_each=True, each backward leaves shards of gradients, 4 / ranks bytes per parameter":
            lambda case: {"whole": True},
        "sync_each=True means that each micro-batch reduces its gradients to shards: is it taken for its opposite?":
            lambda case: {"whole": case.sync_each},
        "Adam keeps two averages, 8 bytes per parameter": lambda case: {"state": 4},
        "between two updates the averages exist already: 8 bytes per parameter, in shards":
            lambda case: {"state": 0},
    }),
    "sent": ("4 bytes per parameter and (ranks - 1) / ranks of them each time: blocks are gathered twice per micro-batch, "
             "the rest once, and all gradients are scattered when they sync", {
        "the rest, the outermost part, stays gathered from forward to backward: it is gathered once per micro-batch":
            lambda case: {"of_rest": 2},
        "each micro-batch gathers each block twice: it is freed after forward, and gathered again for backward":
            lambda case: {"gathers": 1},
        "without sync, gradients are reduce-scattered only in the last micro-batch":
            lambda case: {"scatters": case.micro_batches},
        "this is what a step of its own sends, once for each micro-batch: without sync, gradients are reduce-scattered "
        "only in the last, and the rest, the outermost part, is gathered once per micro-batch":
            lambda case: {"of_rest": 2, "scatters": case.micro_batches},
        "with sync_each=True, every micro-batch reduce-scatters the gradients": lambda case: {"scatters": 1},
        "a ring's all-gather sends (ranks - 1) / ranks of the bytes, and so does its reduce-scatter":
            lambda case: {"share": 1},
        "this is what all ranks send together: each rank sends its part":
            lambda case: {"share": case.ranks - 1},
        "a reduce-scatter is half of an all-reduce: it sends (ranks - 1) / ranks of the gradients' bytes once":
            lambda case: {"scatters": 2 * (case.micro_batches if case.sync_each else 1)},
        "weights are freed after each micro-batch, so each gathers them anew; only the reduce-scatter can wait for the last "
        "one": lambda case: {"gathering": 1},
    }),
}  # fmt: skip
