"""The bytes of question 4, and what likely mistakes give."""

RING, SWAP = "ring", "all-to-all"
BYTES, OF_GRADIENTS = 2, 4  # per number: bf16, and the sums of a ring's gradients


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
