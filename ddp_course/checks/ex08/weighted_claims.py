"""What question 5 claims of a rank that has trained, evaluated and kept the best parameters."""

from functools import partial

import torch

from ddp_course.checks.claims import Claim, agree
from ddp_course.checks.ex08.port import updates_of
from ddp_course.checks.ex08.weighted_cases import BATCHES, combinations, trained
from ddp_course.checks.ported import DIGITS, shuffled, start_of

TWICE = (
    "the samples have been divided among the ranks twice: a DistributedSampler gives each rank its share, and "
    "accelerator.prepare divides what it gets once more. Trainer's own loader divides them once"
)
SAME_ORDER = (
    "the samples have to be shuffled anew in each epoch: a DistributedSampler does that only if somebody calls its "
    "set_epoch. Trainer calls the set_epoch of a loader that has one, and its own loader has one"
)
ALIAS = (
    "these tensors are the model's own, which training goes on changing: state_dict() refers to parameters and buffers, and "
    "so does a copy of the dict alone. Copy each tensor"
)
KINDS = {
    "micro-batches": "each micro-batch is divided by the sum of its own weights, as F.cross_entropy does if it has weights "
    "and takes the mean: so a sample counts more where the others of its micro-batch have small weights",
    "update": "the sum of the weighted losses is divided by the sum of the weights: here it is divided by the number of "
    "samples",
    "plain": "all samples count the same: the weight of its class is missing",
}
MICRO_BATCHES_TWICE = (
    "the loss has been divided by the number of micro-batches twice: Trainer divides what compute_loss returns by it"
)
TIMES_MICRO_BATCHES = "the gradients are too large, by the number of micro-batches"
SCALES = {
    "k less": MICRO_BATCHES_TWICE,
    "k more": TIMES_MICRO_BATCHES,
    "K less": MICRO_BATCHES_TWICE,
    "K more": TIMES_MICRO_BATCHES,
    "last": "the gradients are too small in the last update of an epoch: it has fewer than gradient_accumulation_steps "
    "micro-batches, and Trainer divides by their true number",
    "n less": "the loss has been divided by the number of ranks, though DDP already takes the mean over them",
    "n more": "the loss has been multiplied by the number of ranks: DDP takes the mean of their gradients, and here nothing "
    "has divided by their number before",
    "sum": "it is the sum over the samples of a micro-batch: the mean is needed",
    "b less": "the loss has been divided by the samples of the micro-batch twice",
}


def claims(case, rank, of_ranks):
    seen, epochs = of_ranks[rank], len(case.errors)
    share, counts = BATCHES[case.n] * case.batch_size, [sum(map(len, of_rank["trained"])) for of_rank in of_ranks]
    yield Claim(
        f"how many samples this rank is trained on, in {case} with {case.samples} samples", counts[rank], share * epochs,
        "in each epoch, each sample goes through the network once, on one rank",
        [(share * epochs // case.n, TWICE), (case.samples * epochs, "each rank goes through all samples: each needs a "
         "share of its own")],
    )  # fmt: skip
    yield Claim(f"the sizes of the micro-batches in {case}", sorted({*map(len, seen["trained"])}), [case.batch_size],
                "a micro-batch has per_device_train_batch_size samples")  # fmt: skip
    yield from shuffled(str(case), [of_rank["trained"] for of_rank in of_ranks], case.samples, epochs, SAME_ORDER)
    updates = updates_of(of_ranks)
    truth, per_epoch = trained(case, updates), len(updates) // epochs
    for number, got in enumerate(seen["evaluated"], 1):
        end = number * per_epoch
        yield Claim(f"the parameters after epoch {number} of {case}, compared with one process", got, truth[end - 1],
                    partial(unexplained, number - 1, of_ranks), partial(mistakes, case, updates[:end], rank, of_ranks),
                    DIGITS)  # fmt: skip
        yield Claim(f"the model after evaluation {number} of {case}", seen["changes"].get(number, []), [],
                    "evaluate() has changed the model: training goes on from its own parameters, not from the best ones",
                    told="as before it", shown="changed")  # fmt: skip
    yield Claim(f"the eval_error of what evaluate() has returned in {case}", seen["returned"], case.errors,
                "evaluate() returns the metrics, as Trainer's does: other parts of a program use them")  # fmt: skip
    yield from best(case, rank, seen, truth[per_epoch - 1 :: per_epoch])


def unexplained(number, of_ranks):
    first, *others = [of_rank["evaluated"][number] for of_rank in of_ranks]
    if not all(agree(other, first, DIGITS) for other in others):
        return "the ranks have different parameters: the loss has to come from the model that compute_loss gets"
    return (
        "the loss of an update is the sum of weight times cross-entropy over all its samples, divided by their number. "
        "Follow one sample: what is it multiplied and divided by, in compute_loss, in training_step and in DDP?"
    )


def mistakes(case, updates, rank, of_ranks):
    apart = "this rank trains alone: the loss has to come from the model that compute_loss gets"
    own = [[[batches[rank]] for batches in rounds] for rounds in updates]
    yield trained(case, own)[-1], apart
    for kind, scale in combinations():
        yield trained(case, updates, kind, scale)[-1], KINDS.get(kind) or SCALES[scale]


def best(case, rank, seen, truth):
    """Claims that the best parameters are kept. truth: those of each evaluation."""
    errors = " and ".join(", ".join(map(str, case.errors)).rsplit(", ", 1))
    call = f"`best` after evaluations with eval_error {errors}"
    got, right = seen["best"], truth[case.lowest]
    yield Claim(call, isinstance(got, dict), True, "each rank keeps the state_dict of the model, a dict of tensors",
                told="a state_dict", shown=got)  # fmt: skip
    yield Claim(f"the names in {call}", got["names"], seen["names"], "they are those of self.model.state_dict()",
                [(seen["parameters"], "a state_dict holds the buffers, too, not only the parameters")])  # fmt: skip
    yield Claim(f"whose memory it is, {call}", got["shared"], False, ALIAS, told="memory of its own",
                shown="that of the model")  # fmt: skip
    same = "evaluation 3 has the same eval_error as evaluation 1, so it is no better: `best` stays as it is"
    tied = [(vector, same) for vector, error in list(zip(truth, case.errors))[2:] if error == case.errors[0]]
    others = [
        (vector, f"these are the parameters of evaluation {number}: `best` is that of the lowest eval_error so far")
        for number, vector in enumerate(truth, 1)
    ]
    before = [(start_of(case.seed + own), "these are the parameters of before the training") for own in (0, rank)]
    yield Claim(call, got["values"], right, "keep the parameters as they are when the evaluation is over, unchanged",
                [*tied, *others, *before], DIGITS)  # fmt: skip
    yield Claim(f"the buffer in {call}, which counts the batches of training", got["batches"],
                float((case.lowest + 1) * BATCHES[case.n]), "keep the buffers of that evaluation, too")  # fmt: skip


def kept(best, model):
    """What an answer has kept, for the claims: {"names", "values", "batches", "shared"}, or words.

    values: of all but the buffer, one vector.
    """
    if not hasattr(best, "keys") or not all(isinstance(value, torch.Tensor) for value in best.values()):
        return "nothing (None)" if best is None else f"a {type(best).__name__}"
    places = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    values = [value.detach().double().flatten() for name, value in best.items() if name != "batches"]
    return {
        "names": list(best),
        "values": torch.cat(values) if values else torch.empty(0),
        "batches": best["batches"].double().sum().item() if "batches" in best else None,
        "shared": any(value.untyped_storage().data_ptr() in places for value in best.values()),
    }
