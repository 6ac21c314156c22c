"""A loss over the tokens of answers only, on all ranks."""

import datetime
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

END, WORDS, WIDTH = 0, 7, 4


def a_batch(case, rank):
    """Texts of a question, an answer and an end token, padded with the end token:
    (tokens, questions, lengths).
    """
    draw = torch.Generator().manual_seed(case["seed"] + rank)
    questions, answers = case["questions"][rank], case["answers"][rank]
    lengths = [question + answer for question, answer in zip(questions, answers)]
    tokens = torch.full((len(lengths), max(lengths) + case["padding"]), END)
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(1, WORDS, (length,), generator=draw)
    for row, answer, length in zip(tokens, answers, lengths):
        if answer:
            row[length - 1] = END
    return tokens, torch.tensor(questions), torch.tensor(lengths)


def a_model(seed):
    return fill(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)), seed)


PATIENCE = datetime.timedelta(seconds=3)  # for ranks that are still in answer_loss


def gradients_on_ranks(answer_loss, cases):
    """For each case: the loss, the gradient, whether the inputs are as before, and whether the
    loss takes part in a backward.
    """
    with process_group(timeout=5) as (rank, n):
        of_observer, seen = dist.new_group(timeout=PATIENCE), []
        for case in cases:
            model = DistributedDataParallel(a_model(case["seed"]))
            given = a_batch(case, rank)
            logits = model(given[0].clone())
            before = [logits.detach().clone(), *(value.clone() for value in given)]
            loss = answer_loss(logits, *given)
            changed = not all(map(torch.equal, before, [logits.detach(), *given]))
            joined = takes_part(loss, logits)
            seen.append({"loss": loss, "gradient": None, "changed": changed, "joined": joined})
            if all_take_part(joined, of_observer):  # otherwise DDP would wait
                with trying("the backward of what answer_loss returned"):
                    loss.backward()
                seen[-1]["gradient"] = flat(model.module)
        return seen


def takes_part(loss, logits):
    """Whether backward of a loss reaches the logits, and so the network."""
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return False
    [gradient] = torch.autograd.grad(loss.sum(), [logits], retain_graph=True, allow_unused=True)
    return gradient is not None


def all_take_part(joined, group):
    """Raise where another rank still waits for this one in answer_loss: DDP's own
    communication would answer it, with other tensors.
    """
    number = torch.tensor(int(joined))
    try:
        dist.all_reduce(number, group=group)
    except RuntimeError:
        raise RuntimeError(LEFT_EARLY) from None
    return number == dist.get_world_size()


LEFT_EARLY = (
    "answer_loss has returned on this rank, and another rank still waits inside it: each "
    "rank must call the same collectives, also a rank without any answer"
)


def flat(model):
    return torch.cat([value.grad.flatten() for value in model.parameters()])


@question(
    "The logits at one place predict the token at the next: compare logits[:, :-1] with tokens[:, 1:]. A target "
    "counts if its own place is after the question and before the end of the text.",
    "places = torch.arange(1, tokens.shape[1]); counted = (places >= questions[:, None]) & (places < lengths[:, None]). "
    "Set the other targets to -100, which cross_entropy leaves out. A mean over all ranks needs the number of targets "
    "on all ranks.",
    "total = F.cross_entropy(..., reduction='sum'), which is 0 if no target counts; number = counted.sum(), summed over "
    "ranks with dist.all_reduce; return total * dist.get_world_size() / number, because DDP takes the mean over the "
    "ranks.",
)
def check_answer_loss(answer, draw):
    """The gradient of the mean loss over all answers' tokens, on 1 to 3 ranks, one of
    them without any.
    """
    for n in (1, 2, 3):
        cases = [a_case(draw, n, padding=2), a_case(draw, n, padding=0, empty=draw.randrange(n) if n > 2 else None)]
        of_ranks = answer.on_ranks(gradients_on_ranks, cases, nproc=n)
        for case, *of_case in zip(cases, *of_ranks):
            on_every_rank(partial(claims, case), of_case)


def a_case(draw, n, padding, empty=None):
    """Texts for n ranks: each has another number of them.

    padding: of the longest text. empty: the rank that has no answers, as they were cut off.
    """
    texts = [draw.randrange(1, 5) for _ in range(n)]
    case = {"seed": draw.randrange(10**6), "padding": padding}
    case["questions"] = [[draw.randrange(1, 6) for _ in range(size)] for size in texts]
    case["answers"] = [[draw.randrange(2, 5) + 3 * rank for _ in range(size)] for rank, size in enumerate(texts)]
    if empty is not None:
        case["answers"][empty] = [0] * texts[empty]
    if not padding:  # one more text, whose question left no room for its answer
        case["questions"][0].append(draw.randrange(4, 9))
        case["answers"][0].append(0)
    return case


# ---- what is claimed ----


def claims(case, rank, of_ranks):
    n, seen = len(of_ranks), of_ranks[rank]
    gradient, loss = mean_of_all(case, n)
    call = f"a batch on {n} rank{'s' * (n > 1)}, with {list(map(sum, case['answers']))} tokens of answers"
    yield Claim(call, seen["changed"], False, "logits, tokens, questions and lengths belong to the caller: work on copies",
                told="the inputs as before", shown="changed")  # fmt: skip
    apart = [str(number) for number, of_rank in enumerate(of_ranks) if not of_rank["joined"]]
    yield Claim(call, apart, [],
                "a loss without a graph: backward reaches no parameter there, and DDP waits for its gradients on all other "
                "ranks. A sum over no targets is zero, too, but comes from the logits, as logits.sum() * 0 does",
                told="a loss that is computed from the logits, on each rank",
                shown=f"another one on rank {', '.join(apart)}")  # fmt: skip
    mean = sum(float(of_rank["loss"]) for of_rank in of_ranks) / n
    causes = (
        "the sum of the losses of all answers' tokens on all ranks, divided by the number of these tokens",
        "the gradients are right, but the loss is not: the mean of the ranks' losses must be the mean over all tokens",
    )
    if math.isnan(mean):
        causes = 2 * ["a text or rank without any answer has a mean of 0/0, which is nan: divide the sum of all losses by "
                      "the number of targets on all ranks"]  # fmt: skip
    yield Claim(
        f"the gradient of {call}", seen["gradient"], gradient, causes[0], partial(mistakes, case, n), 5, scale=1
    )
    yield Claim(f"the mean of the ranks' losses of {call}", mean, loss, causes[1], digits=5)


def sums(case, rank, span=lambda begin, end: (begin, end), shift=1):
    """This rank's (gradient of the sum of losses, sum, number of targets).

    span: of (where an answer begins, where it ends), the places whose tokens are
    targets.
    """
    model = a_model(case["seed"])
    tokens, questions, lengths = a_batch(case, rank)
    logits = model(tokens)
    total, number = logits.sum() * 0, 0
    for row, answer in enumerate(zip(questions.tolist(), lengths.tolist())):
        begin, end = span(*answer)
        for place in range(max(shift, begin), min(end, tokens.shape[1])):
            total = total + F.cross_entropy(logits[row, place - shift], tokens[row, place])
            number += 1
    total.backward()
    return flat(model), total.item(), number


def mean_of_all(case, n, **how):
    of_ranks = [sums(case, rank, **how) for rank in range(n)]
    number = max(1, sum(number for *_, number in of_ranks))
    return sum(gradient for gradient, *_ in of_ranks) / number, sum(total for _, total, _ in of_ranks) / number


OWN_MEAN = (
    "each rank computes its own mean, so a rank with few tokens counts as much as the others: divide by the number on "
    "all ranks, from an all_reduce"
)
LOOKS = {  # how a mistake counts
    "the question's tokens count, too: only the answer's tokens are targets":
        {"span": lambda begin, end: (0, end)},
    "everything counts, question and padding, too: only the answer's tokens are targets":
        {"span": lambda begin, end: (0, 10**6)},
    "the padding counts, too: a text ends at its length": {"span": lambda begin, end: (begin, 10**6)},
    "the end token of the answer does not count, so the model would not learn to stop: padding and end token are "
    "the same, so use lengths, not token numbers": {"span": lambda begin, end: (begin, end - 1)},
    "the first token of the answer does not count: the last place of the question must predict it":
        {"span": lambda begin, end: (begin + 1, end)},
    "the last token of the question counts, too": {"span": lambda begin, end: (begin - 1, end)},
    "logits and tokens of the same place are compared: the logits at one place predict the next token": {"shift": 0},
}  # fmt: skip


def mistakes(case, n):
    of_ranks = [sums(case, rank) for rank in range(n)]
    total = sum(gradient for gradient, *_ in of_ranks)
    number = sum(number for *_, number in of_ranks)
    yield mean_of_means(of_ranks), OWN_MEAN
    yield total / number / n, "DDP takes the mean of the ranks' losses: multiply by the number of ranks"
    yield total / number * n, "it is n times too large: DDP divides only by the number of ranks"
    for times in (1, 1 / n):
        yield total * times, "this is a sum: divide it by the number of tokens that count, on all ranks"
    for cause, how in LOOKS.items():
        yield mean_of_all(case, n, **how)[0], cause
        yield mean_of_means([sums(case, rank, **how) for rank in range(n)]), cause


def mean_of_means(of_ranks):
    return sum(gradient / max(1, count) for gradient, _, count in of_ranks) / len(of_ranks)
