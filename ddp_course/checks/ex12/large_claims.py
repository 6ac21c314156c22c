"""What question 5 claims of the file that comes out, and of the bytes in use meanwhile."""

from functools import partial

import torch

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex12.large_network import RATE, by_one_process, clipped, mean

LIMIT = 2  # times the bytes of the model; our solution has 1.7 in use, and DDP 4
DIGITS = 7

# ---- the file ----


def file_claims(found, expected):
    """The file is one, and has all values under the plain names, as one process loads it."""
    files, kinds = found["files"], found.get("kinds", {})
    yield Claim("rank 0's files", "model.pt" in files[0], True, "nothing was saved: rank 0 writes the file at `path`",
                told="model.pt", shown=", ".join(files[0]) or "none")  # fmt: skip
    others = [name for of_rank in files[1:] for name in of_rank]
    yield Claim("the files of the other ranks", others, [], "only rank 0 writes a file: each rank's path is on a machine of "
                "its own", told="none", shown=", ".join(others))  # fmt: skip
    yield Claim("rank 0's files", files[0], ["model.pt"], "one file is asked for: leave nothing else beside it",
                told="model.pt", shown=", ".join(files[0]))  # fmt: skip
    yield Claim("torch.load(path, weights_only=True) in one process", found["error"], None, why_not_loaded(found["error"]),
                told="loads", shown=found["error"])  # fmt: skip
    sharded = [name for name, kind in kinds.items() if kind == "DTensor"]
    yield Claim("DTensors in the file", sharded, [], SHARDS, told="none", shown=", ".join(sharded[:2]))
    yield Claim("the names in the file", sorted(kinds), sorted(expected), why_other_names(set(kinds), set(expected)),
                told=a_few(expected), shown=a_few(kinds))  # fmt: skip
    for name, value in expected.items():
        got = found["content"][name]
        is_one = isinstance(got, torch.Tensor)
        yield Claim(f"{name} in the file", is_one, True, "a state dict has tensors", told="a tensor", shown=kinds[name])
        yield Claim(f"the shape of {name} in the file", list(got.shape), list(value.shape), "this is the shard of one rank: "
                    "gather the whole value, on all ranks, before rank 0 saves it")  # fmt: skip
        yield Claim(f"the dtype of {name} in the file", str(got.dtype), str(value.dtype), "keep the dtype of the model")


SHARDS = (
    "a DTensor needs the ranks that it is sharded over, and has the numbers of one of them: gather whole values "
    "(full_state_dict=True, or full_tensor() on all ranks), and save plain tensors"
)


def why_not_loaded(error):
    if error and ("DTensor" in error or "DeviceMesh" in error):
        return SHARDS
    return "the file must be one that torch.save has written, of a dict of tensors: a state_dict, not a module"


def why_other_names(got, expected):
    missing, more = expected - got, got - expected
    if missing == {"scale"} and not more:
        return "the buffer is missing: a state_dict has buffers as well, and parameters alone are not the model"
    if not more:
        return "some values are missing: the file has the whole model"
    for wrapped in sorted(more):
        if any(wrapped.endswith(name) or wrapped.replace(f"{part}.", "") == name
               for name in missing for part in ("module", "_orig_mod", "_fsdp_wrapped_module")):  # fmt: skip
            return "the names are those of a wrapper: save the model's own names, which a plain model can load"
    if {"model", "state", "state_dict"} & more and not got & expected:
        return "save the model's state_dict itself, not a dict that contains it"
    return "the names must be those of the state_dict of the plain model"


def a_few(names):
    names = sorted(names)
    return ", ".join([*names[:3], "..."][: len(names)]) + f" ({len(names)})"


# ---- the values ----


def weight_claims(case, content, expected, start):
    """The values are those of one process that has trained on all ranks' batches."""
    yield Claim("scale, the buffer, in the file", content["scale"], start["scale"], "to_empty() gives a buffer memory, and "
                "no values: fill it with initial('scale'), as the parameters", digits=DIGITS)  # fmt: skip
    names = [name for name in expected if name != "scale"]

    def joined(state):
        return torch.cat([state[name].flatten() for name in names])

    got = joined(content)
    finite = bool(got.isfinite().all())
    yield Claim("the weights in the file", finite, True, "some numbers are not finite: were all shards filled with initial "
                "values after to_empty()?", told="finite", shown="NaN or infinite")  # fmt: skip
    yield Claim(f"the weights in the file, after {len(case['sizes'])} updates", got, joined(expected),
                lambda: otherwise(got, joined(expected), joined(start)), lambda: mistakes(case, joined, start),
                digits=DIGITS, mistake_digits=DIGITS)  # fmt: skip


def mistakes(case, joined, start):
    n, made = case["n"], lambda *args, **options: joined(by_one_process(case, *args, **options))
    nothing = (
        "the weights are the initial ones, so nothing was trained: fully_shard replaces the parameters, so create the "
        "optimizer after it, and let it step"
    )
    yield joined(start), nothing
    limit = case["max_norm"]
    for cause, combined in COMBINED.items():
        yield made(partial(combined, limit=limit)), cause
    for rank in range(n):
        alone = f"these are the weights of rank {rank} alone: take the mean of the ranks' gradients in each update"
        yield made(lambda all_, rank=rank: clipped(all_[rank], limit)), alone
        divided = f"the gradients of rank {rank} are divided, and not summed over the ranks"
        yield made(lambda all_, rank=rank: clipped([one / n for one in all_[rank]], limit)), divided
    yield made(left_out=1), "the last batch is left out: each batch makes one update"
    yield made(weight_decay=0), "AdamW has a weight decay of 0.01, which is missing: it is torch's default for AdamW"
    yield made(lr=0.001), f"the learning rate is {RATE}, and 0.001 is the default"
    yield made(Sums(limit).clipped), "gradients are never cleared: each update needs those of its own batch alone"


def partly(of_ranks, limit):
    """The mean gradients, each row clipped by the norm of the shards of the rank that has it."""
    n = len(of_ranks)
    shards = [list(gradient.chunk(n)) for gradient in mean(of_ranks)]
    for rank in range(n):
        own = [place for place, parts in enumerate(shards) if rank < len(parts)]
        for place, part in zip(own, clipped([shards[place][rank] for place in own], limit)):
            shards[place][rank] = part
    return [torch.cat(parts) for parts in shards]


class Sums:
    """Gradients that are added up from update to update, and clipped where they are."""

    def __init__(self, limit):
        self.total, self.limit = None, limit

    def clipped(self, of_ranks):
        gradients = mean(of_ranks)
        if self.total:
            gradients = [old + new for old, new in zip(self.total, gradients)]
        self.total = clipped(gradients, self.limit)
        return self.total


COMBINED = {  # what a mistake makes of all ranks' gradients
    "gradients are summed over the ranks: divide by the number of ranks, before they are clipped":
        lambda all_, limit: clipped([len(all_) * one for one in mean(all_)], limit),
    "the norm of all gradients together is not clipped: it is at most max_norm": lambda all_, limit: mean(all_),
    "each rank has clipped its own gradients: first take the mean over the ranks, then clip it":
        lambda all_, limit: mean([clipped(own, limit) for own in all_]),
    "each rank has clipped by the norm of its own shards: the norm is that of the whole gradient, so add the squares of all "
    "shards over the ranks": partly,
    "the numbers of the gradients are clipped: it is the norm of all of them that has a limit":
        lambda all_, limit: [one.clamp(-limit, limit) for one in mean(all_)],
    "each parameter is clipped alone: the norm is that of all gradients together":
        lambda all_, limit: [clipped([one], limit)[0] for one in mean(all_)],
}  # fmt: skip


def otherwise(got, expected, start):
    if agree(got, expected, digits=4):
        return "digits are lost: compute, send and save in float64, which is the model's dtype"
    if (got - start).norm() > 0.5 * start.norm():
        return (
            "the weights are far from where they begin: all ranks fill their shards with the values of initial(name), each "
            "with the part of the whole value that it keeps"
        )
    return (
        "these are not the weights of one process: does each batch make one update, with the mean gradient over all ranks, "
        f"clipped by the norm of all shards together, and AdamW with lr={RATE}? Does each shard begin with its part of "
        "initial(name)?"
    )


# ---- the bytes ----


def bytes_in_use(model, rank, of_ranks):
    """A rank has less in use than its limit; rank 0 may have more for the file."""
    most = of_ranks[rank]["training" if rank == 0 else "most"]
    times = most / model
    yield Claim(
        f"the most bytes in use by tensors{', until training was over' if rank == 0 else ''}", most,
        Between(0, LIMIT * model), why_so_many(times, of_ranks[rank]["training"] <= LIMIT * model),
        told=f"at most {LIMIT * model:,}, {LIMIT} times the model", shown=f"{most:,}, {times:.2f} times the model",
    )  # fmt: skip


def why_so_many(times, trained_within):
    if trained_within:
        return (
            "training is within the limit, and saving is not: only rank 0 needs the whole values. With cpu_offload=True, "
            "get_model_state_dict leaves them on rank 0 only"
        )
    if times > 3.8:
        return (
            "this rank has all weights, gradients and averages, as with DDP: shard them, each block with fully_shard and "
            "then the model"
        )
    return (
        "more than shards and a block or two: call fully_shard for each block and then for the model, or the whole model is "
        "gathered at once. Weights, gradients and Adam's averages are all sharded, and a gathered weight is freed"
    )
