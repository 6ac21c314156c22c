"""Question 1: one message with all gradients, after backward."""

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.ex03.networks import Tied
from ddp_course.checks.recording import in_place, mean_gradient, recording, unmoved, waited
from ddp_course.checks.training import a_batch, gradients_of
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(average_gradients, widths, seed):
    """What one call does to each of several networks, one of each width."""
    records = []
    with process_group() as (rank, _):
        for width in widths:
            model = after_backward(width, seed, rank)
            with recording(model) as record:
                average_gradients(model)
            del record["log"], record["works"]
            records.append(record)
    return records


def after_backward(width, seed, rank):
    """A network with the gradients of a rank."""
    model = Tied(width, seed)
    model(a_batch(4, width, seed + rank)).pow(2).mean().backward()
    return model


JOIN = "join the gradients into one tensor, and all-reduce this tensor"
TWICE = (
    "a gradient is sent twice: a tied weight has two names, but it is one parameter; module.parameters() gives it once"
)  # fmt: skip


def claims_about(own):
    """What each rank must have done. own: the gradients of each rank before, which are
    not asked of the ranks, where an answer could change what was noted.
    """

    def claims(rank, of_ranks):
        mine, call = of_ranks[rank], f"average_gradients(model) on {len(own)} ranks"
        yield unmoved(call, mine)
        for name, got in mine["gradients"].items():
            yield mean_gradient(f"{name} after {call}", got, [each[name] for each in own], rank)  # fmt: skip
        yield in_place(call, mine)
        trained = [value for value in own[0].values() if value is not None]
        yield Claim(
            f"the collectives of {call}", mine["sent"], ["allreduce"], JOIN, [
                (["allreduce"] * len(trained), f"the means are right, but each gradient is sent alone: {JOIN}"),
                (["allreduce"] * (len(trained) + 1), TWICE),
                (["allgather"], "every rank receives all gradients, but it needs only their sum: use dist.all_reduce"),
            ],
            told="one all-reduce", shown=f"{len(mine['sent'])}: {', '.join(mine['sent'])}",
        )  # fmt: skip
        yield waited(call, mine)
        # some answers send a few zeros as well, but nothing as large as a weight
        needed = sum(value.nbytes for value in trained)
        fits = range(needed + own[0]["last.weight"].nbytes)
        yield Claim(f"the bytes that {call} sends", mine["bytes"], fits, TWICE, told=needed)  # fmt: skip

    return claims


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
        seen = answer.on_ranks(observe, widths, seed, nproc=n)
        for width, *of_ranks in zip(widths, *seen):
            models = [after_backward(width, seed, rank) for rank in range(n)]
            own = [gradients_of(model) for model in models]
            on_every_rank(claims_about(own), of_ranks)
