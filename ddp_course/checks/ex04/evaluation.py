"""Question 2: an exact evaluation."""

import math
import re
from collections import Counter

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.ex04.diary import Diary
from ddp_course.checks.samples import Numbered, same_as, two_numbers
from ddp_course.checks.training import fill, state
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout
from ddp_course.school.judge import Wrong, question, trying


def evaluations(evaluate, sizes, seed, stop_at_wrapper=False):
    """Evaluate on test sets of these sizes; return for each the result, and what the
    network saw and how it changed.
    """
    with process_group(timeout=4):
        model = DistributedDataParallel(fill(Diary(norm=True), seed))
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
                returned = evaluate(model, half_known(size, seed), torch.device("cpu"))
            gradients_on = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            moved = [
                name
                for name, value in state(network).items()
                if not torch.equal(value, before[name])
            ]
            mine = network.tested + [
                number for step in network.trained for number in step
            ]
            seen.append(
                {
                    "returned": returned,
                    "moved": moved,
                    "gradients_on": gradients_on,
                    "mine": mine,
                    "wrapper": len(calls),
                }
            )
        return seen


STOPPED = "the wrapper was called"


def half_known(size, seed):
    """A test set on which the network is right for about two thirds of the samples,
    including the first.
    """
    data, network = Numbered(size, seed + size), fill(Diary(norm=True), seed).eval()
    with torch.no_grad():
        guesses = network(data.inputs).argmax(dim=1)
    known = data.inputs[:, 1] > 0
    known[0] = True
    data.labels = torch.where(known, guesses, data.labels)
    return data


@question(
    "Sum two numbers over the ranks: the correct predictions and the samples. Accuracies cannot be summed.",
    "Rank r takes every n-th sample, starting with sample r: Subset(test_set, range(rank, len(test_set), world_size)). "
    "You need no padding if nothing in the loop communicates: which module can a rank call without the others?",
    "model.eval(); with torch.no_grad(), count over a DataLoader of your Subset with model.module(inputs).argmax(1) == "
    "labels; then one dist.all_reduce of torch.tensor([correct, seen]).",
)
def check_evaluate(answer, draw):
    """Every rank must return the exact number of correct predictions and of samples,
    for any size.
    """
    seed = draw.randrange(10**6)
    # With a prime number of samples on one rank, and one more on the other, both have
    # the same number of batches.
    mild = [
        2 * draw.choice([11, 13, 17, 19, 23]) + 1,
        2 * draw.choice([307, 311, 313, 317]) + 1,
    ]
    n = draw.choice([3, 4])
    hard = [1, n - 1, n + 1, draw.randint(5, 40) * n + 1, 2 * n]
    for ranks, sizes in ((2, mild), (n, hard)):
        seen = evaluated(answer, ranks, sizes, seed)
        for index, size in enumerate(sizes):
            judge_evaluation(size, seed, [of_rank[index] for of_rank in seen])


def evaluated(answer, ranks, sizes, seed):
    """`evaluations` on ranks. If they fail because of BatchNorm, raise Wrong with that
    cause.
    """
    try:
        return answer.on_ranks(evaluations, sizes, seed, nproc=ranks)
    except RankError as error:
        checked = f"evaluate on {', '.join(map(str, sizes))} samples, {ranks} ranks"
        if "Expected more than 1 value per channel when training" in error.message:
            raise Wrong(checked, rank=f"{error.rank} of {ranks}", expected="a forward in evaluation mode",
                        got=error.message, cause=TRAINING_MODE) from None  # fmt: skip
        symptoms = [*SYMPTOMS, "SIGABRT", "gloo"]
        if isinstance(error, RankTimeout) or any(
            text in str(error) for text in symptoms
        ):
            try:
                answer.on_ranks(evaluations, [48], seed, True, nproc=2)
            except RankError as other:
                if STOPPED in other.message:
                    said = re.sub(r"\[/.*?\] ", "", error.message or "no end").split(
                        ". "
                    )[0]
                    raise Wrong(
                        checked,
                        expected="the totals, on every rank",
                        got=said,
                        cause=WRAPPER,
                    ) from None
        raise


TRAINING_MODE = (
    "the network is still in training mode: BatchNorm then uses the other samples of the batch, and updates its "
    "running statistics: call model.eval() first"
)  # fmt: skip
WRAPPER = (
    "with BatchNorm, a forward through the DDP wrapper is a collective: it broadcasts rank 0's buffers. Here some "
    "ranks have fewer batches than others and do not take part: call the network itself, model.module"
)  # fmt: skip


def judge_evaluation(size, seed, of_ranks):
    n = len(of_ranks)
    checked = f"evaluate(model, test_set, device) with {size} sample{'s' * (size > 1)} on {n} ranks"
    data, network = half_known(size, seed), fill(Diary(norm=True), seed).eval()
    with torch.no_grad():
        right = network(data.inputs).argmax(dim=1) == data.labels
    correct = int(right.sum())
    expected = f"({correct}, {size}) on every rank"
    totals = []
    for rank, of_rank in enumerate(of_ranks):
        if of_rank["moved"]:
            raise Wrong(checked, rank=f"{rank} of {n}", expected="an unchanged network",
                        got=f"another {of_rank['moved'][0]}", cause=TRAINING_MODE)  # fmt: skip
        if not of_rank["gradients_on"]:
            raise Wrong(f"torch.is_grad_enabled() after {checked}", rank=f"{rank} of {n}", expected=True, got=False,
                        cause="gradients are still switched off afterwards, so training could not continue: use "
                        "`with torch.no_grad():`")  # fmt: skip
        totals.append(two_numbers(of_rank["returned"]))
        if totals[-1] is None:
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"({correct}, {size})", got=of_rank["returned"],
                        cause="return two numbers, correct and seen")  # fmt: skip
    truth = torch.tensor([correct, size])
    wrong = [
        rank
        for rank, total in enumerate(totals)
        if not (total - truth).abs().max() <= 1e-6
    ]
    shares = [
        [number for number in of_rank["mine"] if number < size] for of_rank in of_ranks
    ]
    if wrong:
        got = ", ".join(
            f"({total[0]:g}, {total[1]:g}) on rank {rank}"
            for rank, total in enumerate(totals)
        )
        cause = cause_of_totals(right, size, shares, totals, wrong)
        cause = (
            WRAPPER if len({of_rank["wrapper"] for of_rank in of_ranks}) > 1 else cause
        )
        raise Wrong(
            checked, rank=f"{wrong[0]} of {n}", expected=expected, got=got, cause=cause
        )
    if size >= 20 and max(map(len, shares)) > 0.8 * size:
        rank = max(range(n), key=lambda rank: len(shares[rank]))
        workers = "every rank" if min(map(len, shares)) > 0.8 * size else "one rank"
        raise Wrong(f"how many samples a rank evaluates, of {size} on {n} ranks", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=len(shares[rank]), cause=f"the totals are right, but {workers} "
                    "does all the work: let each rank evaluate its share")  # fmt: skip


def cause_of_totals(right, size, shares, totals, wrong):
    """The likely cause of wrong totals. right: which predictions are correct; shares:
    the samples that each rank evaluated.
    """
    n, correct = len(shares), int(right.sum())
    own = [
        torch.tensor([int(right[share].sum()), len(share)]).double() for share in shares
    ]
    seen = [total[1].item() for total in totals]
    if 0 not in wrong:
        return "only rank 0 has the totals: dist.all_reduce gives them to all ranks, dist.reduce only to one"
    if (
        all(torch.equal(total, mine) for total, mine in zip(totals, own))
        and seen != [size] * n
    ):
        return "each rank returns the counts of its own share: sum them over the ranks"
    if (
        size != correct
        and all(map(same_as(correct), seen))
        and all(same_as(size)(total[0]) for total in totals)
    ):
        return "the two numbers are swapped: correct first, then seen"
    if all(map(same_as(n * size), seen)):
        return "every rank went through the whole test set, and then the counts were summed: each sample counts once"
    if all(map(same_as(math.ceil(size / n) * n), seen)):
        return "some samples were counted twice: DistributedSampler repeats samples until all ranks have the same number"
    if all(map(same_as(size // n * n), seen)):
        return (
            "some samples were left out: the shares need not have the same length here"
        )
    if all(map(same_as(size / n), seen)):
        return "the counts were averaged over the ranks: sum them"
    if all(map(same_as(size), seen)):
        twice = [
            sample for sample, times in Counter(sum(shares, [])).items() if times > 1
        ]
        total = sum(int(right[share].sum()) for share in shares)
        if twice and all(same_as(total)(both[0]) for both in totals):
            return (
                f"seen is right, but {len(twice)} samples were evaluated more than once, such as sample {twice[0]}, and "
                "count each time in correct"
            )  # fmt: skip
        if correct > 1 and all(0 < total[0] <= 1 for total in totals):
            return "this is an accuracy; return the number of correct predictions, an integer"
        means = [float(mine[0] / mine[1]) if mine[1] else 0.0 for mine in own]
        if all(abs(total[0] - size * sum(means) / n) < 1 for total in totals):
            return (
                "it is the mean of the ranks' accuracies, in which a small share counts as much as a large one: sum "
                "the counts"
            )
        if any(total[0] != round(total[0].item()) for total in totals):
            return "not an integer: it is a mean of means, over batches or ranks of different size; sum counts instead"
        if same_as(correct)(sum(totals)[0]):
            return "seen is summed over the ranks, correct is not"
    return "does exactly one rank evaluate each sample, and do you sum both counts over all ranks?"
