"""Question 4: what a ring and an all-to-all send."""

from ddp_course.checks.claims import agree
from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question

RING, SWAP = "ring", "all-to-all"
BYTES, OF_GRADIENTS = 2, 4  # per number: bf16, and the sums of a ring's gradients
DIGITS = 9  # to which bytes must agree


def count(
    tokens, heads, key_heads, head_width, ranks, rounds=None, home=None, parts=None, copies=True, share=None,
    both=2, ring_both=None, of_gradients=OF_GRADIENTS, of_rank=None, keys=None,
):  # fmt: skip
    """(bytes of a ring, bytes of an all-to-all or None, the one that sends less).

    The other arguments are what people take for something else.
    """
    own = tokens / ranks if of_rank is None else of_rank
    rounds = ranks - 1 if rounds is None else rounds
    home = (ranks if ranks > 1 else 0) if home is None else home
    of_keys = own * (key_heads if keys is None else keys) * head_width
    ring = 2 * of_keys * ((ring_both or both) * rounds * BYTES + home * of_gradients)
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        return float(ring), None, RING
    sent = max(key_heads, ranks) if copies else key_heads
    share = (ranks - 1) / ranks if share is None else share
    swap = (2 * heads + 2 * sent if parts is None else parts) * own * head_width * share * BYTES * both
    return float(ring), float(swap), RING if ring <= swap else SWAP


def right(*case):
    return count(*case)


MISTAKES = {
    "the gradients of keys and values are sums in float32, 4 bytes per number": lambda *c: count(*c, of_gradients=BYTES),
    "the gradients of keys and values travel, too, in the ring's backward: n times": lambda *c: count(*c, home=0),
    "in the ring's backward, the gradients have to come home to their rank: they travel n times, not n - 1 times":
        lambda *c: count(*c, home=c[4] - 1),
    "the ring's last keys and values are not passed on: they travel n - 1 times, not n times":
        lambda *c: count(*c, rounds=c[4]),
    "the ring sends keys and values in backward, too": lambda *c: count(*c, ring_both=1),
    "this is for forward only: backward sends, too": lambda *c: count(*c, both=1, home=0),
    "a rank keeps 1/n of what it exchanges: the all-to-all sends (n - 1)/n of it": lambda *c: count(*c, share=1),
    "if there are more ranks than heads of keys, these are copied: n heads of keys and n of values travel":
        lambda *c: count(*c, copies=False),
    "the ring sends keys and values, which have key_heads heads, and not heads": lambda *c: count(*c, keys=c[1]),
    "keys and values have fewer heads than queries: 2 * heads (queries and output) + 2 * heads of keys":
        lambda *c: count(*c, parts=4 * c[1]),
    "the output is exchanged, too: four all-to-alls in forward": lambda *c: count(*c, parts=c[1] + 2 * max(c[2], c[4])),
    "each rank has tokens / n of the tokens": lambda *c: count(*c, of_rank=c[0]),
    "with one rank, nothing is sent": lambda *c: count(*c, home=c[4]),
    "the one that sends less is the one with fewer bytes": lambda *c: (*count(*c)[:2], other_one(count(*c))),
    "where the all-to-all is impossible, its bytes are None": lambda *c: nothing_for_none(*count(*c)),
}  # fmt: skip


def other_one(found):
    return found[2] if found[1] in (None, found[0]) else SWAP if found[2] == RING else RING


def nothing_for_none(ring, swap, name):
    return ring, 0.0 if swap is None else swap, name


def otherwise(case, got):
    """The cause of what none of the mistakes explains: which part is wrong, and why."""
    _, heads, key_heads, _, ranks = case
    ring, swap, name = right(*case)
    if not isinstance(got, list) or len(got) != 3:
        return "return three values: the bytes of the ring, those of the all-to-all or None, and a name"
    if swap is None and got[1] is not None:
        if heads % ranks:
            return f"the all-to-all is impossible here: {ranks} ranks do not divide {heads} heads. Its bytes are None"
        return (
            f"the all-to-all is impossible here: {key_heads} heads of keys can neither be divided by {ranks} ranks nor be "
            "copied until there is one per rank. Its bytes are None"
        )
    if swap is not None and got[1] is None:
        how = (
            "heads of keys are copied until there is one per rank"
            if key_heads < ranks
            else "each rank gets some of each"
        )
        return (
            f"the all-to-all is possible here, with {heads} heads and {key_heads} heads of keys on {ranks} ranks: {how}"
        )
    if not agree(got[0], ring, DIGITS):
        return (
            "go through what travels in the ring: how many times in forward and in backward, how many heads, how many bytes "
            "per number"
        )
    if not agree(got[1], swap, DIGITS):
        return (
            "go through what travels in the all-to-all: which tensors in forward and in backward, how many heads, and what "
            "stays on the rank"
        )
    return (
        f'the name is "{RING}" or "{SWAP}": the one that is possible and sends fewer bytes; the ring if they are equal'
    )


@question(
    "Take forward and backward apart. In the ring, what travels in each, and how many times? In the all-to-all, which "
    "tensors are exchanged in forward, and which gradients in backward? What does a rank keep for itself?",
    "A rank has tokens / n tokens. Ring: keys and values travel n - 1 times in forward and n - 1 times in backward, in 2 "
    "bytes, and their gradients n times in 4 bytes; nothing with one rank. All-to-all: queries, keys, values and output, "
    "the same again in backward, (n - 1)/n of each. Keys have max(key_heads, n) heads on their way.",
    "own = tokens // ranks * head_width; ring = 2 * own * key_heads * (2 * 2 * (ranks - 1) + 4 * ranks), 0 for one rank; "
    "swap = 2 * 2 * own * (2 * heads + 2 * max(key_heads, ranks)) * (ranks - 1) // ranks, if heads % ranks == 0 and "
    "(key_heads % ranks == 0 or ranks % key_heads == 0).",
)
def check_bytes_sent(answer, draw):
    """Shapes and numbers of ranks of all kinds, possible for an all-to-all or not."""
    cases = [
        (8192, 8, 8, 16, 2), (8192, 32, 8, 128, 4), (4096, 32, 8, 128, 16), (4096, 32, 8, 128, 1), (6144, 12, 4, 64, 3),
        (6144, 12, 4, 64, 6), (6144, 12, 8, 64, 12), (131072, 128, 8, 128, 16), (8192, 32, 2, 64, 32), (3072, 6, 6, 64, 4),
    ]  # fmt: skip
    while len(cases) < 40:
        key_heads = draw.choice([1, 2, 3, 4, 6, 8])
        heads, ranks = key_heads * draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3, 4, 6, 8, 12, 16])
        cases.append((2 * ranks * heads * draw.randrange(10, 99), heads, key_heads, draw.choice([16, 64, 128]), ranks))
    check_function(answer, draw, "bytes_sent", cases, right, MISTAKES, otherwise, digits=DIGITS)
