"""What question 3 claims of a rank's part of a batch, and what likely mistakes give."""

import torch

from ddp_course.checks.claims import Claim, agree
from ddp_course.checks.ex19.batch_cases import described, places_of
from ddp_course.checks.ex19.batch_targets import IGNORED, of_targets

NAMES = ["tokens", "targets", "positions", "documents"]


def whole(case, number):
    """{name: of the whole text of a data rank}; `counts` is whether a target counts."""
    text = case["texts"][number]
    tokens, lengths = torch.tensor(text["tokens"]), torch.tensor(text["lengths"])
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in text["lengths"]])
    prompts, ends = torch.tensor(text["prompts"])[documents], lengths[documents]
    counts = (positions + 1 < ends) & (positions + 1 >= prompts)
    following = torch.cat([tokens[1:], tokens[:1]])
    return {
        "tokens": tokens, "targets": following.masked_fill(~counts, IGNORED), "positions": positions,
        "documents": documents, "counts": counts, "following": following, "prompts": prompts, "ends": ends,
    }  # fmt: skip


def claims(case, rank, of_ranks):
    """Of what a rank gets of the text."""
    seen, words = of_ranks[rank], described(case)
    text, places, got = whole(case, rank // case["context"]), places_of(case, rank), seen["got"]
    five = isinstance(got, list) and len(got) == 5 and all(isinstance(part, torch.Tensor) for part in got)
    yield Claim(
        f"{words}: what is returned", five, True, "return five tensors: tokens, targets, positions, documents, weights",
        told="five tensors", shown=got if not isinstance(got, list) else f"{len(got)} values",
    )  # fmt: skip
    for name, value, of in zip(NAMES, got, (of_tokens, of_targets, of_positions, of_documents)):
        yield Claim(
            f"{words}: the shape of the {name}", list(value.shape), [len(value)], "return one number per own token",
            told="(own tokens,)", shown=tuple(value.shape),
        )  # fmt: skip
        causes, otherwise = on_all_ranks(of, case, [of_rank["got"] for of_rank in of_ranks], NAMES.index(name))[rank]
        yield Claim(f"{words}: the {name}", value, text[name][places], otherwise, causes, digits=6, scale=1e-3)
        yield Claim(f"{words}: the dtype of the {name}", str(value.dtype), "torch.int64", "the dtype is int64")
    yield Claim(
        f"{words}: what the function changes", seen["changed"], [], "leave the arguments as they are: copy first"
    )


def on_all_ranks(of, case, all_got, number):
    """(likely mistakes, otherwise) for each rank: those that explain what all ranks got."""
    found = [of(whole(case, rank // case["context"]), places_of(case, rank)) for rank in range(case["n"])]

    def explains(mistake):
        for (mistakes, _), got in zip(found, all_got):
            if not isinstance(got, list) or len(got) != 5 or not agree(got[number], mistakes[mistake][0]):
                return False
        return True

    kept = [mistake for mistake in range(len(found[0][0])) if explains(mistake)]
    return [([mistakes[mistake] for mistake in kept], otherwise) for mistakes, otherwise in found]


def of_tokens(text, places):
    local = text["tokens"][: len(places)]
    shuffled = text["tokens"][sorted(places)]
    return [
        (text["tokens"], "this is the whole text: take this rank's tokens, text[places]"),
        (local, "these are the first tokens of the text: take this rank's tokens, text[places]"),
        (shuffled, "they are sorted: keep the order of places"),
    ], "this rank's tokens are text[places]"


def of_positions(text, places):
    of_text = torch.arange(len(text["tokens"]))
    own = text["documents"][places]
    in_shard = (own[:, None] == own).tril(-1).sum(1)  # how many of its document come before it
    return [
        (of_text[places], "these are places in the text: count from 0 in each document"),
        (of_text[: len(places)], "these are places among this rank's tokens: count in the document"),
        (in_shard, "this counts the document's tokens on this rank: count all its tokens, in the whole text"),
        (text["positions"][places] + 1, "positions begin at 0"),
    ], "the position of a token is its place in its document, from 0; compute it in the whole text, then take places"


def of_documents(text, places):
    own = text["documents"][places]
    renumbered = torch.unique(own, return_inverse=True)[1]
    changes = torch.cat([torch.zeros(1, dtype=torch.int64), (own[1:] != own[:-1]).cumsum(0)])
    same = "documents need the same number on all ranks: number them in the whole text"
    return [
        (renumbered, same), (changes, same), (own + 1, "the first document has the number 0"),
        (torch.zeros_like(own), "each document has a number of its own, from 0"),
    ], "the document of a token is its number in the whole text, from 0"  # fmt: skip
