"""Question 5: find the bugs in training that keeps the best epoch."""

from functools import cache

import torch

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex01.choosing_cases import RATE, Faults, a_network, batches_of, combinations, draw_case, trained
from ddp_course.checks.predictions import numbers
from ddp_course.checks.training import state
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

MODE = {
    "stays": "from the second epoch on, the network is trained in eval mode, in which the last evaluation has left it: "
    "BatchNorm uses its running statistics then, and does not update them",
    "never": "the network is trained in eval mode: BatchNorm uses its running statistics then, and does not update them",
    "left out": "the network is evaluated in training mode: BatchNorm uses the statistics of the test batch then, and "
    "updates its running ones",
}
MEAN = {
    "of means": "this is a mean of the batches' means. The batches have different sizes, so a sample of a smaller one "
    "counts more: add up over all samples, and divide once",
    "sum": "this is a sum over the samples: divide by their number",
}
KEPT = "the gradients of earlier steps are still there: reset them before each backward"
ALIAS = (
    "these are the numbers of the last epoch. If you chose the best one: state_dict() copies nothing. Its tensors are the "
    "network's own, which later steps change in place, so keep copies"
)  # fmt: skip
LATEST = "these are the numbers of epoch {}: better than the one before it, but not the best of all"
BEST = "these are the numbers of the best epoch: the model ends as the last one leaves it"
OTHERWISE = "is it trained in training mode, and evaluated in eval mode, in each epoch? What is divided by what?"


def observe(train_and_choose, case):
    """What an answer returns, and the network that it leaves."""
    with process_group():
        network = a_network(case["seed"])
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        returned = train_and_choose(
            network, batches_of(case, "train"), batches_of(case, "test"), optimizer, case["epochs"]
        )
        if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], dict)):
            return {"returned": f"{returned!r}"[:200]}
        best = {str(name): value for name, value in returned[0].items()}
        return {"best": best, "losses": numbers(returned[1], case["epochs"]), "end": state(network)}


def claims(case, seen):
    call = f"train_and_choose for {case['epochs']} epochs, test batches of {case['test']} samples"
    yield Claim(call, "returned" in seen, False, "return both, as the given program does",
                told="a state_dict, and a list of losses", shown=seen.get("returned"))  # fmt: skip
    right, losses = trained(case), seen["losses"]
    yield Claim(f"{call}: the losses", isinstance(losses, list), True, "return one number per epoch",
                told=f"{case['epochs']} numbers", shown=losses)  # fmt: skip
    faulty = cache(lambda: [(trained(case, faults), cause_of(faults)) for faults in combinations()])
    for epoch, (got, loss) in enumerate(zip(losses, right["losses"]), 1):
        mistakes = lambda epoch=epoch: [(found["losses"][epoch - 1], cause) for found, cause in faulty()]
        yield Claim(f"{call}: the loss after epoch {epoch}", got, loss, OTHERWISE, mistakes, digits=9)
    for name, value in right["states"][-1].items():
        chosen = right["states"][right["losses"].index(min(right["losses"]))][name]
        mistakes = lambda name=name, chosen=chosen: [
            (chosen, BEST),
            *((found["states"][-1][name], cause) for found, cause in faulty()),
        ]
        yield Claim(
            f"{call}: {name} of the network at the end", seen["end"].get(name), value, OTHERWISE, mistakes, digits=6
        )
    yield from best(case, call, seen["best"], right)


def best(case, call, got, right):
    chosen = min(range(case["epochs"]), key=lambda epoch: right["losses"][epoch])
    states, called = right["states"], f"{call}: what it returns of the best epoch, {chosen + 1}"
    better = max(epoch for epoch in range(1, case["epochs"]) if right["losses"][epoch] < right["losses"][epoch - 1])
    means = trained(case, Faults(mean="of means"))["losses"]
    of_means = means.index(min(means))
    worst = max(range(case["epochs"]), key=lambda epoch: right["losses"][epoch])
    yield Claim(called, sorted(got), sorted(states[0]), "keep all of the state_dict: parameters and buffers, such as "
                "BatchNorm's running statistics")  # fmt: skip
    for name, value in states[chosen].items():
        mistakes = [
            (states[-1][name], ALIAS),
            (states[worst][name], "these are the numbers of the epoch with the largest loss: the best has the smallest"),
            (states[0][name], "these are the numbers of the first epoch"),
            (states[better][name], LATEST.format(better + 1)),
            (states[of_means][name], "these are the numbers of the epoch with the smallest mean of the batches' means: the "
             "best one has the smallest mean over all samples"),
        ]  # fmt: skip
        yield Claim(f"{called}: the type of {name}", str(got[name].dtype), str(value.dtype), "keep the numbers as they are: "
                    "copy them, and do not convert them")  # fmt: skip
        yield Claim(f"{called}: {name}", got[name], value, "these are the numbers of another epoch: the best one has the "
                    "smallest test loss of all", mistakes, digits=6)  # fmt: skip


def cause_of(faults):
    """The mode comes first: with a wrong one, everything later is wrong."""
    return MODE.get(faults.mode) or (KEPT if faults.reset else MEAN[faults.mean])


@question(
    "Print model.training in the first line of each epoch. Print the sum of one tensor in `best` when it is made, and "
    "again at the end. And work out the loss of two test batches with 9 samples and 1 sample by hand.",
    "Which line puts the model into training mode, and how often does it run? Are the tensors in state_dict() copies? Does "
    "each test sample count the same?",
    'Call model.train() at the start of each epoch. Sum with F.nll_loss(..., reduction="sum") and divide by the number of '
    "samples. Keep {name: value.clone() for name, value in model.state_dict().items()}.",
)
def check_train_and_choose(answer, draw):
    """Losses, the network at the end and the state of the best epoch are those of the
    program without bugs.
    """
    for _ in range(2):
        case = draw_case(draw)
        [seen] = answer.on_ranks(observe, case)
        hold(claims(case, seen))
