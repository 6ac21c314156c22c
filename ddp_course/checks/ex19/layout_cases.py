"""The texts of question 2: (lengths of documents, ranks, tokens of a piece)."""

SIMPLE = [
    ([32], 2, 2),
    ([20, 20, 8], 2, 2),
    ([12] * 10, 3, 4),  # in the text's order, a rank always has the last piece of a document
    ([*[12], *[1] * 12] * 6, 3, 4),  # to and fro, too
    ([1] * 24, 3, 2),
    ([7, 9, 11, 5], 1, 4),
    ([*[3] * 24, 72], 4, 3),
    ([100, *[4] * 15], 4, 5),
    ([9, 1, 14, 23, 2, 31], 4, 4),  # documents end within pieces
    ([64, *[1] * 64], 4, 1),
    ([5, 11], 2, 8),  # a piece per rank
    ([40, 8] * 5, 2, 8),
    ([1, 1, 3, 4, 1, 1, 1, 4] * 12, 2, 4),  # documents shorter than a piece: one of its tokens tells little
    ([1, 1, 1, 4, 1, 4] * 12, 2, 4),
    ([1, 1, 1, 1, 3, 1] * 12, 2, 4),  # all pieces have the same first and last position, or the same middle one
    ([*[1] * 48, *[3, 1] * 12], 2, 4),
    ([1, 1, 1, 1, 2, 2] * 12, 2, 4),
    ([*[1] * 48, *[2, 2] * 12], 2, 4),
    ([1, 1, 1, 1, 1, 3] * 12, 2, 4),
    ([*[1] * 48, *[1, 3] * 12], 2, 4),
    ([1, 1, 1, 1, 3, 1, 3, 1, 1, 1, 1, 1] * 6, 2, 4),  # the same for those who deal out to and fro
    ([1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1] * 6, 2, 4),
    ([1, 1, 5, 5, 4] * 12, 2, 4),
    (([16, 9] + [1] * 7) * 4, 2, 8),
]


def drawn(draw, ranks, piece, pieces):
    """A text of so many pieces, cut into documents of very different lengths."""
    tokens = pieces * piece
    number = draw.randrange(2, min(12, tokens))
    cuts = sorted(draw.sample(range(1, tokens), number - 1))
    if draw.random() < 0.5:  # many short ones at the beginning
        cuts = sorted({*cuts, *range(2, tokens // 3, draw.randrange(2, 5))})
    ends = [0, *cuts, tokens]
    return [b - a for a, b in zip(ends, ends[1:])], ranks, piece


def short(draw, ranks, piece):
    """A text of documents mostly shorter than a piece, again and again the same ones."""
    tokens, lengths = ranks * piece, []
    while sum(lengths) < tokens:
        lengths.append(min(draw.choice([1, 1, 1, 2, 3, 4, piece + 1]), tokens - sum(lengths)))
    return lengths * 12, ranks, piece
