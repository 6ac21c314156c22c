"""Question 4: what a ring and an all-to-all send."""

from ddp_course.checks.claims import agree
from ddp_course.checks.ex19.cheaper_mistakes import MISTAKES, RING, SWAP, right
from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question

DIGITS = 9  # to which bytes must agree


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
        (8192, 10, 2, 64, 2),  # both send the same
    ]  # fmt: skip
    while len(cases) < 40:
        key_heads = draw.choice([1, 2, 3, 4, 6, 8])
        heads, ranks = key_heads * draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3, 4, 6, 8, 12, 16])
        cases.append((2 * ranks * heads * draw.randrange(10, 99), heads, key_heads, draw.choice([16, 64, 128]), ranks))
    check_function(answer, draw, "bytes_sent", cases, right, MISTAKES, otherwise, digits=DIGITS)
