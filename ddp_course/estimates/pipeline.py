"""A pipeline's schedules as plain data: the order of each stage, when it computes what,
how long it waits, and how much it keeps.
"""

from itertools import accumulate


def bubble(stages, micro_batches):
    """The share of a step in which a stage waits, where all stages take equally long.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def order(kind, stage, stages, micro_batches):
    """What a stage computes, one after the other: [("forward" or "backward", number of
    the micro-batch)].

    kind: "GPipe", all forwards first, or "1F1B", one forward, one backward. D.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2.
    """
    kinds = {"GPipe": micro_batches, "1F1B": min(stages - stage, micro_batches)}
    ahead = kinds[kind]
    steps = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        steps.append(("backward", number))
        if ahead + number < micro_batches:
            steps.append(("forward", ahead + number))
    return steps


def schedule(kind, stages, micro_batches, unit=1):
    """A step of a pipeline of this kind, see `order`, played through as `play` does."""
    orders = [order(kind, stage, stages, micro_batches) for stage in range(stages)]
    return play(orders, unit)


def play(orders, unit=1):
    """When the stages do what, if they follow these orders: for each stage its
    [(kind, micro-batch, begin, length)], a forward `unit` long and a backward twice that.

    A stage begins when it is free and its input has arrived. Raises ValueError for
    orders in which stages wait for each other forever.
    """
    orders = [list(steps) for steps in orders]
    spans, ends = [[] for _ in orders], {}  # ends: {(kind, micro-batch, stage): when}
    while left := sum(map(len, orders)):
        for stage, steps in enumerate(orders):
            begin = arrival(*steps[0], stage, len(orders), ends) if steps else None
            if begin is not None:
                what, number = steps.pop(0)
                if spans[stage]:
                    *_, last, length = spans[stage][-1]
                    begin = max(begin, last + length)
                length = unit if what == "forward" else 2 * unit
                spans[stage].append((what, number, begin, length))
                ends[what, number, stage] = begin + length
        if sum(map(len, orders)) == left:
            raise ValueError(
                f"the stages wait for each other, with this left: {orders}"
            )
    return spans


def arrival(what, number, stage, stages, ends):
    """When a stage has what it needs; None while some of that is not done."""
    source = stage - 1 if what == "forward" else stage + 1
    needed = [(what, number, source)] if 0 <= source < stages else []
    if what == "backward":
        needed.append(("forward", number, stage))
    if all(one in ends for one in needed):
        return max((ends[one] for one in needed), default=0)
    return None


def kept_at_most(steps):
    """The most micro-batches that had gone forward through a stage and not yet back.

    steps: an order, or spans, or a log: what begins with "forward" or "backward".
    """
    return max(accumulate(1 if kind == "forward" else -1 for kind, *_ in steps))
