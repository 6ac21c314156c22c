"""A pipeline's schedules as plain data: which rank computes what, in which order; when
that is, how long the ranks wait, and how much they keep.

An action is (kind, stage, micro-batch). Kinds are "F", a forward; "B", a backward; and
its two halves, "I", the gradient of the input, and "W", those of the weights. A plan is
a list of actions for each rank.
"""

from itertools import accumulate

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long an action takes


# ---- formulas ----


def bubble(stages, micro_batches, chunks=1):
    """The share of a step in which a rank waits, where all stages take equally long.

    Of GPipe and 1F1B, and with several chunks per rank of the interleaved schedule. Y.
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019; D. Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", 2021, section 2.2. stages: the ranks.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def zero_bubble(stages, micro_batches, chunks=1):
    """The same share of ZB-H1, where F, I and W take equally long; with two chunks per
    rank, of ZB-V.

    P. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism
    with Controllable Memory", 2024.
    """
    return (stages - 1) / (3 * chunks * micro_batches + stages - 1)


# ---- schedules ----


def gpipe(ranks, micro_batches):
    """All forwards, then all backwards."""
    numbers = range(micro_batches)
    return [
        [("F", rank, i) for i in numbers] + [("B", rank, i) for i in numbers]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks, micro_batches):
    """One forward, one backward, after a forward for each stage from here on."""
    plan = []
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        actions = [("F", rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            actions.append(("B", rank, i))
            if ahead + i < micro_batches:
                actions.append(("F", rank, ahead + i))
        plan.append(actions)
    return plan


def zb_h1(ranks, micro_batches):
    """1F1B with a backward in two halves: a later rank does its W later, when it would
    wait otherwise. Section 2.2 of the paper of `zero_bubble`.
    """
    plan = []
    for rank, of_1f1b in enumerate(one_f_one_b(ranks, micro_batches)):
        actions, done = [], 0
        for kind, _, i in of_1f1b:
            actions.append((kind if kind == "F" else "I", rank, i))
            if kind == "B" and i - done >= rank:
                actions.append(("W", rank, done))
                done += 1
        plan.append(actions + [("W", rank, i) for i in range(done, micro_batches)])
    return plan


def interleaved(ranks, micro_batches, chunks=2):
    """1F1B where each rank has several stages: r, r + ranks, r + 2 * ranks, ...

    A rank computes a group of as many micro-batches as there are ranks through one
    chunk, then through its next. Narayanan et al., 2021, see `bubble`. Raises
    ValueError for micro-batches that do not fill the groups.
    """
    if micro_batches % ranks:
        problem = f"{micro_batches} micro-batches are no multiple of {ranks} ranks"
        raise ValueError(f"{problem}, as interleaving needs them")

    def action(kind, rank, place):
        group, place = divmod(place, ranks * chunks)
        chunk, number = divmod(place, ranks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return kind, rank + ranks * chunk, group * ranks + number

    plan, total = [], micro_batches * chunks
    for rank in range(ranks):
        ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        actions = [action("F", rank, place) for place in range(ahead)]
        for place in range(total):
            if ahead + place < total:
                actions.append(action("F", rank, ahead + place))
            actions.append(action("B", rank, place))
        plan.append(actions)
    return plan


PLANS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}


# ---- playing a plan through, without ranks ----


class Deadlock(ValueError):
    """Ranks that wait for each other forever. waiting: {rank: (its action, those that
    it waits for)}.
    """

    def __init__(self, waiting):
        self.waiting = waiting
        told = [
            f"rank {rank} cannot do {in_words(action)} before {in_words(missing[0])}"
            for rank, (action, missing) in waiting.items()
        ]
        super().__init__(f"the ranks wait for each other: {'; '.join(told)}")


def in_words(action):
    kind, stage, micro_batch = action
    return f"{kind} of micro-batch {micro_batch} in stage {stage}"


def stages_of(plan):
    """How many stages a plan has."""
    return 1 + max(stage for actions in plan for _, stage, _ in actions)


def needed(action, stages, halves):
    """The actions that have to be done before this one.

    halves: the (stage, micro-batch) of which the plan computes I and W instead of B.
    """
    kind, stage, i = action
    if kind == "F":
        return [("F", stage - 1, i)] if stage else []
    if kind == "W":
        return [("I", stage, i)]
    before = [("F", stage, i)]
    if stage < stages - 1:
        later = "I" if (stage + 1, i) in halves else "B"
        before.append((later, stage + 1, i))
    return before


def play(plan, unit=1, slowness=()):
    """When the ranks do what, if they follow this plan: for each rank its spans,
    [(kind, stage, micro-batch, begin, length)].

    An action begins when its rank is free and when all that it needs is done. It takes
    the unit times its UNITS, divided by the number of stages per rank. slowness:
    {stage: a factor} for stages that take longer than others. Messages take no time.
    Raises Deadlock for a plan in which ranks wait for each other forever.
    """
    stages, slowness = stages_of(plan), dict(slowness)
    halves = {(s, i) for actions in plan for kind, s, i in actions if kind == "I"}
    unit = unit * len(plan) / stages
    left, free = [list(actions) for actions in plan], [0] * len(plan)
    spans, ends = [[] for _ in plan], {}
    while to_do := sum(map(len, left)):
        waiting = {}
        for rank, actions in enumerate(left):
            while actions:
                before = needed(actions[0], stages, halves)
                if missing := [action for action in before if action not in ends]:
                    waiting[rank] = actions[0], missing
                    break
                kind, stage, _ = action = actions.pop(0)
                begin = max([free[rank], *(ends[each] for each in before)])
                length = unit * UNITS[kind] * slowness.get(stage, 1)
                spans[rank].append((*action, begin, length))
                ends[action] = free[rank] = begin + length
        if sum(map(len, left)) == to_do:
            raise Deadlock(waiting)
    return spans


def schedule(kind, stages, micro_batches, unit=1, **more):
    """A step of a pipeline of this kind, one of PLANS, played through by `play`."""
    return play(PLANS[kind.lower()](stages, micro_batches, **more), unit)


def slots(spans):
    """How long a step takes, in the units that it was played with."""
    return max(begin + length for of in spans for *_, begin, length in of)


def idle(spans):
    """The share of a step in which the ranks wait, counted: its bubble."""
    busy = sum(length for of in spans for *_, length in of)
    return 1 - busy / len(spans) / slots(spans)


def kept_at_most(actions):
    """The most activations of a stage that a rank keeps at a time: those of
    micro-batches that have gone forward through it, and not yet back.

    actions: of one rank, in a plan, or spans, or a log: what begins with a kind. With
    several stages per rank, each keeps its own.
    """
    step = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(accumulate(step[kind] for kind, *_ in actions), default=0)
