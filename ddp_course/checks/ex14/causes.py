"""The likely mistake where a run that was preempted is not right, for question 5.

trial: the Trial of preemption.py; of_ranks: what train_once saw on each rank.
"""

from torch.nn import functional as F

from ddp_course.checks.ex14.preempted import Noted, OneProcess, data_of, near
from ddp_course.checks.training import equal
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import SYMPTOMS, RankTimeout

MEAN_OF_MEANS = "where parts of a batch have different sizes, the mean of their means is not the mean over the batch"


# ---- of an error ----


def of_error(trial, checked, error, told, n):
    """The Wrong for a run that ended with an error; or the error, if it explains itself."""
    text = f"{error.message}\n{error}"
    rows = {} if error.rank is None else {"rank": f"{error.rank} of {n}"}
    if trial.torn is not None:
        rows |= {"expected": "the file before, whole", "got": error.message}
        return Wrong(checked, **rows, cause=of_torn(trial))
    if "FileExistsError" in text and trial.killed:
        cause = "a process that was killed has left its temporary file: the next one must be able to overwrite it"
        rows |= {"expected": "a new checkpoint", "got": error.message}
        return Wrong(checked, **rows, cause=cause)
    if not told:
        return error
    rows["expected"] = "all ranks save and return"
    for name in ("SIGTERM", "SIGUSR1"):
        if f"killed by {name}" in text:
            cause = f"{name} has ended the process: without a handler, this is what a signal does"
            return Wrong(checked, **rows, got=f"killed by {name}", cause=cause)
    if "killed by SIGXFSZ" in text:
        cause = "this rank writes a checkpoint: all ranks have to stop together, and only rank 0 writes"
        got = f"rank {error.rank} has written more than 4,096 bytes to a file"
        return Wrong(checked, **rows, got=got, cause=cause)
    if "SystemExit" in text:
        cause = "train has to return the losses, on all ranks; its caller ends the program"
        return Wrong(checked, **rows, got=error.message, cause=cause)
    if isinstance(error, RankTimeout) or any(words in text for words in SYMPTOMS):
        who = "the signals have reached the ranks at different moments"
        if len(told) == 1:
            who = f"the signal has reached rank {min(told)} only"
        cause = (
            f"{who}, and one rank has waited for another that had left, or was in another call: after each update, all "
            "ranks must decide together, in a collective, whether they stop"
        )
        return Wrong(checked, **rows, got=last_lines(str(error)), cause=cause)
    return error


def of_torn(trial):
    return (
        f"rank 0 was killed while it wrote, and the file at `path` has only its first {trial.torn:,} bytes: write under "
        "another name, and then rename"
    )


def last_lines(text, most=3):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join([*lines[:1], *lines[1:][-most:]])[:400]


# ---- of a number of losses ----


def of_number(trial, returned, start, end):
    """Why it is not the number of losses: `returned` of them came back."""
    if trial.done and returned == end - start:
        return "the losses of the updates before the restart are missing: they belong into the checkpoint, too"
    if trial.done and start > trial.done and returned == end - (start - trial.done):
        return "updates have been left out, with all their samples"
    return "return one loss for each update that has been computed since the run began"


# ---- of a loss ----


def of_loss(trial, of_ranks, rank, start, place):
    """Why the loss of update `place` is not that of one process, on this rank."""
    if not trial.done:
        return of_first_losses(trial, of_ranks, rank, place)
    got = of_ranks[rank]["losses"][place]
    if place < start:
        return "these losses are from before the restart: they belong into the checkpoint as they are"
    if place == start:
        if near(got, loss_with(trial, 0, start)):
            return (
                "this is the loss of a network that was never trained: load its parameters from the file, on all ranks"
            )
        if near(got, loss_with(trial, start - 1, start)):
            return "the parameters in the checkpoint are those before the last update: save after optimizer.step()"
        return (
            "the parameters after the restart are not those with which the last update ended: save them between two "
            "updates, and load them on all ranks"
        )
    if near(got, OneProcess(trial.run, forget=start).losses[place]):
        return "the momentum is lost in the restart: the optimizer has a state, too, optimizer.state_dict()"
    return "the update before this one was different: are network and optimizer loaded on all ranks, each completely?"


def loss_with(trial, after, update):
    """The loss of an update with the parameters that one process has after some."""
    return loss_of(trial, trial.truth.ends[after], trial.batches[update])


def loss_of(trial, parameters, samples):
    data, _ = data_of(trial.run)
    network = Noted(trial.run["seed"])
    network.load_state_dict(parameters)
    return F.cross_entropy(network(data.inputs[samples]), data.labels[samples]).item()


def of_first_losses(trial, of_ranks, rank, place):
    """Why a loss is wrong in a run without a restart."""
    if place:
        return of_parameters(trial, of_ranks, rank)
    got, right, n = of_ranks[rank]["losses"][0], trial.truth.losses[0], len(of_ranks)
    parts, size = trial.shares(of_ranks)[0], len(trial.batches[0])
    means = [loss_of(trial, trial.truth.ends[0], part) for part in parts if part]
    own = means[rank] if len(means) == n else right
    looks = [
        (own, "this is the mean over this rank's own samples: the loss of an update is that of all ranks"),
        (own * len(parts[rank]) / size, "this is this rank's part of the loss only: add up the parts of all ranks"),
        (sum(means) / n, MEAN_OF_MEANS),
        (sum(means), "this is the sum of the ranks' means: the loss of an update is the mean over its samples"),
        (right * n, "this is too large by the number of ranks: is it added up once too often?"),
        (right / n, "this is too small by the number of ranks: is it divided once too often?"),
        (right * size, "this is the sum over the samples: take the mean"),
    ]  # fmt: skip
    otherwise = "the loss of an update is the mean of the cross entropy over its samples, on all ranks, before the step"
    return next((cause for loss, cause in looks if near(got, loss)), otherwise)


# ---- of parameters ----


def of_parameters(trial, of_ranks, rank):
    """Why a rank's parameters at the end are not those of one process."""
    got, n, size = of_ranks[rank]["end"], len(of_ranks), trial.run["size"]
    if trial.done:
        if not equal(got, of_ranks[0]["end"]):
            return "the ranks have ended with different parameters: all of them load network and optimizer"
        return "the updates after the restart were different: are network and optimizer loaded completely?"
    if equal(got, trial.truth.ends[0]):
        return "the parameters have not changed: train the given network, in place"
    shares = trial.shares(of_ranks)
    alone = [[parts[rank]] for parts in shares]
    looks = [
        ({"shares": alone}, "this is what the rank ends with if it trains on its own samples alone: add up the gradients of "
         "all ranks"),
        ({"shares": shares}, MEAN_OF_MEANS),
        ({"factor": n}, "each update is too large by the number of ranks: the gradient is the mean over the batch"),
        ({"factor": 1 / n}, "each update is too small by the number of ranks: is the gradient divided once too often? DDP "
         "divides it already"),
        ({"momentum": 0.0}, "the optimizer has no momentum: SGD with lr=0.1 and momentum=0.9"),
        ({"factor": size}, "the gradient is that of the sum over the samples: take the mean"),
    ]  # fmt: skip
    for options, cause in looks:
        if equal(got, OneProcess(trial.run, **options).ends[-1]):
            return cause
    return (
        "is the gradient of each update the mean over the samples of all ranks, and the optimizer SGD with lr=0.1 and "
        "momentum=0.9, in the given network?"
    )
