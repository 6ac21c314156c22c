"""What likely mistakes in the targets of question 3 give."""

import torch

IGNORED = -100
ACROSS = "the last token of a document has no target: what comes next belongs to another document"
PROMPT = "a target in the prompt does not count: its target is -100"
SHIFTED = "the targets were shifted in this rank's tokens: the next one of the text may be on another rank. Shift first"
FIRST = "the first token after the prompt is a target, and the last one of the prompt reads it: p + 1 >= prompt counts"
EARLY = "the prompt has `prompt` tokens, from 0 to prompt - 1: none of them is a target"
BEGINS = (
    "the last token of a document has no target, but the first one has: if the next document begins at place e, "
    "mask the place e - 1"
)
EMPTY = "no token has a target here. A prompt may have 0 tokens: does a slice end at prompt - 1? That is -1 then"
WHOLE = "a prompt may be as long as its document: then it hides all targets of this document"
ZERO = "the token 0 is a token like any other, and may be a target"


def of_targets(text, places):
    """([(value, cause)], the cause of any other value)"""

    def masked(values, *those):
        return values.masked_fill(~torch.stack(those).all(0), IGNORED)[places]

    positions, prompts, ends = text["positions"], text["prompts"], text["ends"]
    inside, after, following = positions + 1 < ends, positions + 1 >= prompts, text["following"]
    counts, own = text["counts"], text["tokens"][places]
    everywhere = torch.arange(len(following)) < len(following) - 1
    begins = (positions > 0) | (torch.arange(len(following)) == 0)
    in_shard = torch.cat([own[1:], own[:1]])
    last = torch.arange(len(own)) == len(own) - 1
    mixed = counts[places]
    both = f"{ACROSS}; and {PROMPT}"
    return [
        *[(in_shard.masked_fill(~keep, IGNORED), SHIFTED) for keep in (~last, mixed, mixed & ~last)],
        (in_shard, SHIFTED),
        (masked(text["tokens"], counts), "the target of a token is the *next* token"),
        (own, "the target of a token is the *next* token of its document"),
        (following.masked_fill(~counts, 0)[places], "the target of a token that does not count is -100, and not 0"),
        (masked(following, counts, following != 0), ZERO),
        (masked(following, inside), PROMPT),
        (masked(following, after), ACROSS), (masked(following, after, everywhere), ACROSS),
        (masked(following, after, begins), BEGINS), (masked(following, after, begins, everywhere), BEGINS),
        (following[places], both), (masked(following, everywhere), both),
        (masked(following, inside, after | (prompts == ends)), WHOLE),
        (masked(following, inside, positions >= prompts), FIRST),
        (masked(following, positions >= prompts), f"{ACROSS}; and {FIRST}"),
        (masked(following, inside, positions + 1 > prompts), FIRST),
        (masked(following, inside, positions + 2 >= prompts), EARLY),
        (torch.full_like(own, IGNORED), EMPTY),
    ], rules(prompts)  # fmt: skip


def rules(prompts):
    hidden = f"{PROMPT}; " if prompts.any() else ""
    return f"{ACROSS}; {hidden}any other target is the next token of the text, before it is cut"
