"""A loss over the tokens of answers only, on all ranks."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.differences import near, parted
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

END, WORDS, WIDTH, FAR = 0, 7, 4, 10**6


def a_batch(case, rank):
    """Texts of a question, an answer and an end token, padded with the end token:
    (tokens, questions, lengths).
    """
    draw = torch.Generator().manual_seed(case["seed"] + rank)
    questions, answers = case["questions"][rank], case["answers"][rank]
    lengths = [question + answer for question, answer in zip(questions, answers)]
    tokens = torch.full((len(lengths), max(lengths) + 2), END)
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(1, WORDS, (length,), generator=draw)
    for row, answer, length in zip(tokens, answers, lengths):
        if answer:
            row[length - 1] = END
    return tokens, torch.tensor(questions), torch.tensor(lengths)


def a_model(seed):
    return fill(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)), seed)


PATIENCE = datetime.timedelta(seconds=3)  # for ranks that are still in answer_loss


def gradient_on_ranks(answer_loss, cases):
    """For each case: the loss, the gradient, and whether the inputs are as before."""
    with process_group(timeout=5) as (rank, n):
        of_observer, seen = dist.new_group(timeout=PATIENCE), []
        for case in cases:
            model = DistributedDataParallel(a_model(case["seed"]))
            given = a_batch(case, rank)
            logits = model(given[0].clone())
            before = [logits.detach().clone(), *(value.clone() for value in given)]
            loss = answer_loss(logits, *given)
            all_have_returned(of_observer)
            after = [logits.detach(), *given]
            changed = not all(map(torch.equal, before, after))
            with trying("the backward of what answer_loss returned"):
                loss.backward()
            gradient = flat(model.module)
            seen.append({"loss": loss, "gradient": gradient, "changed": changed})
        return seen


def all_have_returned(group):
    """Raise where another rank still waits for this one: DDP's own communication would
    answer it, with other tensors.
    """
    try:
        dist.barrier(group)
    except RuntimeError:
        raise RuntimeError(LEFT_EARLY) from None


LEFT_EARLY = (
    "answer_loss has returned on this rank, and another rank still waits inside it: each "
    "rank must call the same collectives, also a rank without any answer"
)


def flat(model):
    return torch.cat([value.grad.flatten() for value in model.parameters()])


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
    for n, empty in [(1, False), (2, False), (3, True)]:
        cases = [a_case(draw, n, False), a_case(draw, n, empty)]
        of_ranks = answer.on_ranks(gradient_on_ranks, cases, nproc=n)
        for number, case in enumerate(cases):
            judge_losses(case, n, [of_rank[number] for of_rank in of_ranks])


def a_case(draw, n, empty):
    """Texts for n ranks: each has another number of them. empty: one rank has no answer
    in its texts.
    """
    texts = [draw.randrange(1, 5) for _ in range(n)]
    case = {"seed": draw.randrange(10**6)}
    case["questions"] = [[draw.randrange(2, 6) for _ in range(size)] for size in texts]
    case["answers"] = [[draw.randrange(2, 5) + 3 * rank for _ in range(size)] for rank, size in enumerate(texts)]
    if empty:  # cut off: the questions were too long
        rank = draw.randrange(n)
        case["answers"][rank] = [0] * texts[rank]
    return case


def judge_losses(case, n, of_ranks):
    gradient, loss = mean_of_all(case, n)
    answers = [sum(of_rank) for of_rank in case["answers"]]
    checked = f"a batch on {n} rank{'s' * (n > 1)}, with {answers} tokens of answers"
    for rank, seen in enumerate(of_ranks):
        if seen["changed"]:
            cause = "logits, tokens, questions and lengths belong to the caller: work on copies"
            raise Wrong(checked, rank=f"{rank} of {n}", expected="the inputs as before",
                        got="changed", cause=cause)  # fmt: skip
        if not near(seen["gradient"], gradient):
            expected, got = parted(gradient, seen["gradient"], 1e-5, 1e-5)
            raise Wrong(checked, rank=f"{rank} of {n}", expected=expected, got=got,
                        cause=cause_of_gradient(case, n, seen["gradient"]))  # fmt: skip
    mean = sum(float(seen["loss"]) for seen in of_ranks) / n
    if not abs(mean - loss) <= 1e-5 * abs(loss):
        cause = (
            "the gradients are right, but the loss is not: the mean of the ranks' losses must be the mean over all "
            "tokens"
        )
        raise Wrong(checked, expected=f"{loss:.6f}, the mean of all ranks' losses", got=f"{mean:.6f}", cause=cause)


def cause_of_gradient(case, n, got):
    if got.isnan().any():
        return "a rank without any answer has a mean of 0/0, which is nan: divide the sum by the number on all ranks"
    of_ranks = [sums(case, rank) for rank in range(n)]
    total = sum(gradient for gradient, *_ in of_ranks)
    number = sum(number for *_, number in of_ranks)
    means = sum(gradient / max(1, count) for gradient, _, count in of_ranks) / n
    alike = [
        ("each rank computes its own mean, so a rank with few tokens counts as much as the others: divide by the "
         "number on all ranks, from an all_reduce", means),
        ("DDP takes the mean of the ranks' losses: multiply by the number of ranks", total / number / n),
        ("it is n times too large: DDP divides only by the number of ranks", total / number * n),
        ("this is a sum: divide it by the number of tokens that count, on all ranks", total / n),
        ("this is a sum: divide it by the number of tokens that count, on all ranks", total),
    ]  # fmt: skip
    looks = {
        "the question's tokens count, too: only the answer's tokens are targets":
            {"span": lambda begin, end: (0, end)},
        "everything counts, question and padding, too: only the answer's tokens are targets":
            {"span": lambda begin, end: (0, FAR)},
        "the padding counts, too: a text ends at its length": {"span": lambda begin, end: (begin, FAR)},
        "the end token of the answer does not count, so the model would not learn to stop: padding and end token are "
        "the same, so use lengths, not token numbers": {"span": lambda begin, end: (begin, end - 1)},
        "the first token of the answer does not count: the last place of the question must predict it":
            {"span": lambda begin, end: (begin + 1, end)},
        "the last token of the question counts, too": {"span": lambda begin, end: (begin - 1, end)},
        "logits and tokens of the same place are compared: the logits at one place predict the next token": {"shift": 0},
    }  # fmt: skip
    for cause, how in looks.items():
        alike.append((cause, mean_of_all(case, n, **how)[0]))
        wrong_parts = [sums(case, rank, **how) for rank in range(n)]
        alike.append((cause, sum(gradient / max(1, count) for gradient, _, count in wrong_parts) / n))
    for cause, gradient in alike:
        if near(got, gradient):
            return cause
    return "the sum of the losses of all answers' tokens on all ranks, divided by the number of these tokens"
