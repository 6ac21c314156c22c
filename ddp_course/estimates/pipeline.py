"""A pipeline's schedule, when each stage does what, and how long the stages wait."""


def bubble(stages, micro_batches):
    """The share of a step in which a stage waits, where all stages take equally long.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def schedule(kind, stages, micro_batches, unit=1):
    """A step of a pipeline whose stages take equally long: for each stage its
    [(kind, micro-batch, begin, length)], a forward `unit` long and a backward twice that.

    kind: "GPipe", all forwards first, or "1F1B", one forward, one backward. D.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2. A stage begins when it is free and its input
    has arrived.
    """
    orders = []
    for stage in range(stages):
        ahead = micro_batches if kind == "GPipe" else min(stages - stage, micro_batches)
        order = [("forward", number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(("backward", number))
            if ahead + number < micro_batches:
                order.append(("forward", ahead + number))
        orders.append(order)
    spans, ends = [[] for _ in orders], {}  # ends: {(kind, micro-batch, stage): when}
    while any(orders):
        for stage, order in enumerate(orders):
            if order and (begin := arrival(*order[0], stage, stages, ends)) is not None:
                what, number = order.pop(0)
                if spans[stage]:
                    *_, last, length = spans[stage][-1]
                    begin = max(begin, last + length)
                length = unit if what == "forward" else 2 * unit
                spans[stage].append((what, number, begin, length))
                ends[what, number, stage] = begin + length
    return spans


def arrival(what, number, stage, stages, ends):
    """When a stage has its input; None while the stage before it is not done."""
    source = stage - 1 if what == "forward" else stage + 1
    return ends.get((what, number, source)) if 0 <= source < stages else 0


# ---- stages that sleep ----
