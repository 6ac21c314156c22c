"""Question 1: from node rank and local rank to the rank, and back."""

from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question

TO_RANK = {
    "node rank and local rank are swapped": lambda node, local, per: local * per + node,
    "each node before this one holds ranks_per_node ranks, not one: multiply the node rank by ranks_per_node":
        lambda node, local, per: node + local,
    "that is the first rank of the node: the local rank is missing": lambda node, local, per: node * per,
    "it is a whole node too high: node ranks begin at 0": lambda node, local, per: (node + 1) * per + local,
    "it is a whole node too low: node ranks begin at 0": lambda node, local, per: (node - 1) * per + local,
    "it is 1 too high: all ranks are counted from 0": lambda node, local, per: node * per + local + 1,
    "it is 1 too low: all ranks are counted from 0": lambda node, local, per: node * per + local - 1,
    "a node holds ranks_per_node ranks, not one fewer": lambda node, local, per: node * (per - 1) + local,
    "a node holds ranks_per_node ranks, not one more": lambda node, local, per: node * (per + 1) + local,
    "only the node rank is multiplied by ranks_per_node: the local rank is added to the product":
        lambda node, local, per: (node + local) * per,
    **{f"a node does not always hold {some} ranks: use ranks_per_node":
        lambda node, local, per, some=some: node * some + local for some in (2, 3, 4, 8)},
    "it is always 0, like this process's own rank: compute it from the arguments": lambda node, local, per: 0,
}  # fmt: skip
TO_PLACE = {
    "the two are swapped: node rank first, then local rank": lambda rank, per: (rank % per, rank // per),
    "/ gives a fraction, but a node rank is an integer: divide with //": lambda rank, per: (rank / per, rank % per),
    "the node rank is 1 too high: the first node is node 0": lambda rank, per: (rank // per + 1, rank % per),
    "the local rank is 1 too high: local ranks begin at 0 on each node": lambda rank, per: (rank // per, rank % per + 1),
    "both are 1 too high: all ranks are counted from 0": lambda rank, per: (rank // per + 1, rank % per + 1),
    "the first rank of each node is counted to the node before: do not subtract 1 before dividing":
        lambda rank, per: ((rank - 1) // per, rank % per),
    "round() rounds up from the middle of a node: divide with //": lambda rank, per: (round(rank / per), rank % per),
    "the quotient is rounded up: count only whole nodes, divide with //": lambda rank, per: (-(-rank // per), rank % per),
    "subtracting one node is right on node 1 only: take the remainder of dividing by ranks_per_node":
        lambda rank, per: (rank // per, rank - per),
    **{f"a node does not always hold {some} rank{'s' * (some > 1)}: use ranks_per_node":
        lambda rank, per, some=some: divmod(rank, some) for some in (1, 2, 3, 4, 8)},
    "local ranks begin at 0 on every node: take the remainder of dividing by ranks_per_node":
        lambda rank, per: (rank // per, rank),
    "both are always 0, like this process's own ranks: compute them from the arguments": lambda rank, per: (0, 0),
}  # fmt: skip


def of_the_form(case, got):
    if not isinstance(got, list) or len(got) != 2:
        return "return two numbers: return node_rank, local_rank"
    if any(isinstance(number, float) for number in got):
        return "both must be integers: divide with //, not with /"
    right = [one == other for one, other in zip(got, divmod(*case))]
    if any(right):
        return f"the {'local' if right[0] else 'node'} rank is wrong, but the other one is always right"
    return "how many whole nodes come before this rank, and how many ranks are left over?"


@question(
    "All ranks of nodes 0 and 1 come before the first rank of node 2. How many ranks are these?",
    "global_rank: count ranks_per_node for each node before this one, and add the local rank. The way back is a "
    "division: how many whole nodes fit into the rank, and what is the remainder?",
    "node_rank * ranks_per_node + local_rank; and back: rank // ranks_per_node, rank % ranks_per_node",
)
def check_rank_arithmetic(answer, draw):
    """From node rank and local rank to the global rank, and back, for any number of
    ranks per node.
    """
    places = [(draw.randint(2, 9), 0, 1)]
    for per in draw.sample(range(3, 9), 2):
        nodes = draw.choice([number for number in range(3, 8) if number != per])
        places += [(1, 2, per), (0, per - 1, per), (1, 0, per), (0, 0, per), (nodes - 1, per - 1, per)]
        places += [(draw.randrange(nodes), draw.randrange(per), per) for _ in range(4)]
    check_function(answer, draw, "global_rank", places,
                   lambda node, local, per: node * per + local, TO_RANK, lambda case, got:
                   "count the ranks on all nodes before this one, and then the ranks before it on its own node"
                   if isinstance(got, int) else "return one integer", place=0)  # fmt: skip
    ranks = [(node * per + local, per) for node, local, per in places]
    check_function(answer, draw, "node_and_local_rank", ranks, divmod, TO_PLACE, of_the_form, place=1)
