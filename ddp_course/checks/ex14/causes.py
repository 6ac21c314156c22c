"""The likely mistakes where a run that was preempted is not right, for question 5.

trial: the Trial of preemption.py; of_ranks: what train_once saw on each rank.
"""

from torch.nn import functional as F

from ddp_course.checks.claims import Claim, cause_of
from ddp_course.checks.ex14.preempted import Noted, OneProcess, data_of
from ddp_course.checks.training import equal
from ddp_course.ranks.launch import SYMPTOMS, RankTimeout

MEAN_OF_MEANS = "where parts of a batch have different sizes, the mean of their means is not the mean over the batch"


# ---- of an error ----


def of_error(trial, checked, error, told):
    """Claims that no likely mistake has led to an error of the ranks; all of them hold for an
    error that explains itself.
    """
    text = f"{error.message}\n{error}"
    yield Claim(checked, trial.torn, None, lambda: of_torn(trial), told="the file before, whole", shown=error.message)
    yield Claim(
        checked, trial.killed and "FileExistsError" in text, False, "a process that was killed has left its temporary file: "
        "the next one must be able to overwrite it", told="a new checkpoint", shown=error.message,
    )  # fmt: skip
    if not told:
        return
    who = "the signals have reached the ranks at different moments"
    if len(told) == 1:
        who = f"the signal has reached rank {min(told)} only"
    handler = "has ended the process: without a handler, this is what a signal does"
    late = isinstance(error, RankTimeout) or any(words in text for words in SYMPTOMS)
    for found, got, cause in [
        ("killed by SIGTERM" in text, "killed by SIGTERM", f"SIGTERM {handler}"),
        ("killed by SIGUSR1" in text, "killed by SIGUSR1", f"SIGUSR1 {handler}"),
        ("killed by SIGXFSZ" in text, f"rank {error.rank} has written more than 4,096 bytes to a file", "this rank writes a "
         "checkpoint: all ranks have to stop together, and only rank 0 writes"),
        ("SystemExit" in text, error.message, "train has to return the losses, on all ranks; its caller ends the program"),
        (late, last_lines(str(error)), f"{who}, and one rank has waited for another that had left, or was in another call: "
         "after each update, all ranks must decide together, in a collective, whether they stop"),
    ]:  # fmt: skip
        yield Claim(checked, found, False, cause, told="all ranks save and return", shown=got)


def of_torn(trial):
    return (
        f"rank 0 was killed while it wrote, and the file at `path` has only its first {trial.torn:,} bytes: write under "
        "another name, and then rename"
    )


def last_lines(text, most=3):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join([*lines[:1], *lines[1:][-most:]])[:400]


# ---- of losses and parameters: the cause otherwise, and pairs of what mistakes give and their causes ----


def of_loss(trial, of_ranks, rank, start, place, parameters):
    """Of the loss of update `place`. parameters: the Claim about those at the end."""
    if not trial.done:
        if place > 0:
            return lambda: cause_of(parameters), ()
        return (
            "the loss of an update is the mean of the cross entropy over its samples, on all ranks, before the step",
            lambda: of_first_loss(trial, of_ranks, rank),
        )
    if place < start:
        return "these losses are from before the restart: they belong into the checkpoint as they are", ()
    if place > start:
        return (
            "the update before this one was different: are network and optimizer loaded on all ranks, each completely?",
            lambda: [(OneProcess(trial.run, forget=start).losses[place], "the momentum is lost in the restart: the "
                      "optimizer has a state, too, optimizer.state_dict()")],
        )  # fmt: skip
    return (
        "the parameters after the restart are not those with which the last update ended: save them between two updates, "
        "and load them on all ranks",
        lambda: [
            (loss_of(trial, 0, trial.batches[start]), "this is the loss of a network that was never trained: load its "
             "parameters from the file, on all ranks"),
            (loss_of(trial, start - 1, trial.batches[start]), "the parameters in the checkpoint are those before the last "
             "update: save after optimizer.step()"),
        ],
    )  # fmt: skip


def of_first_loss(trial, of_ranks, rank):
    right, n, size, parts = trial.truth.losses[0], len(of_ranks), len(trial.batches[0]), trial.shares(of_ranks)[0]
    means = [loss_of(trial, 0, part) for part in parts if part]
    own = means[rank] if len(means) == n else right
    return [
        (own, "this is the mean over this rank's own samples: the loss of an update is that of all ranks"),
        (own * len(parts[rank]) / size, "this is this rank's part of the loss only: add up the parts of all ranks"),
        (sum(means) / n, MEAN_OF_MEANS),
        (sum(means), "this is the sum of the ranks' means: the loss of an update is the mean over its samples"),
        (right * n, "this is too large by the number of ranks: is it added up once too often?"),
        (right / n, "this is too small by the number of ranks: is it divided once too often?"),
        (right * size, "this is the sum over the samples: take the mean"),
    ]  # fmt: skip


def loss_of(trial, after, samples):
    """The loss of some samples with the parameters that one process has after some updates."""
    data, _ = data_of(trial.run)
    network = Noted(trial.run["seed"])
    network.load_state_dict(trial.truth.ends[after])
    return F.cross_entropy(network(data.inputs[samples]), data.labels[samples]).item()


def of_parameters(trial, of_ranks, rank):
    """Of those with which a rank ends."""
    if trial.done:
        if not equal(of_ranks[rank]["end"], of_ranks[0]["end"]):
            return "the ranks have ended with different parameters: all of them load network and optimizer", ()
        return "the updates after the restart were different: are network and optimizer loaded completely?", ()
    n, shares = len(of_ranks), trial.shares(of_ranks)
    mistakes = [
        ({"factor": 0.0}, "the parameters have not changed: train the given network, in place"),
        ({"shares": [[parts[rank]] for parts in shares]}, "this is what the rank ends with if it trains on its own samples "
         "alone: add up the gradients of all ranks"),
        ({"shares": shares}, MEAN_OF_MEANS),
        ({"factor": n}, "each update is too large by the number of ranks: the gradient is the mean over the batch"),
        ({"factor": 1 / n}, "each update is too small by the number of ranks: is the gradient divided once too often? DDP "
         "divides it already"),
        ({"momentum": 0.0}, "the optimizer has no momentum: SGD with lr=0.1 and momentum=0.9"),
        ({"factor": trial.run["size"]}, "the gradient is that of the sum over the samples: take the mean"),
    ]  # fmt: skip
    return (
        "is the gradient of each update the mean over the samples of all ranks, and the optimizer SGD with lr=0.1 and "
        "momentum=0.9, in the given network?",
        lambda: ((numbers_of(OneProcess(trial.run, **options).ends[-1]), cause) for options, cause in mistakes),
    )


def numbers_of(parameters):
    return list(parameters.values())
