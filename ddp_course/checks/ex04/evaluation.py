"""Question 3: an exact evaluation, class by class."""

import re
from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Claim, agree, on_every_rank
from ddp_course.checks.ex04.recorded import RecordingNetwork
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import fill, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout


def evaluations(evaluate, sizes, classes, seed, stop_at_wrapper=False):
    """Evaluate on test sets of these sizes; return for each the result, the batches that
    the network saw, and how it changed.
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
                returned = evaluate(model, half_known(size, classes, seed), classes, torch.device("cpu"))
            gradients_on = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            batches = [[number for number in batch if number < size] for batch in network.tested + network.trained]
            seen.append({
                "returned": as_table(returned, classes),
                "moved": [name for name, value in state(network).items() if not torch.equal(value, before[name])],
                "gradients_on": gradients_on,
                "batches": batches,
                "wrapper": len(calls),
            })  # fmt: skip
        return seen


STOPPED = "the wrapper was called"


def as_table(returned, classes):
    """What an answer has returned as (classes, classes) numbers in 64 bits, or in words."""
    try:
        table = torch.as_tensor(returned).detach().double()
    except (TypeError, ValueError, RuntimeError):
        return f"{returned!r}"
    return table if table.shape == (classes, classes) else f"shape {tuple(table.shape)}"


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


def pairs_of(size, classes, seed):
    """Label and guess of each sample, (size, 2)."""
    data, network = half_known(size, classes, seed), a_classifier(classes, seed).eval()
    with torch.no_grad():
        return torch.stack([data.labels, network(data.inputs).argmax(dim=1)], dim=1)


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
        for size, *of_ranks in zip(sizes, *evaluated(answer, ranks, sizes, classes, seed)):
            samples = f"{size} sample{'s' * (size > 1)}"
            checked = f"evaluate(model, test_set, classes={classes}, device) with {samples} on {ranks} ranks"
            on_every_rank(partial(manners, checked, classes), of_ranks)
            on_every_rank(partial(is_exact, checked, pairs_of(size, classes, seed), classes), of_ranks)
            if size >= 20:
                on_every_rank(partial(shared_work, size), of_ranks)


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


# ---- what is claimed ----


def manners(checked, classes, rank, of_ranks):
    """Claims about what an answer leaves behind, and that it returns a table."""
    seen = of_ranks[rank]
    yield Claim(checked, seen["moved"], [], TRAINING_MODE, told="an unchanged network",
                shown=f"another {', '.join(seen['moved'][:1])}")  # fmt: skip
    yield Claim(f"torch.is_grad_enabled() after {checked}", seen["gradients_on"], True, "gradients are still switched off "
                "afterwards, so training could not continue: use `with torch.no_grad():`")  # fmt: skip
    yield Claim(checked, isinstance(seen["returned"], torch.Tensor), True, "return one table: a row for each label, a "
                "column for each guess", told=f"a table of shape ({classes}, {classes})",
                shown=seen["returned"])  # fmt: skip


def is_exact(checked, pairs, classes, rank, of_ranks):
    """The claim that a rank's table is exact. pairs: label and guess of each sample."""
    got, truth = of_ranks[rank]["returned"], table_of(pairs, classes)
    words = [" of ".join(f"{number:g}" for number in totals(table)) + " right" for table in (truth, got)]
    if words[0] == words[1]:
        words = [
            "; ".join(" ".join(f"{number:g}" for number in row) for row in table.tolist()) for table in (truth, got)
        ]
    yield Claim(checked, got, truth, partial(cause_of_totals, truth, got), partial(mistakes, truth, pairs, rank, of_ranks),
                told=words[0], shown=words[1])  # fmt: skip


def table_of(pairs, classes):
    """How often each pair of label and guess comes, (classes, classes), in 64 bits."""
    counts = torch.bincount(pairs @ torch.tensor([classes, 1]), minlength=classes**2)
    return counts.view(classes, classes).double()


def totals(table):
    return [table.trace().item(), table.sum().item()]


EACH_PAIR_ONCE = (
    "a pair of label and guess that comes several times in a batch counts once: table[labels, guesses] += 1 changes each "
    "place once; count with torch.bincount, or with index_put_(..., accumulate=True)"
)


def mistakes(truth, pairs, rank, of_ranks):
    """Tables that come of mistakes, and their causes."""
    n, size, got = len(of_ranks), len(pairs), of_ranks[rank]["returned"]
    table = lambda samples: table_of(pairs[samples], len(truth))  # noqa: E731
    batches = sum((of_rank["batches"] for of_rank in of_ranks), [])
    shares = [sum(of_rank["batches"], []) for of_rank in of_ranks]
    certain = {
        WRAPPER: len({of_rank["wrapper"] for of_rank in of_ranks}) > 1,
        "only rank 0 has the whole table: dist.all_reduce gives it to all ranks, dist.reduce only to one":
            agree(of_ranks[0]["returned"], truth),
    }  # fmt: skip
    return [
        *((got, cause) for cause, holds in certain.items() if holds),
        *((sum(table(part).clamp(max=1) for part in parts), EACH_PAIR_ONCE) for parts in (batches, shares)),
        (truth.clamp(max=1), EACH_PAIR_ONCE),
        (truth.T, "rows and columns are swapped: a row for each label, a column for each guess"),
        *((truth / whole.clamp(min=1), "these are shares, not counts: count how many samples there are of each label and "
           "guess") for whole in (truth.sum(), truth.sum(1, keepdim=True), truth.sum(0, keepdim=True))),
        (table(shares[rank]), "each rank returns the counts of its own share: sum them over the ranks"),
        (truth / n, "the counts were averaged over the ranks: sum them"),
        (sum(map(table, shares)), cause_of_shares(size, shares)),
        (sum(table(share) / max(1, len(share)) for share in shares) * size / n, "it is the mean of the ranks' accuracies, "
         "in which a small share counts as much as a large one: sum the counts"),
    ]  # fmt: skip


def cause_of_shares(size, shares):
    """Why the sum of what the ranks have counted is wrong."""
    counts = Counter(sum(shares, []))
    twice = [sample for sample, times in counts.items() if times > 1]
    if not twice:
        return "some samples were left out: the shares need not have the same length here"
    if all(set(share) == set(range(size)) for share in shares):
        return "every rank went through the whole test set, and then the counts were summed: each sample counts once"
    return (
        f"some samples were counted twice, such as sample {twice[0]}: DistributedSampler, for one, repeats samples until "
        "all ranks have the same number"
    )


def cause_of_totals(truth, got):
    (right, size), (found, seen) = totals(truth), totals(got)
    if found == right and seen == size:
        return "as many are right as should be, but labels or guesses are in the wrong rows or columns"
    if found == right and seen < size:
        return "all right guesses are counted, but some wrong ones are missing: sum every entry of the table over the ranks"
    if seen == size and got.frac().any():
        return "not an integer: it is a mean of means, over batches or ranks of different size; sum counts instead"
    return "does exactly one rank evaluate each sample, and do you sum all counts over all ranks?"


def shared_work(size, rank, of_ranks):
    n, shares = len(of_ranks), [sum(map(len, of_rank["batches"])) for of_rank in of_ranks]
    workers = "every rank" if min(shares) > 0.8 * size else "one rank"
    yield Claim(f"how many samples a rank evaluates, of {size} on {n} ranks", shares[rank], range(int(0.8 * size) + 1),
                f"the totals are right, but {workers} does all the work: let each rank evaluate its share",
                told=f"about {size // n}")  # fmt: skip
