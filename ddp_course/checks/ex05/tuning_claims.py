"""What question 5 claims of a rank's network and of its test losses."""

from functools import partial

from torch import nn

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex05.tuning_cases import described, network_of
from ddp_course.checks.ex05.tuning_simulated import cause, combinations, tuned
from ddp_course.checks.training import state

FROZEN = (
    "the backbone has been trained on. In train mode, a BatchNorm updates its running statistics whether or not its "
    "parameters need gradients, and model.train() puts every layer into train mode: put the backbone back into eval mode"
)
TRAINED = "the parameters of the backbone are frozen: train those of the head only"
NOT_AVERAGED = (
    "the ranks have trained different networks: nothing has averaged the gradients of this parameter. DDP averages those "
    "of the parameters that the network has when it is wrapped"
)
OWN_STATISTICS = "each rank has normalised with the statistics of its own batch: convert the BatchNorm of the head"
OTHERWISE = (
    "each step uses all samples of its joined batch, on all ranks, and changes each parameter of the head by lr times the "
    "gradient of their mean loss"
)
STATISTICS = (
    "a BatchNorm of the head begins with the statistics and with the options that it has, such as its momentum, also if "
    "another layer replaces it; in each training step it normalises with the joined batch, and updates them"
)
REPORTED = (
    "the network is right, but not these losses: each is the mean over the test set, of the whole network in eval mode, at "
    "the end of an epoch"
)


def claims(case, rank, of_ranks):
    mine, call, before = of_ranks[rank], described(case), state(nn.Sequential(*network_of(case)))
    yield Claim(call, mine.get("returned"), None, "return both, as the given program does",
                told="the network, and a list of losses", shown=mine.get("returned"))  # fmt: skip
    names = list(before)
    yield Claim(f"{call}: the names in the network's state_dict", list(mine["state"]), names,
                "return the network of backbone and head, with the names that it had")  # fmt: skip
    backbone, head = ([name for name in names if name.startswith(place)] for place in ("0.", "1."))
    for name in backbone:
        yield Claim(f"{call}: {name}, of the backbone", mine["state"][name], before[name],
                    FROZEN if is_buffer(name) else TRAINED)  # fmt: skip
    yield Claim(
        f"{call}: parameters of the backbone whose gradients were computed", mine["with gradients"], [],
        "the backbone is frozen, so none is needed: if its parameters require gradients, these are computed and sent in "
        "each step",
    )  # fmt: skip
    for name in head:
        yield Claim(f"{call}: {name}, of the head, at the end", mine["state"][name].isfinite().all().item(), True,
                    "these are not all numbers: training has diverged", told="finite numbers",
                    shown=mine["state"][name])  # fmt: skip
        yield Claim(
            f"{call}: {name}, of the head, compared with that of rank 0", mine["state"][name], of_ranks[0]["state"][name],
            OWN_STATISTICS if is_buffer(name) else NOT_AVERAGED, digits=9,
        )  # fmt: skip
    right, right_losses = tuned(case)
    for name in head:
        yield Claim(f"{call}: {name}, of the head, at the end", mine["state"][name], right[name],
                    STATISTICS if is_buffer(name) else OTHERWISE,
                    partial(mistakes, case, name), digits=8)  # fmt: skip
    yield Claim(f"{call}: the test losses", mine["losses"], right_losses, REPORTED, [(
        [of_ranks[0]["losses"][0]] * case["epochs"], "all these losses are the same: report the loss of each epoch")],
        digits=8)  # fmt: skip


def is_buffer(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def mistakes(case, name):
    """What this tensor is after training with each combination of faults, and why."""
    for faults in combinations():
        yield tuned(case, faults)[0][name], cause(faults)
