"""torch's own pipelines: the seven schedules of torch.distributed.pipelining."""

import torch

from ddp_course.models.pipeline import token_loss

ONE_STAGE = ("GPipe", "1F1B")  # per rank
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the last stage is on rank 0, too
TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)
NAMES = ONE_STAGE + TWO_STAGES


def stages_on(name, rank, ranks):
    """The numbers of the stages that a rank has with this schedule."""
    if name in ONE_STAGE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]


def owners_with(name, ranks):
    """{stage: its rank}, for all stages of this schedule."""
    owners = {s: rank for rank in range(ranks) for s in stages_on(name, rank, ranks)}
    return dict(sorted(owners.items()))


def stages_of(parts, stages, device):
    """torch's stages for this rank's modules, {number: module}, of so many.

    A stage announces its output's strides, torch 2.11 those of a contiguous one, and a
    padded head's logits are a view.
    """
    from torch.distributed.pipelining import PipelineStage

    for part in parts.values():
        part.register_forward_hook(lambda module, inputs, output: output.contiguous())
    return [PipelineStage(parts[s], s, stages, device) for s in sorted(parts)]


def build(name, parts, stages, micro_batches, device, loss=token_loss):
    """A schedule of torch for this rank's stages, {number: module}, of so many.

    All ranks then call its `step`: that of the first stage with the batch, that of the
    last with target= and losses=[]. The mean over the micro-batches is in the loss:
    with scale_grads=True, torch's default, each stage divides its gradients afterwards,
    and those of a matrix that two stages of a rank share would be divided twice.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    def mean_loss(output, targets):
        return loss(output, targets) / micro_batches

    own = stages_of(parts, stages, device)
    own = own[0] if name in ONE_STAGE else own
    kind = get_schedule_class(name)
    return kind(own, micro_batches, loss_fn=mean_loss, scale_grads=False)


def plan_of(name, ranks, micro_batches):
    """What torch's schedule with two stages per rank has the ranks do, as a plan: see
    estimates/pipeline.py. (What torch lists for its 1F1B is not what it does.)

    Needs a process group of as many ranks; torch's "fake" one will do.
    """
    nothing = {s: torch.nn.Linear(1, 1) for s in stages_on(name, 0, ranks)}
    stages = len(owners_with(name, ranks))
    schedule = build(name, nothing, stages, micro_batches, torch.device("cpu"))
    order = schedule.pipeline_order
    return [[a for each in order[r] for a in as_actions(each)] for r in range(ranks)]


def as_actions(action):
    """One of torch's actions as ours; none for an idle slot, two if they overlap."""
    if action is None:
        return
    for part in action.sub_actions or [action]:
        kind = part.computation_type.value
        if kind in "FBIW":  # the others are about messages
            yield kind, part.stage_index, part.microbatch_index
