"""A stream of documents of unknown length, cut into windows and dealt to the ranks."""

import tracemalloc
from itertools import accumulate

import torch

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.watch import memory_timeline

# ---- what a rank does ----


class Documents:
    """An iterator over documents of these lengths, which counts how many were read.

    Token i of the stream is first + i, so that each token shows its place.
    """

    def __init__(self, lengths, first):
        self.lengths, self.read, self.place = lengths, 0, first

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == len(self.lengths):
            raise StopIteration
        end = self.place + self.lengths[self.read]
        self.place, self.read, document = end, self.read + 1, (self.place, end)
        return torch.arange(*document)


def dealt(deal_out, cases):
    """What the answer yields on each rank, for each case: its windows, and how many
    documents it had read at each of them.
    """
    seen, first = [], 0
    for case in cases:
        of_ranks = []
        for rank in range(case["ranks"]):
            first += 1000  # tokens of an earlier call are then seen
            with trying(f"{in_words(case)}, rank {rank} of {case['ranks']}"):
                of_ranks.append(windows_of(deal_out, rank, first, **case))
        seen.append(of_ranks)
    return seen


def windows_of(deal_out, rank, first, lengths, context, ranks, start):
    """[windows, documents read at each]; the tokens as their places in the stream."""
    documents, pairs, read = Documents(lengths, first), [], []
    for window in deal_out(documents, context, rank, ranks, start):
        pairs.append(window)
        read.append(documents.read)
    # not before the end: a window that was yielded must not change
    return [[in_places(pair, first) for pair in pairs], read]


def in_places(pair, first):
    """Tokens and targets as places in the stream, or what was yielded instead."""
    try:
        tokens, targets = pair
    except (TypeError, ValueError):
        return f"a {type(pair).__name__}"
    for one in (tokens, targets):
        if not isinstance(one, torch.Tensor):
            return f"a {type(one).__name__} instead of a tensor"
        if one.dtype != torch.int64 or one.dim() != 1:
            return f"a tensor of {one.dtype} with shape {tuple(one.shape)}"
    return [(tokens - first).tolist(), (targets - first).tolist()]


def tokens_kept(deal_out, case):
    """The most tokens that the answer has in memory at once, in tensors, documents
    included, or in lists and arrays: each token has at least 8 bytes.
    """

    def run():
        documents = Documents(case["lengths"], 1000)
        context, ranks, start = case["context"], case["ranks"], case["start"]
        with trying(in_words(case)):
            for _ in deal_out(documents, context, 0, ranks, start):
                pass

    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with memory_timeline() as in_tensors:  # its list would count above
        run()
    return max(peak, *in_tensors) // 8


def in_words(case):
    words = f"{len(case['lengths'])} documents with {sum(case['lengths'])} tokens, "
    ranks = f"{case['ranks']} rank{'s' * (case['ranks'] > 1)}"
    return words + f"context {case['context']}, {ranks}, start={case['start']}"


# ---- the question ----


@question(
    "A round is ranks * context tokens of the stream: in each round, every rank has one window. How many tokens must you "
    "have before you know that a round is complete, with its last target? What do you do with the tokens that remain "
    "after it?",
    "Keep a tensor of tokens that have been read and not yet used. Append each document to it, without those that belong "
    "to the first `start`. While it has more than ranks * context tokens, yield the window of this rank, which begins at "
    "rank * context, and take the round off. What remains at the end is dropped without any more code.",
    "kept = torch.empty(0, dtype=torch.int64); for document in documents: done = min(start, len(document)); start -= "
    "done; kept = torch.cat([kept, document[done:]]); while len(kept) > ranks * context: first = rank * context; yield "
    "kept[first : first + context], kept[first + 1 : first + context + 1]; kept = kept[ranks * context :].",
)
def check_deal_out(answer, draw):
    """Streams of many kinds, dealt to 1 to 4 ranks: the windows must be adjacent, dealt
    in turn, equally many on all ranks, and yielded as soon as their round is complete.
    """
    cases = cases_of_streams(draw)
    [seen] = answer.on_ranks(dealt, cases)
    for judge in (judge_windows, judge_places, judge_reading):
        for case, of_ranks in zip(cases, seen):
            judge(in_words(case), case, of_ranks)
    lengths = [draw.randrange(300, 600) for _ in range(80)]
    long = {"lengths": lengths, "context": 32, "ranks": 3, "start": 700}
    [kept] = answer.on_ranks(tokens_kept, long)
    if kept > sum(lengths) // 2:
        cause = (
            "what all ranks have had stays in memory, which is too small for a whole corpus: keep only the tokens that "
            "belong to the next round"
        )
        raise Wrong(
            in_words(long),
            expected=f"at most a round ({32 * 3} tokens) and a document at once",
            got=f"the memory of {kept:,} tokens",
            cause=cause,
        )


def cases_of_streams(draw):
    """Streams that end within a round, with it, or just before its last target."""
    cases = []
    for ranks in (1, 2, 3, 4):
        context = draw.randrange(3, 8)
        round_ = ranks * context
        extras = (0, 1, 1 + context * draw.randrange(0, ranks), round_)
        starts = (0, draw.randrange(1, 3 * round_))
        for extra, start in zip(extras, starts * 2):
            length = start + round_ * draw.randrange(2, 5) + extra
            case = {"context": context, "ranks": ranks, "start": start}
            cases.append({"lengths": documents_of(draw, length, start, round_)} | case)
    short = {"context": 5, "ranks": 2}
    cases.append({"lengths": [4, 0, 3], "start": 0} | short)
    cases.append({"lengths": [6, 5, 3], "start": 12} | short)
    cases.append({"lengths": [], "start": 0} | short)
    return sorted(cases, key=lambda case: case["start"])  # the easier ones first


def documents_of(draw, length, start, round_):
    """A stream of this length in documents: most are short, one is empty, one has a
    round or two, and one often ends with the first round.
    """
    borders = {0, length, min(length, start + round_)}
    borders |= {draw.randrange(length) for _ in range(length // 4)}
    long = draw.randrange(max(1, length - 2 * round_))
    end = long + draw.choice([1, 2]) * round_
    borders = sorted(place for place in borders if not long < place < end)
    lengths = [end - begin for begin, end in zip(borders, borders[1:])]
    lengths.insert(draw.randrange(len(lengths)), 0)
    return lengths


def judge_windows(checked, case, of_ranks):
    """Raise Wrong unless each window is a part of the stream, with its targets."""
    for rank, (pairs, _) in enumerate(of_ranks):
        for pair in pairs:
            judge_pair(checked, f"{rank} of {case['ranks']}", pair, case)


def judge_pair(checked, where, pair, case):
    """Raise Wrong unless a window's tokens are adjacent, and its targets follow them."""
    context, length = case["context"], sum(case["lengths"])
    if isinstance(pair, str):
        cause = "yield a pair, tokens and targets, both of them a tensor of int64 with one dimension: an embedding looks up "
        cause += "the tokens, and cross_entropy takes int64 only"
        raise Wrong(checked, rank=where, expected="two tensors of int64", got=pair, cause=cause)  # fmt: skip
    if len(pair[0]) != context or len(pair[1]) != context:
        cause = (
            "each window is a pair of tokens and targets, both of them `context` long: the last target is the token after "
            "the window, so wait for it, too"
        )
        raise Wrong(
            checked,
            rank=where,
            expected=f"{context} tokens, {context} targets",
            got=[len(one) for one in pair],
            cause=cause,
        )
    tokens, targets = pair
    if any(not 0 <= place < length for place in tokens + targets):
        cause = (
            "these tokens are not of this stream: does something remain from an earlier call, or of a buffer that was "
            "never filled?"
        )
        raise Wrong(
            checked,
            rank=where,
            expected=f"tokens of this stream, at places 0 to {length - 1}",
            got=f"{tokens}, {targets}, counted from its first token",
            cause=cause,
        )
    text = tokens + targets[-1:] if targets[:-1] == tokens[1:] else tokens
    adjacent = list(range(text[0], text[0] + len(text)))
    if text != adjacent:
        cause = (
            "the tokens of a window are adjacent in the stream, also where one document ends and the next begins, and a "
            "window that was yielded must not change"
        )
        gaps = {now - before - 1 for before, now in zip(text, text[1:])}
        if case["start"] and case["start"] in gaps:
            cause = "leave out the first `start` tokens of the whole stream, and not those of each document"
        raise Wrong(checked, rank=where, expected=adjacent, got=text, cause=cause)
    if (expected := [token + 1 for token in tokens]) != targets:
        cause = "targets are the same text one place later"
        if tokens == targets:
            cause = f"targets and tokens are the same, so there is nothing to predict: {cause}"
        raise Wrong(checked, rank=where, expected=expected, got=targets, cause=cause)


def judge_places(checked, case, of_ranks):
    """Raise Wrong unless the ranks' windows are adjacent and dealt in turn, as many to
    each rank.
    """
    places = [[pair[0][0] for pair in pairs] for pairs, _ in of_ranks]
    context, ranks, start = case["context"], case["ranks"], case["start"]
    length, counts = sum(case["lengths"]), [len(of_rank) for of_rank in places]
    each = max(0, length - start - 1) // (ranks * context)
    wanted = f"{each} window{'s' * (each != 1)} on each rank"
    expected = [start + number * context for number in range(each * ranks)]
    everything = sorted(place for of_rank in places for place in of_rank)
    for before, now in zip(everything, everything[1:]):
        if now - before < context:
            rank = next(rank for rank, of_rank in enumerate(places) if now in of_rank)
            cause = "windows overlap, so some tokens are learnt twice: a window must begin where the last one ends"
            if now == before:
                cause = (
                    "two ranks have the same window, or one rank has it twice: rank r takes windows r, r + ranks, ..."
                )
            raise Wrong(checked, rank=f"{rank} of {ranks}", expected=f"windows that begin {context} apart",
                        got=f"at {before} and {now}", cause=cause)  # fmt: skip
    if everything and everything[0] != start:
        cause = "the first `start` tokens of the whole stream are left out, not more and not fewer"
        raise Wrong(
            checked, expected=f"the first window begins at {start}", got=f"it begins at {everything[0]}", cause=cause
        )
    if everything != list(range(start, start + len(everything) * context, context)):
        cause = (
            "tokens between two windows are lost: a window begins at the last target of the one before it, also if that "
            "is in another document, and every window is on some rank"
        )
        raise Wrong(checked, expected=f"windows at {expected}", got=everything, cause=cause)  # fmt: skip
    if len(set(counts)) > 1:
        cause = (
            "a rank with one more window would wait for the others in its last update: yield a window only when its "
            "round is complete"
        )
        raise Wrong(checked, expected=wanted, got=counts, cause=cause)
    if counts[0] != each:
        cause = (
            "there are tokens for one more round: it needs ranks * context + 1 of them, and one document may have none of "
            "these, or enough for several rounds"
        )
        if start and not everything:
            cause = "nothing is left: leave out `start` tokens of the whole stream, not windows, nor of each document"
        raise Wrong(checked, expected=wanted, got=counts[0], cause=cause)
    for rank, of_rank in enumerate(places):
        if of_rank != expected[rank::ranks]:
            raise Wrong(
                checked,
                rank=f"{rank} of {ranks}",
                expected=f"windows at {expected[rank::ranks]}",
                got=of_rank,
                cause=cause_of_dealing(of_rank, expected, rank, ranks),
            )


def cause_of_dealing(of_rank, expected, rank, ranks):
    each = len(expected) // ranks
    if of_rank == expected[rank * each : (rank + 1) * each]:
        return (
            "each rank has a block of neighbouring windows: deal them in turn, so that all ranks read the same part of "
            "the text at a time"
        )
    if sorted(of_rank) == expected[rank::ranks]:
        return "these are the right windows, but not in the order of the text"
    return "every window is on one rank, but they were not dealt in turn: rank r takes windows r, r + ranks, ..."


def judge_reading(checked, case, of_ranks):
    """Raise Wrong unless each window was yielded when its round was complete. To have
    read one document more does no harm.
    """
    ends = list(accumulate(case["lengths"]))
    round_ = case["ranks"] * case["context"]
    for rank, (_, read) in enumerate(of_ranks):
        for number, documents in enumerate(read):
            needed = case["start"] + (number + 1) * round_ + 1
            enough = next(place for place, end in enumerate(ends, 1) if end >= needed)
            if enough <= documents <= enough + 1:
                continue
            cause = (
                "more documents were read than this round needs, and they do not fit into memory: yield a window as soon "
                "as its round is complete"
            )
            if documents < enough:
                cause = (
                    "it was yielded before its round was complete: if the stream had ended there, this rank would have "
                    "had one window more than others"
                )
            raise Wrong(
                checked,
                rank=f"{rank} of {case['ranks']}",
                expected=f"window {number} of this rank after {enough} documents",
                got=f"after {documents}",
                cause=cause,
            )
