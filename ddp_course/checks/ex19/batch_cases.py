"""The packed texts of question 3, and which rank has which of their tokens."""

VOCABULARY = 1000
MANY = 2049  # counted tokens that 16 bits do not tell from 2048


def drawn(draw, kind, n, context):
    """A case: the texts of all data ranks, and the layout of their tokens.

    kind: "plain" texts without prompts, "short" documents, some of one token, or some
    with "prompts". In "one rank only", one token counts; in "one text only", the other text
    counts none; in "nothing", no rank does; in "long", an odd number of tokens counts, more
    than 2048.
    """
    if kind == "long":
        return drawn(draw, "plain", n, context) | {"kind": kind, "texts": [a_long_text(draw, context)]}
    texts = [a_text(draw, kind, 2 * context * draw.randrange(5, 9)) for _ in range(n // context)]
    case = {"kind": kind, "n": n, "context": context, "texts": texts}
    case["layout"] = {"plain": "contiguous", "one rank only": "contiguous", "prompts": "zigzag"}.get(kind, "pieces")
    case["order"] = draw.sample(range(2 * context), 2 * context)
    if kind == "nothing":
        hide(texts)
    if kind == "one text only":
        hide(texts[1:])
    if kind == "one rank only":  # one token counts, near the end of the text, on the last rank
        [text] = texts
        text["lengths"], text["prompts"] = [*cut(draw, len(text["tokens"]) - 6), 6], []
        hide(texts)
        text["prompts"][-1] = 5
    return case


def a_text(draw, kind, tokens):
    lengths = cut(draw, tokens - 8, 1 if kind == "short" else 4)
    prompts = [0 if kind == "plain" else draw.randrange(length + 1) for length in lengths]
    lengths, prompts = [*lengths, 4, 1, 3], [*prompts, *([0, 0, 0] if kind == "plain" else [2, 1, 3])]
    numbers = draw.sample(range(1, VOCABULARY), tokens)  # none twice, so that a mistake shows
    numbers[place_of_zero(lengths, prompts)] = 0
    return {"tokens": numbers, "lengths": lengths, "prompts": prompts}


def a_long_text(draw, context):
    """Without prompts: each document counts one token less than it has."""
    tokens = 2 * context * 600
    lengths = cut(draw, tokens, 40)
    if (tokens - len(lengths)) % 2 == 0:  # an odd number counts
        place = lengths.index(max(lengths))
        lengths[place : place + 1] = [1, lengths[place] - 1]
    assert MANY <= tokens - len(lengths)
    numbers = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    return {"tokens": numbers, "lengths": lengths, "prompts": [0] * len(lengths)}


def place_of_zero(lengths, prompts):
    """A place in the middle of an answer; the token 0 is one like any other."""
    begin = 0
    for length, prompt in zip(lengths, prompts):
        if length - prompt >= 2:
            return begin + prompt + 1
        begin += length


def cut(draw, tokens, often=4):
    """Lengths of documents that fill so many tokens."""
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randrange(1, 2 + 2 * often), tokens - sum(lengths)))
    return lengths


def hide(texts):
    for text in texts:
        text["prompts"] = list(text["lengths"])


def places_of(case, rank):
    """Where this rank's tokens are in its text, in the order in which it has them."""
    tokens, context = len(case["texts"][rank // case["context"]]["tokens"]), case["context"]
    half, own = tokens // (2 * context), rank % context
    pieces = {
        "contiguous": [2 * own, 2 * own + 1],
        "zigzag": [own, 2 * context - 1 - own],
        "pieces": case["order"][2 * own : 2 * own + 2],
    }[case["layout"]]
    return [piece * half + place for piece in pieces for place in range(half)]


def described(case):
    texts = "one text" if case["n"] == case["context"] else f"{case['n'] // case['context']} texts"
    words = {
        "plain": "without prompts", "prompts": "with prompts", "short": "of short documents",
        "one rank only": "in which one token counts, on the last rank", "nothing": "in which no token counts",
        "one text only": "of which only the first has tokens that count",
        "long": f"of {len(case['texts'][0]['tokens'])} tokens",
    }[case["kind"]]  # fmt: skip
    layout = {"pieces": "pieces in any order"}.get(case["layout"], case["layout"])
    return f"{case['n']} ranks with {texts} {words}, {layout}"
