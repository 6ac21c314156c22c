"""What is right in question 2, and what likely mistakes give."""


def busiest(pipeline, chunks):
    """Messages per micro-batch of the rank that sends most."""
    return 0 if pipeline == 1 else 2 * chunks - (pipeline == 2)


def neighbours(run):
    """The ranks that a pipeline has between its first GPU and its last one."""
    mesh = run.mesh
    return mesh.tensor * mesh.context * mesh.expert * mesh.pipeline


def slower(network, across):
    """As step_time.seconds_of has it."""
    return network if across else max(1.0, network)


def formula(
    messages=busiest, tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor / run.mesh.context, size=2,
    far=lambda run, gpu: neighbours(run) > gpu.per_machine, hop=lambda gpu, far: gpu.hop * far, count=None, after=None,
    again=lambda run: 1, network=slower,
):  # fmt: skip
    """The right answer, or one with a mistake in a part of it."""

    def pipeline_seconds(run, gpu, constants):
        across = far(run, gpu)
        one = size * tokens(run) * run.width / (gpu.across if across else gpu.inside)
        join = after or (lambda one, short, times: times * (one + short))
        one = join(one, hop(gpu, across), network(constants.network, across))
        number = count(run) if count else run.micro_batches()
        return float(one * number * messages(run.mesh.pipeline, run.chunks) * again(run))

    return pipeline_seconds


right = formula()


def sent(messages):
    return formula(messages=lambda p, v: messages(p, v) if p > 1 else 0)


MISTAKES = {
    "forward sends activations, and backward sends gradients back, which are as large": sent(lambda p, v: v),
    "with two ranks, none has a neighbour on both sides for all of its stages: one message less": sent(lambda p, v: 2 * v),
    "this is what the first rank sends: of three ranks or more, one in the middle sends a message more":
        sent(lambda p, v: 2 * v - 1),
    "a rank with several chunks has several stages, and each of them sends": sent(lambda p, v: busiest(p, 1)),
    "this is what all ranks of the pipeline send together: return the seconds of the one that sends most":
        sent(lambda p, v: 2 * (p * v - 1)),
    "these are the borders between ranks, on each of which two messages travel: what does one rank send?":
        sent(lambda p, v: 2 * (p - 1)),
    "a chunk's last stage sends on to the first rank: chunks make a ring of the ranks": sent(
        lambda p, v: v if p == 2 else 2 * v),
    "a pipeline of one rank sends nothing": formula(messages=lambda p, v: 2 * v - (p == 2)),
    "a pipeline of one rank sends nothing: even with chunks": formula(messages=lambda p, v: 2 * v - (p <= 2)),
    "tensor ranks share the tokens between layers: each sends its part": formula(
        tokens=lambda run: run.micro_batch * run.context / run.mesh.context),
    "context ranks share the tokens: each sends its part": formula(
        tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor),
    "tensor ranks and context ranks share the tokens: each sends its part": formula(
        tokens=lambda run: run.micro_batch * run.context),
    "a message has the tokens of all sequences of a micro-batch": formula(
        tokens=lambda run: run.context / run.mesh.tensor / run.mesh.context),
    "activations and gradients are in bf16: 2 bytes per number": formula(size=4),
    "activations and gradients are in bf16: 2 bytes per number, and not 1": formula(size=1),
    "these are bits: return seconds for bytes": formula(size=16),
    "a pipeline that spans several machines has the slow link": formula(far=lambda run, gpu: False),
    "a pipeline that fits into one machine has the fast link, and no hop": formula(far=lambda run, gpu: True),
    "data ranks are the outermost dimension: a pipeline may fit into one machine, although the job does not": formula(
        far=lambda run, gpu: run.gpus() > gpu.per_machine),
    "between two stages are the tensor, context and expert ranks: the number of pipeline ranks does not say whether they "
    "share a machine": formula(far=lambda run, gpu: run.mesh.pipeline > gpu.per_machine),
    "the stages are neighbours only beyond the tensor, context and expert ranks: count the pipeline ranks, too": formula(
        far=lambda run, gpu: neighbours(run) / run.mesh.pipeline > gpu.per_machine),
    "the tensor ranks alone do not say whether stages share a machine": formula(
        far=lambda run, gpu: run.mesh.tensor > gpu.per_machine),
    **{f"{name} ranks count, too: they lie between two stages": formula(
        far=lambda run, gpu, name=name: neighbours(run) / getattr(run.mesh, name) > gpu.per_machine)
        for name in ("tensor", "context", "expert")},
    "a machine with exactly as many GPUs as the pipeline spans holds all of it": formula(
        far=lambda run, gpu: neighbours(run) >= gpu.per_machine),
    "each message to another machine takes a hop, too": formula(hop=lambda gpu, far: 0),
    "messages inside a machine have no hop": formula(hop=lambda gpu, far: gpu.hop),
    "the hop is there once per message, and not once per step": lambda run, gpu, constants:
        (formula(hop=lambda gpu, far: 0)(run, gpu, constants)
         + constants.network * gpu.hop * (neighbours(run) > gpu.per_machine) * (run.mesh.pipeline > 1)),
    "constants.network multiplies the hop, too": formula(
        after=lambda one, short, times: times * one + short),
    "inside a machine, messages never take less than the data sheet says: max(1.0, constants.network)": formula(
        network=lambda network, across: network),
    "max(1.0, constants.network) is for messages inside a machine: across, it is constants.network": formula(
        network=lambda network, across: max(1.0, network)),
    "messages take constants.network times as long as the data sheet says": formula(
        network=lambda network, across: 1.0),
    "messages take constants.network times as long: multiply by it": formula(
        after=lambda one, short, times: (one + short) / times),
    "this is one micro-batch: multiply by their number in a step": formula(count=lambda run: 1),
    "data ranks have micro-batches of their own: run.micro_batches() are those of one": formula(
        count=lambda run: run.batch / run.micro_batch),
    "expert ranks have sequences of their own, like data ranks: run.micro_batches() knows it": formula(
        count=lambda run: run.batch / run.micro_batch / run.mesh.data),
    "these are sequences: the number of micro-batches is run.micro_batches()": formula(
        count=lambda run: run.micro_batches() * run.micro_batch),
    "recomputing sends nothing more: the input of each stage is still there": formula(
        again=lambda run: 1.5 if run.recompute == "full" else 1),
    "sharded weights send nothing more between the pipeline's ranks: the stage of ZeRO does not matter here": formula(
        again=lambda run: 2 if run.stage >= 2 else 1),
    "each layer would send here: only the borders between stages are crossed": formula(
        again=lambda run: run.layers),
    "the output is as wide as the model, run.width: keys are narrower": formula(
        tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor / run.mesh.context * run.keys / run.width),
    "expert ranks have texts of their own: they share no tokens": formula(
        tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor / run.mesh.context / run.mesh.expert),
    "data ranks have texts of their own: they share no tokens": formula(
        tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor / run.mesh.context / run.mesh.data),
    "a message has all tokens of its sequences: run.context of each": formula(
        tokens=lambda run: run.micro_batch / run.mesh.tensor / run.mesh.context),
    "inside a machine, messages take max(1.0, constants.network) times as long, and not min": formula(
        network=lambda network, across: network if across else min(1.0, network)),
    "inside a machine, messages take max(1.0, constants.network) times as long: that may be more than 1": formula(
        network=lambda network, across: network if across else 1.0),
    "a machine has gpu.per_machine GPUs, which need not be 8": formula(far=lambda run, gpu: neighbours(run) > 8),
    "the rank that sends most counts, and not the mean of all": sent(lambda p, v: 2 * (p * v - 1) / p),
    "milliseconds: return seconds": lambda *case: 1e3 * right(*case),
}  # fmt: skip


def otherwise(case, got):
    run = case[0]
    if type(got) not in (int, float):
        return "return one number, the seconds, as a float"
    if run.mesh.pipeline == 1:
        return "a pipeline of one rank sends nothing: return 0.0"
    return (
        "micro-batches, times the messages per micro-batch of the rank that sends most, times network * (bytes / link + "
        "hop), where network is constants.network across machines, and at least 1.0 inside of one"
    )
