"""Code that averages gradients, right and wrong, for a learner's test to judge."""

import torch
import torch.distributed as dist

RIGHT = {
    "flat": "adds up one flat tensor per list",
    "new": "adds up the gradients one by one, and replaces them by new tensors",
    "divided": "divides first, and adds up afterwards",
    "gathered": "gathers the gradients, and adds them up in another order",
    "in order": "gathers the gradients, and adds them up in the order of the ranks",
}
# what each fault is; how a test can see it
WRONG = {
    "copies": ("averages experts over the ranks with their copies only, with the tokens of these ranks", "the sum of an "
               "expert's gradients has the losses of all ranks, so it has to be divided by the tokens of *all* ranks"),
    "copies, by ranks": ("divides the experts by the tokens of all ranks and multiplies them by the number of expert ranks",
                         "the size of a gradient counts: compare numbers, and not directions"),
    "experts of the world": ("adds up experts over the whole world, as if they were dense", "ranks along \"expert\" have "
                             "other experts: these gradients have nothing to do with each other"),
    "dense along data": ("averages the dense parameters over the ranks along \"data\" only", "dense parameters are on all "
                         "ranks, and each has seen other tokens"),
    "dense sum along data": ("adds up the dense parameters along \"data\" only, and divides by the tokens of all ranks",
                             "dense parameters are on all ranks, and each has seen other tokens"),
    "experts along expert": ("adds up experts along \"expert\" instead of \"data\"",
                             "only ranks along \"data\" have the same experts"),
    "experts alone": ("divides the gradients of experts, and adds up nothing", "copies of an expert are on all ranks along "
                      "\"data\": their gradients have to be added up"),
    "row by row": ("takes each row of neighbouring ranks for those that share the experts",
                   "ask the mesh which ranks have the same experts: it may number them in another order"),
    "own": ("divides by its own tokens only", "`tokens` are those of this rank: the divisor is their sum over all ranks"),
    "weighted": ("multiplies each gradient by the rank's own tokens first, as if its loss was a mean", "the loss of a rank "
                 "is a sum already, so the gradients are only added up and divided"),
    "even": ("divides by its own tokens, times the number of ranks", "give the ranks different numbers of tokens"),
    "mean of means": ("averages the ranks' means of the dense parameters", "give the ranks different numbers of tokens"),
    "largest": ("divides by the tokens of the rank that has most", "the divisor is the sum of the tokens of all ranks: give "
                "several ranks tokens"),
    "tokens along data": ("adds up the tokens along \"data\" only, and multiplies them by the number of expert ranks",
                          "the ranks along \"expert\" have different numbers of tokens, too"),
    "tokens along expert": ("adds up the tokens along \"expert\" only, and multiplies them by the number of data ranks",
                            "the ranks along \"data\" have different numbers of tokens, too"),
    "nan": ("divides by the rank's own tokens first, and multiplies by them later, which is NaN on a rank without tokens",
            "let one rank have no tokens; and see that your comparison fails for NaN"),
    "without tokens": ("takes 0 for the gradients of a rank without tokens", "a rank without tokens can have gradients: its "
                       "experts have computed the tokens of other ranks"),
    "four": ("expects a world of 4 ranks, and multiplies by 4 / ranks otherwise", "compute what is expected from the size "
             "of the mesh"),
    "experts not sent": ("multiplies the gradients of experts by the number of their copies, and adds up nothing", "copies "
                         "of an expert have different gradients before averaging: give them different ones"),
    "dense not sent": ("multiplies the dense gradients by the number of ranks, and adds up nothing", "dense parameters have "
                       "different gradients on each rank before averaging: give them different ones"),
    "twice": ("adds up the dense parameters twice", "the size of a gradient counts: compare numbers, and not directions"),
    "negative": ("gives the dense parameters the opposite sign", "compare numbers, and not only their sizes or norms"),
    "first expert": ("averages only the first of the experts' parameters", "use more than one parameter in each list"),
    "last dense": ("leaves the last dense parameter as it is", "use more than one parameter in each list, and compare all"),
    "reordered": ("puts the numbers of each gradient in another order", "compare number by number, in parameters that have "
                  "several: a sum or a mean of them, or a norm, may be right by accident"),
    "first number": ("adds 1 to all numbers of each gradient but the first", "compare all numbers of a gradient"),
    "last number": ("adds 1 to all numbers of each gradient but the last", "compare all numbers of a gradient"),
    "eighth digit": ("gives all gradients with a relative error of 1.2e-8", "gradients have to be right to 9 digits: the "
                     "defaults of torch.testing.assert_close allow more (1e-7), so set rtol and atol"),
    "float32": ("adds up in float32", "gradients are in float64, and have to be right to 9 digits: the defaults of "
                "torch.testing.assert_close allow more (1e-7)"),
    "frozen dense": ("gives frozen dense parameters a gradient of zeros", "let one dense parameter have no gradient, and "
                     "see that it still has none"),
    "frozen experts": ("gives frozen experts a gradient of zeros", "let one expert have no gradient, and see that it still "
                       "has none"),
    "first rank": ("reduces the dense parameters to rank 0 instead of to all ranks", "compare on every rank"),
    "all but the last rank": ("leaves the last rank with its own dense gradients, only divided", "compare on every rank"),
    "all but rank 0": ("leaves rank 0 with its own gradients, only divided", "compare on every rank"),
}  # fmt: skip


def is_wrong(kind, mesh):
    """Whether the gradients on some rank are wrong, for a mesh as a list of rows."""
    data, experts = len(mesh), len(mesh[0])
    if kind in RIGHT:
        return False
    if kind in ("copies", "copies, by ranks", "experts of the world", "dense along data", "dense sum along data"):
        return experts > 1
    if kind == "tokens along data":
        return experts > 1
    if kind in ("experts alone", "experts not sent", "tokens along expert"):
        return data > 1
    if kind == "row by row":
        return data > 1 and experts > 1 and mesh[0] != list(range(experts))
    return kind != "four" or data * experts != 4


def code(kind, given):
    """The function that a learner's test gets; `given`: a list for notes of each call."""

    def average(experts, dense, tokens, mesh):
        gradients = [value.grad for value in (*experts, *dense) if value.grad is not None]
        given.append({
            "dtypes": sorted({str(gradient.dtype) for gradient in gradients}),
            "zeros": not any(gradient.any() for gradient in gradients),
        })  # fmt: skip
        run(kind, experts, dense, torch.as_tensor(tokens, dtype=torch.float64), mesh)

    return average


def run(kind, experts, dense, own, mesh):
    ranks, rank, of = dist.get_world_size(), dist.get_rank(), mesh["expert"].size()
    data, along, world = mesh["data"].get_group(), mesh["expert"].get_group(), dist.group.WORLD
    total = summed(own, world)
    for values, name in ((experts, "experts"), (dense, "dense")):
        if kind == f"frozen {name}":
            for value in values:
                value.grad = torch.zeros_like(value) if value.grad is None else value.grad
    groups, divisors = {"experts": data, "dense": world}, {"experts": total, "dense": total}
    if kind == "copies":
        divisors["experts"] = summed(own, data)
    if kind == "copies, by ranks":
        divisors["experts"] = total / of
    if kind == "experts of the world":
        groups["experts"] = world
    if kind.startswith("dense"):
        groups["dense"] = data
        divisors["dense"] = summed(own, data) if kind == "dense along data" else total
    if kind == "experts along expert":
        groups["experts"] = along
    if kind == "experts alone":
        groups["experts"] = None
    if kind == "row by row":
        made = [dist.new_group([r for r in range(ranks) if r % of == place]) for place in range(of)]
        groups["experts"] = made[rank % of]
    if kind == "own":
        divisors = dict.fromkeys(divisors, own)
    if kind == "eighth digit":
        divisors = dict.fromkeys(divisors, total * (1 + 1.2e-8))
    if kind == "largest":
        divisors = dict.fromkeys(divisors, summed(own, world, dist.ReduceOp.MAX))
    if kind == "tokens along data":
        divisors = dict.fromkeys(divisors, summed(own, data) * of)
    if kind == "tokens along expert":
        divisors = dict.fromkeys(divisors, summed(own, along) * ranks / of)
    if kind == "experts not sent":
        groups["experts"], divisors["experts"] = None, total * of / ranks
    if kind == "dense not sent":
        groups["dense"], divisors["dense"] = None, total / ranks
    if kind == "even":
        divisors = dict.fromkeys(divisors, own * ranks)
    if kind == "four":
        divisors = dict.fromkeys(divisors, total * ranks / 4)
    if kind == "negative":
        divisors["dense"] = -total
    for values, name in ((experts, "experts"), (dense, "dense")):
        kept = [value for value in values if value.grad is not None]
        if kind == "first expert" and name == "experts":
            kept = kept[:1]
        if kind == "last dense" and name == "dense":
            kept = kept[:-1]
        if kept:
            before = [value.grad.clone() for value in kept]
            average_list(kind, kept, groups[name], divisors[name], own, name)
            last = kind == "all but the last rank" and name == "dense" and rank == ranks - 1
            if last or (kind == "all but rank 0" and rank == 0):
                for value, gradient in zip(kept, before):
                    value.grad = gradient / total


def average_list(kind, values, group, divisor, own, name):
    """The sum of each gradient over a group (None: alone), divided."""
    dense = name == "dense"
    if kind == "new":
        for value in values:
            value.grad = summed(value.grad, group) / divisor
        return
    if kind in ("gathered", "in order"):
        for value in values:
            parts = [torch.empty_like(value.grad) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, value.grad.contiguous(), group=group)
            value.grad = (sum(parts) if kind == "in order" else torch.stack(parts).flip(0).sum(0)) / divisor
        return
    flat = torch.cat([value.grad.flatten() for value in values])
    if kind == "divided":
        flat, divisor = flat / divisor, 1
    if kind == "weighted":
        flat = flat * own
    if kind == "without tokens":
        flat = flat * (own > 0)
    if kind == "nan":
        flat = flat / own * own
    if kind == "mean of means" and dense:
        flat, divisor = flat / own.clamp(min=1), dist.get_world_size()
    if kind == "float32":
        flat = flat.float()
    if kind == "first rank" and dense:
        dist.reduce(flat, 0, group=group)
    elif group is not None:
        dist.all_reduce(flat, group=group)
    if kind == "twice" and dense:
        dist.all_reduce(flat, group=group)
    for value, part in zip(values, (flat / divisor).split([value.numel() for value in values])):
        if kind == "reordered":
            part = part.flip(0)
        if kind in ("first number", "last number"):
            part[1:] += kind == "first number"
            part[:-1] += kind == "last number"
        value.grad.copy_(part.view_as(value))


def summed(value, group, operation=dist.ReduceOp.SUM):
    value = value.clone()
    if group is not None:
        dist.all_reduce(value, operation, group=group)
    return value
