"""What question 3 claims of the masks on a rank."""

from ddp_course.checks.claims import Claim

SALTED = (
    "the seed comes from hash() of a text, which differs from process to process, so each rank has another one. hash() of "
    "whole numbers is the same everywhere, and so is hashlib"
)


def claims(words, shape, rank, of_ranks):
    seen, (data, tensor) = of_ranks[rank], divmod(rank, shape[1])
    name = f"{words}: data rank {data}, tensor rank {tensor}: "

    def same(what, got, expected, cause):
        return Claim(name + what, got, expected, cause, told=f"{expected[:24]}...", shown=f"{got[:24]}...")

    def other(what, got, ones, cause):
        return Claim(name + what, got in ones, False, cause, told="another mask", shown=f"the same mask, {got[:24]}...")

    yield same("the first mask of a second run with this seed, with other numbers drawn before", seen["without"][0],
               seen["before"], "__init__ must seed the default generator, from its arguments alone: what was drawn before "
               "must not matter, so that a run can be repeated")  # fmt: skip
    leader = of_ranks[data * shape[1]]
    yield same("the first mask of the replicated region", seen["before"], leader["before"], SALTED if seen["hashed"] else
               "in the replicated region, all tensor ranks of a data rank need the same mask: its seed must not depend on "
               "the tensor rank")  # fmt: skip
    first, *_, second, third, fourth = seen["sharded"]
    own = [seen["before"], *seen["without"]]
    yield other("a mask of the sharded region and one of the replicated region", first, own,
                "the sharded region needs a stream of its own")  # fmt: skip
    continues = (
        "after a block, the default generator continues where it was before the block: keep its state before the block, and "
        "set it again afterwards"
    )
    yield same("the mask after a sharded region", seen["between"], seen["without"][1], continues)
    yield same("the mask after a sharded region that raised an error", seen["after"], seen["without"][2],
               f"restore the state after an error, too, with try and finally: {continues}")  # fmt: skip
    yield Claim(
        name + "an error raised inside the block", seen.get("raised"), True, "let the error pass on to the caller"
    )
    starts = "the second block begins with the same numbers as the first: keep the state at the end of the block"
    yield other("the masks of two sharded regions", second, [first], starts)
    yield other("the masks of two sharded regions", third, [first, second], starts)
    yield other("the masks of two sharded regions, of which the first raised an error", fourth, [third],
                "keep the state at the end of a block that raises an error, too: in the finally")  # fmt: skip
    for place, (got, expected) in enumerate(zip(seen["sharded"], seen["at_once"])):
        yield same(f"mask {place + 1} of the sharded region, over four blocks, and over one", got, expected,
                   "each block must continue where the last one ended, after an error, too")  # fmt: skip
    yield same("the first mask of the sharded region, beside a second object of another run", seen["beside"], first,
               "keep the state of the sharded region in the object (self), not in the class or a global")  # fmt: skip
    for r, others in enumerate(of_ranks):
        where = "data rank {}, tensor rank {}".format(*divmod(r, shape[1]))
        if r // shape[1] != data:
            yield other(f"the mask of the replicated region here and on {where}", seen["before"], [others["before"]],
                        "data ranks have different samples and need different masks: the seed must depend on the data "
                        "rank")  # fmt: skip
        if r != rank:
            yield other(f"the mask of the sharded region here and on {where}", first, others["at_once"],
                        "the sharded region needs another mask on each rank, of data and of tensor ranks")  # fmt: skip
