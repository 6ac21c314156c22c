"""A stream of documents of unknown length, cut into windows and dealt to the ranks."""

import tracemalloc
from functools import partial
from itertools import accumulate

import torch

from ddp_course.checks.claims import Claim, hold, on_every_rank
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
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
    with process_group():  # of one rank: the answer is asked for others, too
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


# ---- what is claimed ----


def windows(case, rank, of_ranks):
    """Each window is a part of the stream, with its targets."""
    checked, context, length = in_words(case), case["context"], sum(case["lengths"])
    for pair in of_ranks[rank][0]:
        yield Claim(
            checked, isinstance(pair, list), True, "yield a pair, tokens and targets, both of them a tensor of int64 with "
            "one dimension: an embedding looks up the tokens, and cross_entropy takes int64 only",
            told="two tensors of int64", shown=pair,
        )  # fmt: skip
        tokens, targets = pair
        yield Claim(
            checked, [len(tokens), len(targets)], [context, context], "each window is a pair of tokens and targets, both of "
            "them `context` long: the last target is the token after the window, so wait for it, too",
            told=f"{context} tokens, {context} targets",
        )  # fmt: skip
        yield Claim(
            checked, [place for place in tokens + targets if place not in range(length)], [], "these tokens are not of this "
            "stream: does something remain from an earlier call, or of a buffer that was never filled?",
            told=f"tokens of this stream, at places 0 to {length - 1}",
            shown=f"{tokens}, {targets}, counted from its first token",
        )  # fmt: skip
        text = tokens + targets[-1:] if targets[:-1] == tokens[1:] else tokens
        yield Claim(
            checked, text, list(range(text[0], text[0] + len(text))), cause_of_a_gap(text, case["start"]),
            [(tokens + tokens[:1], "the last target is the token after the window, and not the window's first")],
        )  # fmt: skip
        later = "targets are the same text one place later"
        same = f"targets and tokens are the same, so there is nothing to predict: {later}"
        yield Claim(checked, targets, [token + 1 for token in tokens], later, [(tokens, same)])


def cause_of_a_gap(text, start):
    if start and start in {now - before - 1 for before, now in zip(text, text[1:])}:
        return "leave out the first `start` tokens of the whole stream, and not those of each document"
    return (
        "the tokens of a window are adjacent in the stream, also where one document ends and the next begins, and a "
        "window that was yielded must not change"
    )


def places_of(of_rank):
    return [tokens[0] for tokens, _ in of_rank[0]]


def right_places(case):
    context, ranks, start = case["context"], case["ranks"], case["start"]
    rounds = max(0, sum(case["lengths"]) - start - 1) // (ranks * context)
    return [start + number * context for number in range(rounds * ranks)]


def places(case, of_ranks):
    """Together, the windows of all ranks are adjacent, and as many on each rank."""
    checked, context, start, right = in_words(case), case["context"], case["start"], right_places(case)
    found = sorted(place for of_rank in of_ranks for place in places_of(of_rank))
    overlap = [[before, now] for before, now in zip(found, found[1:]) if now - before < context][:1]
    yield Claim(
        checked, overlap, [],
        "windows overlap, so some tokens are learnt twice: a window must begin where the last one ends",
        [([pair], "two ranks have the same window, or one rank has it twice: rank r takes windows r, r + ranks, ...")
         for pair in overlap if pair[0] == pair[1]],
        told=f"windows that begin {context} apart", shown="".join(f"at {before} and {now}" for before, now in overlap),
    )  # fmt: skip
    yield Claim(
        f"{checked}: where the first window begins", found[0] if found else start, start,
        "the first `start` tokens of the whole stream are left out, not more and not fewer",
    )  # fmt: skip
    yield Claim(
        checked, found, list(range(start, start + len(found) * context, context)), "tokens between two windows are lost: a "
        "window begins at the last target of the one before it, also if that is in another document, and every window is "
        "on some rank",
        told=f"windows at {right}",
    )  # fmt: skip
    counts = [len(of_rank[0]) for of_rank in of_ranks]
    checked = f"{checked}: how many windows each rank has"
    yield Claim(
        checked, counts, counts[:1] * len(counts), "a rank with one more window would wait for the others in its last "
        "update: yield a window only when its round is complete",
        told="as many on each rank",
    )  # fmt: skip
    nothing = "nothing is left: leave out `start` tokens of the whole stream, not windows, nor of each document"
    yield Claim(
        checked, counts[0], len(right) // len(counts), "there are tokens for one more round: it needs ranks * context + 1 "
        "of them, and one document may have none of these, or enough for several rounds",
        [(0, nothing)] if start else [],
    )  # fmt: skip


def dealing(case, rank, of_ranks):
    """The windows are dealt in turn."""
    got, right, ranks = places_of(of_ranks[rank]), right_places(case), len(of_ranks)
    each, mine = len(right) // ranks, right[rank::ranks]
    otherwise = "every window is on one rank, but they were not dealt in turn: rank r takes windows r, r + ranks, ..."
    if sorted(got) == mine:
        otherwise = "these are the right windows, but not in the order of the text"
    block = (
        "each rank has a block of neighbouring windows: deal them in turn, so that all ranks read the same part of the "
        "text at a time"
    )
    yield Claim(
        f"{in_words(case)}: where its windows begin", got, mine, otherwise, [(right[rank * each : (rank + 1) * each], block)]
    )  # fmt: skip


def reading(case, rank, of_ranks):
    """Each window is yielded when its round is complete. To have read one document more
    does no harm.
    """
    ends = list(accumulate(case["lengths"]))
    for number, documents in enumerate(of_ranks[rank][1]):
        needed = case["start"] + (number + 1) * case["ranks"] * case["context"] + 1
        enough = next(place for place, end in enumerate(ends, 1) if end >= needed)
        before = (
            "it was yielded before its round was complete: if the stream had ended there, this rank would have had one "
            "window more than others"
        )
        yield Claim(
            in_words(case), documents, enough, "more documents were read than this round needs, and they "
            "do not fit into memory: yield a window as soon as its round is complete",
            [(documents, before)] if documents < enough else [],
            told=f"window {number} of this rank after {enough} documents", shown=f"after {documents}",
        )  # fmt: skip


def memory(case, kept):
    """At most half of the stream is in memory at once."""
    yield Claim(
        in_words(case), kept, range(sum(case["lengths"]) // 2 + 1), "what all ranks have had stays in memory, which is too "
        "small for a whole corpus: keep only the tokens that belong to the next round",
        [(kept, "the tokens that are left out stay in memory until `start` is reached: drop them as they come")]
        if case["start"] > sum(case["lengths"]) // 2 else [],
        told=f"at most a round ({case['ranks'] * case['context']} tokens) and a document at once",
        shown=f"the memory of {kept:,} tokens",
    )  # fmt: skip


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
    for case, of_ranks in zip(cases, seen):
        on_every_rank(partial(windows, case), of_ranks)
    for case, of_ranks in zip(cases, seen):
        hold(places(case, of_ranks))
        on_every_rank(partial(dealing, case), of_ranks)
    for case, of_ranks in zip(cases, seen):
        on_every_rank(partial(reading, case), of_ranks)
    long = {"lengths": [draw.randrange(300, 600) for _ in range(80)], "context": 32, "ranks": 3, "start": 700}
    late = long | {"start": sum(long["lengths"]) * 3 // 4}
    for case in (long, late):
        [kept] = answer.on_ranks(tokens_kept, case)
        hold(memory(case, kept))


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
    cases.append({"lengths": [6, 5, 3], "start": 15} | short)
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
