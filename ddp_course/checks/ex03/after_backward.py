"""Question 1: one message with all gradients, after backward."""

import torch

from ddp_course.checks.ex03.networks import Tied, equal_in_64_bits, judge_digits
from ddp_course.checks.training import a_batch, close, gradients_of, state
from ddp_course.checks.works import noting_works
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch


def gradients_before_and_after(average_gradients, widths, seed):
    """What one call does to each of several networks, one of each width."""
    with process_group() as (rank, world_size):
        return [
            averaged(average_gradients, Tied(width, seed), width, seed + rank)
            for width in widths
        ]


def backward(model, width, seed):
    model(a_batch(4, width, seed)).pow(2).mean().backward()


def gradients_before(width, seed, rank):
    """What a rank's gradients are before the call: not asked of the rank, where an answer
    could change what was noted.
    """
    model = Tied(width, seed)
    backward(model, width, seed + rank)
    return gradients_of(model)


def averaged(average_gradients, model, width, seed):
    backward(model, width, seed)
    values = state(model)
    views = {
        name: parameter.grad.view(-1)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    with Watch() as watch, noting_works() as works:
        average_gradients(model)
    after = gradients_of(model)
    moved = [
        name
        for name, value in model.state_dict().items()
        if not torch.equal(values[name], value)
    ]
    replaced = [
        name
        for name, view in views.items()
        if after[name] is not None and not torch.equal(view, after[name].view(-1))
    ]
    return {
        "after": after, "moved": moved, "replaced": replaced,
        "messages": [entry["name"] for entry in watch.log],
        "bytes": sum(entry["bytes"] for entry in watch.log),
        "forgotten": sum(not work.waited for work in works),
    }  # fmt: skip


@question(
    "Two steps: turn all gradients into one long vector, and later cut the vector into gradients again. Only the "
    "vector is sent.",
    "Collect the gradients that are not None. torch.cat joins flattened tensors; split(sizes) divides the result; "
    "view_as gives a piece the shape of its gradient; copy_ writes into a tensor that exists.",
    "flat = torch.cat([gradient.flatten() for gradient in gradients]); all_reduce it and divide it by "
    "dist.get_world_size(); then for each gradient and its piece of flat.split([g.numel() for g in gradients]): "
    "gradient.copy_(piece.view_as(gradient))",
)
def check_average_gradients(answer, draw):
    """Every gradient must become its mean over the ranks, in place and in one all-reduce,
    also that of a tied parameter; a frozen parameter has none.
    """
    for n in draw.sample([2, 3, 4], 2):
        widths, seed = draw.sample(range(2, 7), 2), draw.randrange(10**6)
        seen = answer.on_ranks(gradients_before_and_after, widths, seed, nproc=n)
        for number, width in enumerate(widths):
            before = [gradients_before(width, seed, rank) for rank in range(n)]
            of_ranks = [of_rank[number] for of_rank in seen]
            both = zip(of_ranks, before)
            judge_averages([one | {"before": its_own} for one, its_own in both])


def judge_averages(seen):
    n = len(seen)
    checked = (
        f"the gradients of a small network on {n} ranks, after average_gradients(model)"
    )
    for rank, of_rank in reversed(
        list(enumerate(seen))
    ):  # rank 0 is often right by accident
        where = f"{rank} of {n}"
        if of_rank["moved"]:
            raise Wrong(
                checked,
                rank=where,
                expected="unchanged parameters and buffers",
                got=f"{of_rank['moved'][0]} has changed",
                cause="average_gradients must change only parameter.grad; the optimizer changes the parameters",
            )
        for name, got in of_rank["after"].items():
            locals_ = [other["before"][name] for other in seen]
            compare_gradient(f"{checked}: {name}", where, rank, locals_, got)
        if of_rank["replaced"]:
            raise Wrong(f"{checked}: {of_rank['replaced'][0]}, seen through a view of its gradient that was made before",
                        rank=where, expected="the mean, in the memory of the gradient", got="the old numbers",
                        cause="parameter.grad is now another tensor: change the given one in place, with /=, div_ or "
                        "copy_")  # fmt: skip
        if len(sent := of_rank["messages"]) != 1:
            cause = "join the gradients into one tensor, and all-reduce this tensor"
            if len(sent) == sum(
                value is not None for value in of_rank["before"].values()
            ):
                cause = f"the means are right, but each gradient is sent alone: {cause}"
            raise Wrong(f"the collectives of average_gradients(model) on {n} ranks", rank=where, expected="one",
                        got=f"{len(sent)}: {', '.join(sent)}", cause=cause)  # fmt: skip
        judge_message(n, where, of_rank)


def judge_message(n, where, of_rank):
    """Raise Wrong unless the one message is an all-reduce that was waited for, with each
    gradient in it once.
    """
    [name] = of_rank["messages"]
    if not name.startswith("allreduce"):
        raise Wrong(f"the collective of average_gradients(model) on {n} ranks", rank=where, expected="an all-reduce",
                    got=name, cause="every rank receives the gradients of all ranks, but it needs only their sum: "
                    "use dist.all_reduce")  # fmt: skip
    if of_rank["forgotten"]:
        raise Wrong(f"the all-reduce of average_gradients(model) on {n} ranks", rank=where, expected="a wait() for it",
                    got="no wait()", cause="all_reduce(..., async_op=True) only starts the operation: the sums may be "
                    "incomplete until work.wait() has returned")  # fmt: skip
    before = of_rank["before"].values()
    needed = sum(value.nbytes for value in before if value is not None)
    # some answers send a few zeros as well, but nothing as large as a weight
    if of_rank["bytes"] >= needed + of_rank["before"]["last.weight"].nbytes:
        raise Wrong(f"the bytes that average_gradients(model) sends on {n} ranks", rank=where, expected=needed,
                    got=of_rank["bytes"], cause="a gradient is sent twice: a tied weight has two names, but it is one "
                    "parameter; module.parameters() gives it once")  # fmt: skip


def compare_gradient(checked, where, rank, of_all, got):
    """Raise Wrong unless `got` is the mean of the ranks' own gradients; name the likely
    mistake.
    """
    if of_all[0] is None:
        if got is not None:
            cause = "this parameter is frozen and has no gradient: leave it alone"
            raise Wrong(
                checked, rank=where, expected="no gradient (None)", got=got, cause=cause
            )
        return
    mean, total = sum(of_all) / len(of_all), sum(of_all)
    if not isinstance(got, torch.Tensor) or got.shape != mean.shape:
        raise Wrong(
            checked,
            rank=where,
            expected=mean,
            got=got,
            cause="a gradient has the shape of its parameter",
        )
    if equal_in_64_bits(got, mean):
        return
    looks = [
        (total, "it is the sum over the ranks: divide by the number of ranks, once"),
        (total / len(of_all) ** 2, "it was divided by the number of ranks twice"),
        (of_all[rank], "it is still this rank's own gradient: nothing was averaged"),
        (of_all[rank] / len(of_all), "it was divided, but not summed over the ranks"),
        (of_all[0], "it is rank 0's gradient: a broadcast is not a mean"),
        (torch.zeros_like(mean), "it is zero"),
    ]
    likely = [cause for value, cause in looks if close(got, value)]
    if not likely:
        judge_digits(checked, where, mean, got)
    cause = (
        likely[0]
        if likely
        else "does each rank sum each gradient exactly once, and then divide?"
    )
    raise Wrong(checked, rank=where, expected=mean, got=got, cause=cause)
