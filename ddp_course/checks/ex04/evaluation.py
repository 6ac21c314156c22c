"""Question 3: an exact evaluation, class by class."""

import math
import re
from collections import Counter

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.ex04.recorded import RecordingNetwork
from ddp_course.checks.samples import Numbered, same_as
from ddp_course.checks.training import fill, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout


def evaluations(evaluate, sizes, classes, seed, stop_at_wrapper=False):
    """Evaluate on test sets of these sizes; return for each the result, and what the
    network saw and how it changed.
    """
    with process_group(timeout=4):
        model = DistributedDataParallel(a_classifier(classes, seed))
        network, calls, seen = model.module, [], []

        def wrapper_is_called(module, inputs):
            if stop_at_wrapper:
                raise RuntimeError(STOPPED)
            calls.append(1)

        model.register_forward_pre_hook(wrapper_is_called)
        for size in sizes:
            model.train()
            before = state(network)
            for book in (network.tested, network.trained, calls):
                book.clear()
            with trying(f"a test set of {size}"):
                test_set = half_known(size, classes, seed)
                returned = evaluate(model, test_set, classes, torch.device("cpu"))
            gradients_on = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            moved = [name for name, value in state(network).items() if not torch.equal(value, before[name])]
            mine = network.tested + [number for step in network.trained for number in step]
            seen.append(
                {
                    "returned": as_matrix(returned),
                    "moved": moved,
                    "gradients_on": gradients_on,
                    "mine": mine,
                    "wrapper": len(calls),
                }
            )
        return seen


STOPPED = "the wrapper was called"


def as_matrix(returned):
    """What an answer has returned as a matrix of 64-bit numbers, or in words."""
    try:
        matrix = torch.as_tensor(returned).detach().double()
    except (TypeError, ValueError, RuntimeError):
        return f"{returned!r}"
    return matrix if matrix.dim() == 2 else f"shape {tuple(matrix.shape)}"


def a_classifier(classes, seed):
    network = RecordingNetwork(norm=True)
    network.layers[-1] = nn.Linear(8, classes, bias=False)
    return fill(network, seed)


def half_known(size, classes, seed):
    """A test set on which the network is right for about two thirds of the samples,
    including the first.
    """
    data, network = Numbered(size, seed + size), a_classifier(classes, seed).eval()
    with torch.no_grad():
        guesses = network(data.inputs).argmax(dim=1)
    known = data.inputs[:, 1] > 0
    known[0] = True
    data.labels = torch.where(known, guesses, data.labels)
    return data


@question(
    "Each rank counts over its own share, and the counts of all ranks are summed once, at the end. What do you have to "
    "count, so that the sum over the ranks is the whole table?",
    "Rank r takes every n-th sample, starting with sample r: Subset(test_set, range(rank, len(test_set), world_size)). "
    "You need no padding if nothing in the loop communicates: which module can a rank call without the others?",
    "model.eval(); with torch.no_grad(), over a DataLoader of your Subset: guesses = model.module(inputs).argmax(1); "
    "counts += torch.bincount(labels * classes + guesses, minlength=classes**2). Then one dist.all_reduce(counts), and "
    "counts.view(classes, classes).",
)
def check_evaluate(answer, draw):
    """Every rank must return the exact table of labels and guesses, for any size."""
    seed = draw.randrange(10**6)
    # With a prime number of samples on one rank, and one more on the other, both have
    # the same number of batches.
    mild = [2 * draw.choice([11, 13, 17, 19, 23]) + 1, 2 * draw.choice([307, 311, 313, 317]) + 1]
    n = draw.choice([3, 4])
    hard = [1, n - 1, n + 1, draw.randint(5, 40) * n + 1, 2 * n]
    for ranks, sizes in ((2, mild), (n, hard)):
        classes = draw.randint(3, 7)
        seen = evaluated(answer, ranks, sizes, classes, seed)
        for index, size in enumerate(sizes):
            judge_evaluation(size, classes, seed, [of_rank[index] for of_rank in seen])


def evaluated(answer, ranks, sizes, classes, seed):
    """`evaluations` on ranks. If they fail because of BatchNorm, raise Wrong with that
    cause.
    """
    try:
        return answer.on_ranks(evaluations, sizes, classes, seed, nproc=ranks)
    except RankError as error:
        checked = f"evaluate on {', '.join(map(str, sizes))} samples, {ranks} ranks"
        if "Expected more than 1 value per channel when training" in error.message:
            raise Wrong(checked, rank=f"{error.rank} of {ranks}", expected="a forward in evaluation mode",
                        got=error.message, cause=TRAINING_MODE) from None  # fmt: skip
        symptoms = [*SYMPTOMS, "SIGABRT", "gloo"]
        if isinstance(error, RankTimeout) or any(text in str(error) for text in symptoms):
            try:
                answer.on_ranks(evaluations, [48], classes, seed, True, nproc=2)
            except RankError as other:
                if STOPPED in other.message:
                    said = re.sub(r"\[/.*?\] ", "", error.message or "no end").split(". ")[0]
                    raise Wrong(checked, expected="the table, on every rank", got=said, cause=WRAPPER) from None
        raise


TRAINING_MODE = (
    "the network is still in training mode: BatchNorm then uses the other samples of the batch, and updates its "
    "running statistics: call model.eval() first"
)  # fmt: skip
WRAPPER = (
    "with BatchNorm, a forward through the DDP wrapper is a collective: it broadcasts rank 0's buffers. Here some "
    "ranks have fewer batches than others and do not take part: call the network itself, model.module"
)  # fmt: skip


def judge_evaluation(size, classes, seed, of_ranks):
    n = len(of_ranks)
    checked = f"evaluate(model, test_set, classes={classes}, device) with {size} sample{'s' * (size > 1)} on {n} ranks"
    data = half_known(size, classes, seed)
    with torch.no_grad():
        guesses = a_classifier(classes, seed).eval()(data.inputs).argmax(dim=1)
    right = guesses == data.labels
    table = torch.zeros(classes, classes, dtype=torch.float64)
    table.index_put_((data.labels, guesses), torch.ones(size).double(), accumulate=True)
    for rank, of_rank in enumerate(of_ranks):
        if of_rank["moved"]:
            raise Wrong(checked, rank=f"{rank} of {n}", expected="an unchanged network",
                        got=f"another {of_rank['moved'][0]}", cause=TRAINING_MODE)  # fmt: skip
        if not of_rank["gradients_on"]:
            raise Wrong(f"torch.is_grad_enabled() after {checked}", rank=f"{rank} of {n}", expected=True, got=False,
                        cause="gradients are still switched off afterwards, so training could not continue: use "
                        "`with torch.no_grad():`")  # fmt: skip
        if getattr(of_rank["returned"], "shape", None) != table.shape:
            got = of_rank["returned"]
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"a table of shape ({classes}, {classes})",
                        got=f"shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else got,
                        cause="return one table: a row for each label, a column for each guess")  # fmt: skip
    totals = [torch.stack([of_rank["returned"].trace(), of_rank["returned"].sum()]) for of_rank in of_ranks]
    truth = torch.tensor([right.sum(), size])
    expected = f"{truth[0]} right of {size}, on every rank"
    wrong = [rank for rank, total in enumerate(totals) if not (total - truth).abs().max() <= 1e-6]
    shares = [[number for number in of_rank["mine"] if number < size] for of_rank in of_ranks]
    if wrong:
        got = ", ".join(f"{total[0]:g} right of {total[1]:g} on rank {rank}" for rank, total in enumerate(totals))
        cause = cause_of_totals(right, size, shares, totals, wrong)
        if is_in_shares(of_ranks[wrong[0]]["returned"], table):
            cause = "these are shares, not counts: count how many samples there are of each label and guess"
        cause = WRAPPER if len({of_rank["wrapper"] for of_rank in of_ranks}) > 1 else cause
        raise Wrong(checked, rank=f"{wrong[0]} of {n}", expected=expected, got=got, cause=cause)
    judge_table(checked, table, [of_rank["returned"] for of_rank in of_ranks])
    if size >= 20 and max(map(len, shares)) > 0.8 * size:
        rank = max(range(n), key=lambda rank: len(shares[rank]))
        workers = "every rank" if min(map(len, shares)) > 0.8 * size else "one rank"
        raise Wrong(f"how many samples a rank evaluates, of {size} on {n} ranks", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=len(shares[rank]), cause=f"the totals are right, but {workers} "
                    "does all the work: let each rank evaluate its share")  # fmt: skip


def judge_table(checked, table, of_ranks):
    """Raise Wrong unless the ranks' tables are right, of which the totals are."""
    for rank, got in enumerate(of_ranks):
        if (got - table).abs().max() <= 1e-6:
            continue
        cause = "as many are right as should be, but labels or guesses are in the wrong rows or columns"
        if torch.equal(got, table.T):
            cause = "rows and columns are swapped: a row for each label, a column for each guess"
        elif rank and (of_ranks[0] - table).abs().max() <= 1e-6:
            cause = "only rank 0 has the whole table: sum all of its entries over the ranks, for all ranks"
        raise Wrong(f"the table of {checked}", rank=f"{rank} of {len(of_ranks)}", expected=rows(table), got=rows(got),
                    cause=cause)  # fmt: skip


def is_in_shares(got, table):
    """Whether an answer has divided the counts by those of all samples, or of a class."""
    wholes = [table.sum(), table.sum(1, keepdim=True), table.sum(0, keepdim=True)]
    return any((got - table / whole.clamp(min=1)).abs().max() < 1e-5 for whole in wholes)


def rows(table):
    return "; ".join(" ".join(f"{number:g}" for number in row) for row in table.tolist())


def cause_of_totals(right, size, shares, totals, wrong):
    """The likely cause of wrong totals. right: which predictions are correct; shares:
    the samples that each rank evaluated.
    """
    n = len(shares)
    own = [torch.tensor([int(right[share].sum()), len(share)]).double() for share in shares]
    seen = [total[1].item() for total in totals]
    if 0 not in wrong:
        return "only rank 0 has the whole table: dist.all_reduce gives it to all ranks, dist.reduce only to one"
    if all(torch.equal(total, mine) for total, mine in zip(totals, own)) and seen != [size] * n:
        return "each rank returns the counts of its own share: sum them over the ranks"
    if size % n and all(map(same_as(size // n * n), seen)):
        return "some samples were left out: the shares need not have the same length here"
    if all(same_as(right.sum().item())(total[0]) and total[1] < size for total in totals):
        return "all right guesses are counted, but some wrong ones are missing: sum every entry of the table over the ranks"
    if all(map(same_as(n * size), seen)):
        return "every rank went through the whole test set, and then the counts were summed: each sample counts once"
    if all(map(same_as(math.ceil(size / n) * n), seen)):
        return (
            "some samples were counted twice: DistributedSampler repeats samples until all ranks have the same number"
        )
    if all(map(same_as(size / n), seen)):
        return "the counts were averaged over the ranks: sum them"
    if all(map(same_as(size), seen)):
        twice = [sample for sample, times in Counter(sum(shares, [])).items() if times > 1]
        total = sum(int(right[share].sum()) for share in shares)
        if twice and all(same_as(total)(both[0]) for both in totals):
            return (
                f"{len(twice)} samples were evaluated more than once, such as sample {twice[0]}: each counts only once"
            )  # fmt: skip
        means = [float(mine[0] / mine[1]) if mine[1] else 0.0 for mine in own]
        if all(abs(total[0] - size * sum(means) / n) < 1 for total in totals):
            return (
                "it is the mean of the ranks' accuracies, in which a small share counts as much as a large one: sum "
                "the counts"
            )
        if any(total[0] != round(total[0].item()) for total in totals):
            return "not an integer: it is a mean of means, over batches or ranks of different size; sum counts instead"
    return "does exactly one rank evaluate each sample, and do you sum all counts over all ranks?"
