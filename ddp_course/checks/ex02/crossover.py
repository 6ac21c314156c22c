"""Question 4: the size from which a ring all-reduce is faster than a tree."""

import math
from collections import defaultdict, deque
from contextlib import suppress

import torch
import torch.distributed as dist

from ddp_course import lesson02
from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def predictions(crossover, cases):
    """What `crossover` returns for each case (n, alpha, beta)."""
    predicted = []
    for case in cases:
        with trying("crossover(n={}, alpha={:.3g}, beta={:.3g})".format(*case)):
            predicted.append(as_float(crossover(*case)))
    return predicted


def as_float(value):
    """A number of any kind, also a tensor's, as a float; anything else unchanged."""
    with suppress(TypeError, ValueError):
        if hasattr(value, "__float__") and not isinstance(value, bool):
            return float(value)
    return value


def tree_all_reduce(tensor):
    """The sums go up a tree to rank 0, by pairs, and the total comes down again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    distances = [2**k for k in range((n - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            received = torch.empty_like(tensor)
            dist.recv(received, rank + distance)
            tensor += received
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(tensor, rank + distance)


LARGE = 20, 48, 64, 100, 1000  # ranks: too many to run, but not to predict
WAYS = {"tree": tree_all_reduce, "ring": lesson02.ring_all_reduce}


def messages_of_all_reduces(lengths):
    """This rank's log of each way of an all-reduce, {way: [of each length]}."""
    logs = {}
    with process_group() as (rank, n):
        for way, all_reduce in WAYS.items():
            logs[way] = []
            for length in lengths:
                tensor = torch.full([length], rank + 1.0, dtype=torch.float64)
                with CheckedWatch() as watch:
                    all_reduce(tensor)
                assert tensor.eq(n * (n + 1) / 2).all()
                logs[way].append(sends_first(watch.log) if way == "ring" else watch.log)
    return logs


def sends_first(log):
    """In each step of the ring, a send and a receive begin together: their order in the
    log says nothing.
    """
    steps = zip(log[::2], log[1::2])
    return [entry for step in steps for entry in sorted(step, key=received)]


def received(entry):
    return entry["name"] != "send"


def seconds_of(logs, alpha, beta):
    """The seconds until the last message has arrived, if each takes alpha + beta * bytes.

    A rank sends one message at a time, and receives one at a time; both at once is
    possible. It sends only after it has what it received before.
    """
    sending, receiving = [0.0] * len(logs), [0.0] * len(logs)
    todo, on_the_way = [deque(log) for log in logs], defaultdict(deque)
    while any(todo):
        for rank, entries in enumerate(todo):
            while entries:
                peer, seconds = entries[0]["peer"], alpha + beta * entries[0]["bytes"]
                if entries[0]["name"] == "send":
                    start = max(sending[rank], receiving[rank])
                    sending[rank] = start + seconds
                    on_the_way[rank, peer].append(start)
                elif on_the_way[peer, rank]:
                    start = on_the_way[peer, rank].popleft()
                    receiving[rank] = max(receiving[rank], start) + seconds
                else:
                    break  # it waits for a message that has not been sent yet
                entries.popleft()
    return max(sending + receiving)


def lines(of_ranks, sizes, alpha, beta):
    """The seconds of each way as a line over the bytes: {way: (seconds of 0 bytes,
    seconds per byte)}.
    """
    found = {}
    for way in WAYS:
        small, large = (seconds_of([of_rank[way][place] for of_rank in of_ranks], alpha, beta) for place in (0, 1))
        slope = (large - small) / (sizes[1] - sizes[0])
        found[way] = small - slope * sizes[0], slope
    return found


def formulas(n, alpha, beta):
    """The lines of the lesson's formulas: {way: (seconds of 0 bytes, seconds per byte)}."""
    seconds = {"tree": lesson02.tree_seconds, "ring": lesson02.ring_seconds}
    return {way: (of_way(0, n, alpha, beta), of_way(1, n, 0, beta)) for way, of_way in seconds.items()}


def claims(case, got, of_ways, source, cases, predicted):
    """Claims that `got` is where tree and ring take equally long. of_ways: see lines();
    source: where these come from, in words.
    """
    n, alpha, beta = case
    what = f"crossover(n={n}, alpha={alpha:.4g}, beta={beta:.4g})"
    number, says = isinstance(got, float), got
    cause = "return one number, the bytes"
    if got is None:
        cause, says = "the function ends without a return statement", "nothing"
    yield Claim(what, number, True, cause, told="a number of bytes", shown=says)
    (tree_alpha, tree_beta), (ring_alpha, ring_beta) = of_ways["tree"], of_ways["ring"]
    expected = max(0.0, (ring_alpha - tree_alpha) / (tree_beta - ring_beta))
    says = f"{got:,.0f} bytes" if abs(got) >= 10 else f"{got:.3g} bytes"
    if 0 <= got < 1e12:
        tree, ring = (1e3 * (start + per * got) for start, per in of_ways.values())
        says += f", where the tree takes {tree:.3f} ms and the ring {ring:.3f} ms"
    told, cause = (
        f"{expected:,.0f} bytes, where both take equally long (from {source})",
        lambda: why(cases, predicted, got),
    )
    if expected < 1:
        told = f"0: with {n} ranks, the ring is faster for any size"
        cause = (
            f"with {n} ranks, tree and ring have the same number of messages in a row, and those of the ring have fewer "
            "bytes: it is never slower"
        )
    off = 1e-3 * expected + 1
    yield Claim(what, got, Between(expected - off, expected + off), cause, told=told, shown=says)


def why(cases, predicted, got):
    """The likely mistake: the formula that explains the numbers of all cases."""
    if math.isnan(got):
        return "it is not a number: is 0 divided by 0?"
    for formula, cause in LOOKS:
        if all(agrees(formula, case, one) for case, one in zip(cases, predicted)):
            return cause
    if alike(cases, predicted):
        return "it is the same for different α and β, but the size depends on both: use the arguments of each call"
    if got < 0:
        return (
            "a size cannot be negative: the ring has more messages in a row, and the tree more bytes, so the ring is "
            "slower below the size and faster above it"
        )
    return "set the seconds of both equal: 2 ⌈log₂ n⌉ messages of b bytes for the tree, 2 (n − 1) of b / n for the ring"


def alike(cases, predicted):
    """Whether only the number of ranks decides what is predicted."""
    of_ranks = defaultdict(set)
    for (n, _, _), one in zip(cases, predicted):
        of_ranks[n].add(str(one))
    return all(len(some) == 1 for some in of_ranks.values())


def agrees(formula, case, got):
    n, alpha, beta = case
    try:
        value = formula(n, (n - 1).bit_length(), alpha, beta)
    except ZeroDivisionError:
        return True  # it has no value there, so the answer must have given another one
    return isinstance(got, float) and any(math.isclose(got, one, rel_tol=1e-3) for one in (value, max(0, value)))


def solved(n, rounds, alpha, beta, ring=None, tree=1, way=1, pieces=None):
    """The size at which `tree` * rounds messages of b bytes take as long as `ring`
    messages of b / pieces.
    """
    ring, pieces = way * (n - 1) if ring is None else ring, pieces or n
    return alpha * (ring - tree * rounds) / (beta * (tree * rounds - ring / pieces))


LOOKS = [
    (lambda n, L, a, b: 0, "it is always 0, but from 4 ranks on, the tree has fewer messages in a row, and is faster for "
                           "small tensors"),
    (lambda n, L, a, b: solved(n, math.log2(n), a, b), "the tree has a whole number of rounds: log₂ n, rounded up"),
    (lambda n, L, a, b: solved(n, int(math.log2(n)), a, b), "the tree needs a last round, with fewer pairs: log₂ n must be "
                                                            "rounded up, not down"),
    (lambda n, L, a, b: solved(n, n.bit_length(), a, b), "where n is a power of two, the tree has log₂ n rounds, not one "
                                                         "more: (n - 1).bit_length()"),
    (lambda n, L, a, b: solved(n, math.ceil(math.log(n)), a, b), "the number of ranks doubles in each round, so it is log₂, "
                                                                 "not the natural logarithm: math.log2(n)"),
    (lambda n, L, a, b: a / b, "α / β is the size at which latency and bytes of one message take equally long: set the "
                               "seconds of tree and ring equal"),
    (lambda n, L, a, b: a * (n - 1 - L) / (b * L), "in the ring, the bytes cost time, too: 2 (n − 1) messages of b / n"),
    (lambda n, L, a, b: solved(n, L, a, b) / 8, "it is the size in numbers of 8 bytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, a, b) / 4, "it is the size in numbers of 4 bytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, a, b) / 1024, "it is the size in kilobytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, a, b) / 1000, "it is the size in kilobytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, a, b) / 1024**2, "it is the size in megabytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, a, b) / 1000**2, "it is the size in megabytes: return bytes"),
    (lambda n, L, a, b: solved(n, L, b, a), "α and β are swapped: a message of b bytes takes α + β b"),
    (lambda n, L, a, b: solved(n, L, a, b, pieces=1), "a message of the ring has b / n bytes, not b"),
    (lambda n, L, a, b: solved(n, L, a, b) / n, "it is the size of one piece of the ring: return that of the whole tensor"),
    (lambda n, L, a, b: solved(n, L, a, 1 / b), "beta is in seconds per byte: multiply it by the bytes"),
    (lambda n, L, a, b: solved(n, L, a, b, way=2), "the tree has to come back as well: 2 ⌈log₂ n⌉ messages in a row"),
    (lambda n, L, a, b: solved(n, L, a, b, tree=2), "the ring goes round twice: 2 (n − 1) messages in a row"),
    (lambda n, L, a, b: solved(n, L, a, b, ring=n), "the ring has 2 (n − 1) messages in a row, not 2 n"),
    (lambda n, L, a, b: solved(n, L, a, b, pieces=n - 1), "the ring cuts the tensor into n pieces, not n − 1"),
    (lambda n, L, a, b: -solved(n, L, a, b), "the sign is wrong: the ring is slower below the size and faster above it"),
    (lambda n, L, a, b: (solved(n, L, a, b)) * 2, "it is twice the size at which both take equally long"),
]  # fmt: skip


@question(
    "Write down the seconds of both, from the lesson's table. Which of the two has fewer messages in a row, and which has "
    "fewer bytes? At the size that you look for, both take equally long.",
    "The tree takes 2 L (α + β b) with L = ⌈log₂ n⌉, and the ring 2 (n − 1) (α + β b / n). Set them equal, and solve for b: "
    "what is multiplied by b goes to one side, the rest to the other.",
    "b = α (n − 1 − L) / (β (L − (n − 1) / n)), with L = (n - 1).bit_length(), or math.ceil(math.log2(n)). For 2 and 3 "
    "ranks it is 0.",
)
def check_crossover(answer, draw):
    """The predicted size must be where the messages of a tree and of a ring, counted on
    real ranks, take equally long.
    """
    several = [4, draw.choice([5, 6, 7]), draw.choice([2, 3])]
    links = [(draw.uniform(1e-5, 6e-5), 1 / draw.uniform(0.5e9, 5e9)) for _ in range(2)]
    # large numbers of ranks as well: some mistakes look alike for the small ones
    large = [LARGE[0], draw.choice(LARGE[1:])]
    cases = [(n, alpha, beta) for n in [*several, *large] for alpha, beta in links]
    predicted = answer.on_ranks(predictions, cases)[0]
    for n in several:
        lengths = 40 * n, 160 * n  # the ring's pieces are all equal
        # these are the course's own all-reduces: on a busy machine, they may take longer
        of_ranks = answer.without(messages_of_all_reduces, lengths, nproc=n, timeout=20)
        sizes, source = [8 * length for length in lengths], f"messages counted on {n} ranks"
        for case, got in zip(cases, predicted):
            if case[0] == n:
                hold(claims(case, got, lines(of_ranks, sizes, *case[1:]), source, cases, predicted))
    source = f"the lesson's formulas, which also held for the messages of {several[0]} ranks"
    for case, got in zip(cases, predicted):
        if case[0] in large:
            hold(claims(case, got, formulas(*case), source, cases, predicted))
