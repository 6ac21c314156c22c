"""Question 1: from node rank and local rank to the rank, and back."""

import operator
from contextlib import suppress

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group


def results_of(global_rank, node_and_local_rank, name, cases):
    function = {"global_rank": global_rank, "node_and_local_rank": node_and_local_rank}[
        name
    ]
    with process_group():
        results = []
        for case in cases:
            with trying(f"{name}{case}"):
                results.append(as_int(function(*case)))
        return results


def as_int(value):
    """An integer of any kind, also NumPy's or a tensor's, as an int; the items of a
    tuple as well; anything else unchanged.
    """
    if isinstance(value, list | tuple):
        return [as_int(item) for item in value]
    with suppress(TypeError):
        return operator.index(value)
    return value


def equal(got, expected):
    """Whether two results are equal and of the same type: 2.0 is not a rank."""
    return repr(got) == repr(expected)


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
    places = []
    for per_node in draw.sample(range(3, 9), 2):
        nodes = draw.choice([number for number in range(3, 8) if number != per_node])
        places += [
            (1, 2, per_node),
            (0, per_node - 1, per_node),
            (1, 0, per_node),
            (0, 0, per_node),
        ]
        places += [
            (draw.randrange(nodes), draw.randrange(per_node), per_node)
            for _ in range(4)
        ]
        places += [(nodes - 1, per_node - 1, per_node)]
    places += [(draw.randint(2, 9), 0, 1)]

    seen = answer.on_ranks(results_of, "global_rank", places)[0]
    for (node, local, per_node), got in zip(places, seen):
        if not equal(got, expected := node * per_node + local):
            checked = f"global_rank(node_rank={node}, local_rank={local}, ranks_per_node={per_node})"
            cause = why_global_rank(places, seen, got)
            raise Wrong(checked, expected=expected, got=named(got), cause=cause)

    ranks = [(node * per_node + local, per_node) for node, local, per_node in places]
    seen = answer.on_ranks(results_of, "node_and_local_rank", ranks)[0]
    for (rank, per_node), got in zip(ranks, seen):
        if not equal(got, list(divmod(rank, per_node))):
            checked = f"node_and_local_rank(rank={rank}, ranks_per_node={per_node})"
            cause = why_node_and_local_rank(ranks, seen, got)
            raise Wrong(
                checked, expected=divmod(rank, per_node), got=named(got), cause=cause
            )


def named(got):
    if got is None:
        return "nothing (None)"
    if isinstance(got, list):
        return repr(tuple(got))
    return repr(got)  # the text '13' is not the number 13


def why_global_rank(places, seen, got):
    """The likely mistake: the formula that explains all results."""
    if got is None:
        return "the function ends without a return statement"
    looks = [
        (lambda node, local, per: local * per + node, "node rank and local rank are swapped"),
        (lambda node, local, per: node + local, "each node before this one holds ranks_per_node ranks, not one: "
                                                "multiply the node rank by ranks_per_node"),
        (lambda node, local, per: node * per, "that is the first rank of the node: the local rank is missing"),
        (lambda node, local, per: (node + 1) * per + local, "it is a whole node too high: node ranks begin at 0"),
        (lambda node, local, per: (node - 1) * per + local, "it is a whole node too low: node ranks begin at 0"),
        (lambda node, local, per: node * per + local + 1, "it is 1 too high: all ranks are counted from 0"),
        (lambda node, local, per: node * per + local - 1, "it is 1 too low: all ranks are counted from 0"),
        (lambda node, local, per: node * (per - 1) + local, "a node holds ranks_per_node ranks, not one fewer"),
        (lambda node, local, per: node * (per + 1) + local, "a node holds ranks_per_node ranks, not one more"),
        (lambda node, local, per: (node + local) * per, "only the node rank is multiplied by ranks_per_node: the local "
                                                        "rank is added to the product"),
        *[(lambda node, local, per, some=some: node * some + local, f"a node does not always hold {some} ranks: use "
                                                                    "ranks_per_node") for some in (2, 3, 4, 8)],
        (lambda node, local, per: 0, "it is always 0, like this process's own rank: compute it from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if all(equal(result, formula(*place)) for place, result in zip(places, seen)):
            return cause
    if not isinstance(got, int):
        return "return one integer"
    return "count the ranks on all nodes before this one, and then the ranks before it on its own node"


def why_node_and_local_rank(ranks, seen, got):
    if got is None:
        return "the function ends without a return statement"
    if not isinstance(got, list) or len(got) != 2:
        return "return two numbers: return node_rank, local_rank"

    def is_always(formula):
        return all(
            equal(result, list(formula(*rank))) for rank, result in zip(ranks, seen)
        )

    looks = [
        (lambda rank, per: (rank % per, rank // per), "the two are swapped: node rank first, then local rank"),
        (lambda rank, per: (rank / per, rank % per), "/ gives a fraction, but a node rank is an integer: divide with //"),
        (lambda rank, per: (rank // per + 1, rank % per), "the node rank is 1 too high: the first node is node 0"),
        (lambda rank, per: (rank // per, rank % per + 1), "the local rank is 1 too high: local ranks begin at 0 on "
                                                          "each node"),
        (lambda rank, per: (rank // per + 1, rank % per + 1), "both are 1 too high: all ranks are counted from 0"),
        (lambda rank, per: ((rank - 1) // per, rank % per), "the first rank of each node is counted to the node "
                                                            "before: do not subtract 1 before dividing"),
        (lambda rank, per: (round(rank / per), rank % per), "round() rounds up from the middle of a node: divide with //"),
        (lambda rank, per: (-(-rank // per), rank % per), "the quotient is rounded up: count only whole nodes, "
                                                          "divide with //"),
        (lambda rank, per: (rank // per, rank - per), "subtracting one node is right on node 1 only: take the "
                                                      "remainder of dividing by ranks_per_node"),
        *[(lambda rank, per, some=some: divmod(rank, some), f"a node does not always hold {some} rank{'s' * (some > 1)}: "
                                                            "use ranks_per_node") for some in (1, 2, 3, 4, 8)],
        (lambda rank, per: (rank // per, rank), "local ranks begin at 0 on every node: take the remainder of "
                                                "dividing by ranks_per_node"),
        (lambda rank, per: (0, 0), "both are always 0, like this process's own ranks: compute them from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if is_always(formula):
            return cause
    if any(isinstance(number, float) for number in got):
        return "both must be integers: divide with //, not with /"
    right = [
        all(equal(pair[i], divmod(*rank)[i]) for rank, pair in zip(ranks, seen))
        for i in (0, 1)
    ]
    if any(right):
        return f"the {'local' if right[0] else 'node'} rank is wrong, but the other one is always right"
    return (
        "how many whole nodes come before this rank, and how many ranks are left over?"
    )
