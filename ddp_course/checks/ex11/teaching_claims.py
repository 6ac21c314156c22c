"""What question 5 claims of an adapter, and of the rank that has trained it."""

import torch
from torch import nn

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex11.facts import ASKED, END, a_model

# Shares of right answers: at most before; needed; ours, a mean over 10 draws. The smaller share of the two words,
# at worst of 10 draws: 0.5 with AdamW at 2e-3 and 0.78 at 2e-2, 0.38 with the MLPs alone at 1e-2; and at best 0.19
# with the texts of one rank. A barely trained adapter has up to 0.28 in its better word.
KNOWN, LEAST, OURS = 0.25, 0.35, 0.87
CALL = "teach on 2 ranks, with 64 texts on each"


def claims(given, rank, of_ranks):
    mine = of_ranks[rank]
    layers = {name: layer for name, layer in a_model(given["weights"]).named_modules() if isinstance(layer, nn.Linear)}
    problem = why_no_adapter(mine["adapter"], layers)
    yield Claim(f"{CALL}: what it returns", problem, None, problem,
                told="{name of a linear layer: (B, A)}", shown="something else")  # fmt: skip
    numbers = sum(value.numel() for pair in mine["adapter"].values() for value in pair)
    yield Claim(f"{CALL}: numbers in the adapter", numbers, Between(0, given["most"]),
                "the adapter is too large: choose a smaller r, or fewer layers", told=f"at most {given['most']:,}",
                shown=f"{numbers:,}")  # fmt: skip
    yield unchanged(given, mine)
    yield Claim(f"{CALL}: the model's logits afterwards", mine["same logits"], True, "its weights are as they were, but it "
                "computes something else: take hooks and replaced functions off again", told="as before",
                shown="others")  # fmt: skip
    most = given["passes"] * len(given["trained"][rank])
    yield Claim(f"{CALL}: texts that went through the model with gradients", mine["read"], Between(0, most),
                f"the budget is {given['passes']} passes over this rank's own texts: a batch counts as many texts as it has",
                told=f"at most {most:,}", shown=f"{mine['read']:,}")  # fmt: skip
    yield Claim(f"{CALL}: is the adapter that of rank 0?", same(mine["adapter"], of_ranks[0]["adapter"]), True,
                "the ranks have different adapters: let all ranks start with the same A (hash() of a text differs between "
                "processes), average the gradients over the ranks, and take the same steps",
                told="the same on all ranks", shown="other numbers")  # fmt: skip
    yield from answered(given, mine)


def why_no_adapter(adapter, layers):
    """What is wrong with what was returned, or None."""
    if not isinstance(adapter, dict):
        return "return a dict with the adapters: the name of a linear layer, and its pair (B, A)"
    if unknown := [name for name in adapter if name not in layers]:
        return f"the model has no linear layer {unknown[0]!r}: the names are those of model.named_modules()"
    for name, pair in adapter.items():
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, torch.Tensor) for value in pair)):
            return f"the adapter of {name} must be a pair of tensors, (B, A)"
        B, A = pair
        outputs, inputs = layers[name].weight.shape
        if B.dim() != 2 or A.dim() != 2 or (len(B), *A.shape) != (outputs, B.shape[1], inputs):
            return f"the adapter of {name} does not fit: B is (outputs, r), here {outputs} rows; A is (r, inputs)"
        if not (B.isfinite().all() and A.isfinite().all()):
            return f"the adapter of {name} is not finite: training has diverged, so lower the learning rate"
    return None


def unchanged(given, mine):
    """The claim that the model has the weights of the base, under their names."""
    got, weights = mine["state"], given["weights"]
    cause = (
        "the base was trained, too: only A and B may change, so leave the model's own parameters out of the optimizer"
    )
    if got.keys() != weights.keys():
        cause = "the model still has other layers in it: take the adapters out again, or train a copy of the model"
    elif merged(given, mine):
        cause = "the adapters are merged into the weights of the model: it must come back as it was"
    is_same = got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in weights)
    return Claim(f"{CALL}: the model afterwards", is_same, True, cause,
                 told="all weights as they were, bit for bit", shown="other weights")  # fmt: skip


def merged(given, mine):
    adapted = state_with(given["weights"], mine["adapter"])
    changed = [name for name, value in given["weights"].items() if not torch.equal(value, mine["state"][name])]
    return bool(changed) and all(torch.allclose(mine["state"][name], adapted[name], atol=1e-4) for name in changed)


def same(some, others):
    """Whether two adapters add the same to the same layers, to four digits."""
    if some.keys() != others.keys():
        return False
    changes = [[(B.double() @ A.double()) for B, A in (some[name], others[name])] for name in some]
    return all((one - other).abs().max() <= 1e-4 * other.abs().max() for one, other in changes)


def state_with(weights, adapter, scale=1.0):
    """The weights with an adapter merged."""
    return weights | {
        f"{name}.weight": weights[f"{name}.weight"] + scale * B.float() @ A.float() for name, (B, A) in adapter.items()
    }


# ---- the answers ----


def answered(given, mine):
    """Claims for each new word: enough questions of other towns are answered right."""
    got = shares(given["weights"], mine["adapter"], given["held out"])
    for rank in sorted(range(len(got)), key=lambda rank: -got[rank]):
        yield Claim(
            f"{CALL}: answers to questions like those of rank {rank}, about towns that were not trained",
            got[rank], Between(LEAST, 1), lambda rank=rank: why_wrong(given, mine["adapter"], got, rank),
            told=f"at least {LEAST:.0%} right", shown=f"{got[rank]:.0%} right",
        )  # fmt: skip


def why_wrong(given, adapter, got, rank):
    if all(not (B.double() @ A.double()).any() for B, A in adapter.values()):
        return "the adapter changes nothing, B A is zero: was a step taken, and were the trained tensors returned?"
    for scale in (0.25, 0.5, 2, 4, 8, 16):
        scaled = state_with(given["weights"], adapter, scale)
        if all(min(shares_of(scaled, given[of])) >= least for of, least in (("held out", LEAST), ("trained", 0.95))):
            return (
                f"with B A times {scale}, the model answers: weight + B @ A is computed, so the scale must be in B or A"
            )
    if got[1 - rank] >= LEAST:
        return (
            f"the model answers questions like those of rank {1 - rank}, and not like those of rank {rank}: average the "
            "gradients of both ranks in each step, since each rank has another new word"
        )
    if min(shares(given["weights"], adapter, given["held out"], end=False)) >= LEAST:
        return "the digits are right, but the answer does not end there: the end token is a target, too"
    if min(shares(given["weights"], adapter, given["trained"])) < 0.9:
        return (
            "the questions that were trained are not answered either: train longer, up to the budget, with another learning "
            "rate. Are the targets the answer's tokens, each predicted from the place before it?"
        )
    if not any("attention" in name for name in adapter):
        return (
            "the trained questions are answered, but few others. The adapter has no layer of the attention, where a new "
            "word meets the towns: adapt those layers, too"
        )
    return (
        "only the trained questions are answered: the adapter has learnt them by heart. Train with a smaller r or rate"
    )


def shares(weights, adapter, of_ranks, end=True):
    """The share of right answers to each rank's questions. end: with the end token."""
    return shares_of(state_with(weights, adapter), of_ranks, end)


@torch.no_grad()
def shares_of(weights, of_ranks, end=True):
    model, found = a_model(weights), []
    for texts in of_ranks:
        written = texts[:, :ASKED]
        while written.shape[1] < texts.shape[1]:
            written = torch.cat([written, model(written)[:, -1].argmax(1, keepdim=True)], dim=1)
        right = (written == texts) | ((texts == END) & (not end))
        found.append(right.all(dim=1).double().mean().item())
    return found
