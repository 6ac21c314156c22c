"""A stream of tokens, dealt out to the ranks."""

import torch

from ddp_course.school.judge import Wrong, question, trying


def dealt(deal_out, cases):
    """What the answer returns on each rank, for each case: lists of (tokens, targets)."""
    seen = []
    for case in cases:
        stream = (
            torch.arange(case["length"]) + 1000
        )  # token i is 1000 + i, so each token shows its place
        of_ranks = []
        for rank in range(case["ranks"]):
            with trying(
                f"{case['length']} tokens, context {case['context']}, rank {rank} of {case['ranks']}"
            ):
                given = stream.clone()
                pairs = deal_out(given, case["context"], rank, case["ranks"])
                of_ranks.append(
                    [[torch.as_tensor(one).tolist() for one in pair] for pair in pairs]
                )
        seen.append(of_ranks)
    return seen


@question(
    "Window w begins at place w * context of the stream, on any rank. The last window needs context + 1 tokens, because "
    "its last target comes after it. So how many windows are there?",
    "(length - 1) // context of them. All ranks must have the same number, otherwise one would wait for the others "
    "in its last update: each has count // ranks windows, and rank r takes windows r, r + ranks, and so on.",
    "count = (len(stream) - 1) // context // ranks * ranks; starts = range(rank * context, count * context, ranks * "
    "context); return [(stream[s : s + context], stream[s + 1 : s + context + 1]) for s in starts]",
)
def check_deal_out(answer, draw):
    """Each window must be on exactly one rank, all ranks have the same number, and
    targets are one place later.
    """
    cases = []
    for ranks in (1, 2, 3, 4):
        context = draw.randrange(3, 8)
        windows = ranks * draw.randrange(2, 5)
        for extra in (1, context, 1 + context * draw.randrange(0, ranks)):
            cases.append(
                {
                    "length": windows * context + extra,
                    "context": context,
                    "ranks": ranks,
                }
            )
    cases.append({"length": 4, "context": 4, "ranks": 1})
    [seen] = answer.on_ranks(dealt, cases)
    for case, of_ranks in zip(cases, seen):
        judge_dealing(case, of_ranks)


def judge_dealing(case, of_ranks):
    length, context, ranks = case["length"], case["context"], case["ranks"]
    checked = f"a stream of {length} tokens, context {context}, {ranks} rank{'s' * (ranks > 1)}"
    each = (length - 1) // context // ranks
    for rank, pairs in enumerate(of_ranks):
        where = f"{rank} of {ranks}"
        for pair in pairs:
            if len(pair) != 2 or len(pair[0]) != context or len(pair[1]) != context:
                lengths = [len(one) for one in pair]
                cause = "each window is a pair of tokens and targets, both of them `context` long: the last target is "
                cause += "the token after the window, so the stream must be long enough to include it"
                raise Wrong(
                    checked,
                    rank=where,
                    expected=f"{context} tokens, {context} targets",
                    got=lengths,
                    cause=cause,
                )
            if pair[0] != list(range(pair[0][0], pair[0][0] + context)):
                cause = "the tokens of a window are adjacent, in the order of the text"
                raise Wrong(
                    checked,
                    rank=where,
                    expected=list(range(pair[0][0], pair[0][0] + context)),
                    got=pair[0],
                    cause=cause,
                )
            if [token + 1 for token in pair[0]] != pair[1]:
                cause = "targets are the same text one place later: stream[start + 1 : start + context + 1]"
                if pair[0] == pair[1]:
                    cause = (
                        "targets and tokens are the same, so there is nothing to predict. "
                        + cause
                    )
                raise Wrong(
                    checked,
                    rank=where,
                    expected=[token + 1 for token in pair[0]],
                    got=pair[1],
                    cause=cause,
                )
    places = [[pair[0][0] - 1000 for pair in pairs] for pairs in of_ranks]
    judge_windows(checked, case, places, each)


def judge_windows(checked, case, places, each):
    """Raise Wrong unless the ranks' windows, by their starts, are adjacent and as many
    on each rank.
    """
    context, ranks = case["context"], case["ranks"]
    counts = [len(of_rank) for of_rank in places]
    everything = sorted(start for of_rank in places for start in of_rank)
    for before, now in zip(everything, everything[1:]):
        if now - before < context:
            rank = next(rank for rank, of_rank in enumerate(places) if now in of_rank)
            cause = "windows overlap, so some tokens are learnt twice: a window must begin where the last one ends"
            if now == before:
                cause = "two ranks have the same window, or one rank has it twice: rank r takes windows r, r + ranks, ..."
            raise Wrong(checked, rank=f"{rank} of {ranks}", expected=f"windows that begin {context} apart",
                        got=f"at {before} and {now}", cause=cause)  # fmt: skip
    if len(set(counts)) > 1:
        cause = (
            "a rank with one more window would wait for the others in its last update: give all ranks the smallest "
            "number"
        )
        raise Wrong(
            checked, expected=f"{each} windows on each rank", got=counts, cause=cause
        )
    if counts[0] != each:
        cause = "the last target needs one more token than the windows: (length - 1) // context windows fit"
        if counts[0] < each:
            cause = "tokens are lost: (length - 1) // context windows fit, and each rank takes that // ranks of them"
        raise Wrong(
            checked, expected=f"{each} windows on each rank", got=counts[0], cause=cause
        )
    expected = list(range(0, each * ranks * context, context))
    if everything != expected:
        cause = "some windows in the middle are on no rank: windows begin at 0 and are adjacent"
        raise Wrong(
            checked, expected=f"windows at {expected}", got=everything, cause=cause
        )
    for rank, starts in enumerate(places):
        dealt_in_turn = expected[rank::ranks]
        if starts != dealt_in_turn:
            cause = "every window is on one rank, but they were not dealt in turn: rank r takes windows r, r + ranks, ..."
            if starts == expected[rank * each : (rank + 1) * each]:
                cause = (
                    "each rank has a block of neighbouring windows: deal them in turn, so that all ranks read the same "
                    "part of the text at a time"
                )
            elif sorted(starts) == dealt_in_turn:
                cause = "these are the right windows, but not in the order of the text"
            raise Wrong(
                checked,
                rank=f"{rank} of {ranks}",
                expected=f"windows at {dealt_in_turn}",
                got=starts,
                cause=cause,
            )
