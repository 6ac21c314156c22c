"""What question 1 claims of a plan, in the order in which somebody would look at it."""

import math

from ddp_course import lesson21
from ddp_course.checks.claims import Between, Claim, OneOf
from ddp_course.checks.ex21.briefs import (
    BRIEFS,
    NUMBER_MISTAKES,
    NUMBERS,
    best_of,
    model_of,
    per_token,
    plan_of,
    tokens_of,
    waste,
)
from ddp_course.checks.ex21.plans_form import DIMENSIONS, of_form
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import GPUS, layers_per_rank
from ddp_course.estimates.transformer import stage_parameters

CLOSE = 0.02  # a number may be off by this share
ALIKE = 0.003  # to be told as a mistake: some are nearly the same
MANY = 4096  # sequences: far more than any brief can use
SLOWER = 1.11  # than the best plan; the second best in "week" takes 1.107


def all_claims(seen):
    yield Claim(
        "what plans() returns", sorted(seen) if isinstance(seen, dict) else seen, sorted(BRIEFS),
        "return a dict with one plan for each brief", told=f"a dict with the plans {', '.join(BRIEFS)}",
    )  # fmt: skip
    for name, brief in BRIEFS.items():
        yield from of_form(name, seen[name])
        yield from of_mesh(name, brief, seen[name])
        yield from of_run(name, brief, seen[name])
        yield from of_brief(name, brief, seen[name])


def of_mesh(name, brief, written):
    mesh, model, gpu = Mesh(**written["mesh"]), model_of(brief), GPUS[brief.gpu]
    sizes = [getattr(mesh, dimension) for dimension in DIMENSIONS]
    yield Claim(
        f"{name}: the GPUs of the mesh", math.prod(sizes), brief.gpus,
        "a mesh has as many GPUs as the product of its dimensions, and the brief gives their number",
    )  # fmt: skip
    machines = math.ceil(mesh.tensor / gpu.per_machine)
    yield Claim(
        f"{name}: tensor ranks", mesh.tensor, Between(1, gpu.per_machine),
        f"{mesh.tensor} tensor ranks span {machines} machines, and their messages have the slow link",
        told=f"at most {gpu.per_machine}, inside a machine",
    )  # fmt: skip
    yield Claim(
        f"{name}: heads of keys per tensor rank", model.groups() % mesh.tensor, 0,
        f"the model has {model.groups()} heads with keys of their own, and tensor ranks share them",
        told=f"tensor ranks that divide {model.groups()}", shown=f"{mesh.tensor} tensor ranks",
    )  # fmt: skip
    yield Claim(f"{name}: expert ranks", mesh.expert, 1, "this model has no experts")
    stages = mesh.pipeline * written["chunks"]
    yield Claim(
        f"{name}: stages of the pipeline, {mesh.pipeline} ranks with {written['chunks']} chunks", stages,
        Between(1, model.layers), f"the model has {model.layers} layers, and each stage needs one",
        told=f"at most {model.layers}",
    )  # fmt: skip
    own = brief.context / mesh.context
    yield Claim(
        f"{name}: tokens per context rank", own, Between(lesson21.SHORTEST if mesh.context > 1 else 1),
        f"context ranks should have {lesson21.SHORTEST:,} tokens or more: with fewer, their messages are short",
        told=f"at least {lesson21.SHORTEST:,}", shown=f"{own:,.0f}",
    )  # fmt: skip
    power = mesh.context & (mesh.context - 1) == 0
    yield Claim(
        f"{name}: context ranks", power and brief.context % (2 * mesh.context * mesh.tensor) == 0, True,
        "context ranks are a power of two, and each has two parts of the sequence, which tensor ranks divide again: so "
        "the context is a multiple of 2 x context ranks x tensor ranks",
        told="ranks that divide the context", shown=mesh.context,
    )  # fmt: skip


def of_run(name, brief, written):
    mesh, batch, size = Mesh(**written["mesh"]), written["batch"], written["micro_batch"]
    yield Claim(
        f"{name}: sequences per step", batch, Between(1, MANY),
        f"these sequences have {batch * brief.context:,} tokens: a batch is a number of sequences, not of tokens",
        told=f"at most {MANY:,}",
    )  # fmt: skip
    yield Claim(
        f"{name}: sequences per step", batch, Between(brief.least, brief.most),
        "the brief says how large the batch is" if brief.least == brief.most else "the brief limits the batch",
        told=brief.least if brief.least == brief.most else f"at most {brief.most}",
    )  # fmt: skip
    yield Claim(
        f"{name}: a batch of {batch} on {mesh.data} data ranks", batch % mesh.data, 0,
        "each data rank has the same number of sequences: the batch is a multiple of the data ranks",
        told="nothing left over", shown=f"{batch % mesh.data} left over",
    )  # fmt: skip
    own = batch // mesh.data
    yield Claim(
        f"{name}: micro-batches of {size} of the {own} sequences of a data rank", size <= 16 and own % size == 0, True,
        "a data rank's sequences are divided into micro-batches of one size, 16 at most",
        told=f"a divisor of {own}, at most 16", shown=size,
    )  # fmt: skip
    yield Claim(
        f"{name}: the stage of ZeRO", written["stage"], OneOf(list(brief.stages)),
        "the brief allows no sharded weights" if brief.stages == (0, 1) else "the lesson plans with the stages 0, 1 and 3",
        told=" or ".join(map(str, brief.stages)),
    )  # fmt: skip
    yield Claim(
        f"{name}: the stage of ZeRO with {mesh.pipeline} pipeline ranks", written["stage"] == 3 and mesh.pipeline > 1, False,
        "a pipeline with sharded weights would gather them for each micro-batch and stage: use stage 0 or 1 with it",
        told="0 or 1", shown=3,
    )  # fmt: skip
    chunks, count = written["chunks"], own // size
    yield Claim(
        f"{name}: chunks", chunks, OneOf([1, 2, 4]), "the lesson plans with 1, 2 or 4 chunks", told="1, 2 or 4",
    )  # fmt: skip
    yield Claim(
        f"{name}: {chunks} chunks on {mesh.pipeline} pipeline ranks, with {count} micro-batch{'es' * (count > 1)}",
        chunks == 1 or (mesh.pipeline > 1 and count % mesh.pipeline == 0), True,
        "chunks need a pipeline, and as many micro-batches as fill its groups: a multiple of the pipeline ranks",
        told="1 chunk, or a multiple of the pipeline ranks", shown=f"{count} micro-batch{'es' * (count > 1)}",
    )  # fmt: skip


def of_brief(name, brief, written):
    plan, best = plan_of(brief, written), best_of(brief)
    kept = plan.kept._asdict()
    largest = max(kept, key=kept.get)
    over = plan.kept.total() - brief.room
    yield Claim(
        f"{name}: bytes per rank", plan.kept.total(), Between(0, brief.room),
        f"it does not fit: {over / 1e9:.1f} GB too much. The largest part is {largest}, {kept[largest] / 1e9:.0f} GB"
        f"{of_micro_batch(plan.run)}{of_layers(brief, plan.run)}",
        told=f"at most {brief.room / 1e9:.0f} GB", shown=f"{plan.kept.total() / 1e9:.1f} GB",
    )  # fmt: skip
    if brief.deadline:
        needed = brief.tokens / tokens_of(plan) * plan.seconds()
        yield Claim(
            f"{name}: hours for {brief.tokens / 1e6:.0f} million tokens", needed, Between(0, brief.deadline),
            lambda: f"it is too late: {cause_of_time(brief, plan, best)}",
            told=f"at most {brief.deadline / 3600:.0f}", shown=f"{needed / 3600:.1f}",
        )  # fmt: skip
    slower = per_token(brief, plan) / per_token(brief, best)
    kind = "useful token" if brief.noise else "token"
    yield Claim(
        f"{name}: seconds per {kind}", slower, Between(0, SLOWER), lambda: cause_of_time(brief, plan, best),
        told=f"within {SLOWER - 1:.0%} of the best known plan", shown=f"{slower - 1:.0%} more",
    )  # fmt: skip
    number = NUMBERS[name](brief, plan)
    mistakes = [(near(formula(brief, plan), number), cause) for formula, cause in NUMBER_MISTAKES[name]]
    yield Claim(
        f"{name}: the number, {brief.number}", written["number"], around(number, CLOSE),
        "the plan is good, but its number is another: see what the brief asks for, with the numbers of this very plan",
        mistakes, told=f"within {CLOSE:.0%} of what the lesson's formulas give",
    )  # fmt: skip


def as_built(name, model, run, number):
    """The claim that rank 0 has no more parameters than the formulas say. Where stages do not
    divide the layers, some ranks have fewer.
    """
    dense, _ = stage_parameters(model, run.mesh, 0, layers_per_rank(run))
    shards = run.mesh.data * run.mesh.context if run.stage == 3 else 1
    yield Claim(
        f"{name}: parameters of rank 0, built on a fake process group", number, Between(1, math.ceil(dense / shards)),
        "this rank has more than the lesson's formulas say: please report it",
    )  # fmt: skip


def around(value, share):
    return Between(value * (1 - share), value * (1 + share))


def near(value, number):
    """Where a mistake is told. One in a unit may be off as the number may."""
    unit = abs(value) > 5 * number or abs(value) < number / 5
    share = CLOSE if unit else ALIKE
    return Between(*sorted((value * (1 - share), value * (1 + share))))


def of_micro_batch(run):
    """A sentence about micro-batches of several sequences, or nothing."""
    if run.micro_batch == 1:
        return ""
    return f". Activations and the highest moment grow with the micro-batch, of {run.micro_batch} sequences here"


def of_layers(brief, run):
    """A sentence about stages that do not divide the layers, or nothing."""
    layers, stages = model_of(brief).layers, run.mesh.pipeline * run.chunks
    if layers % stages == 0:
        return ""
    return f". {stages} stages do not divide {layers} layers, so some of them have {layers // stages + 1} layers"


def cause_of_time(brief, plan, best):
    """Why a plan is slower than the best one: what it has most in addition, in words."""
    run, seconds = plan.run, plan.seconds()
    more = {"batch": math.log(waste(brief, plan) / waste(brief, best))}
    per = [[part / tokens_of(each) for part in each.parts] for each in (plan, best)]
    whole = sum(per[1])
    for part, now, before in zip(plan.parts._fields, *per):
        more[part] = (now - before) / whole
    name, mesh = max(more, key=more.get), run.mesh
    if name == "batch":
        return (
            f"the batch of {tokens_of(plan):,} tokens is {tokens_of(plan) / brief.noise:.1f} times the noise scale, and "
            f"each token counts for 1 / {waste(brief, plan):.2f}: fewer data ranks can have a smaller batch"
        )
    part = getattr(plan.parts, name)
    if name == "bubble":
        filled = run.micro_batches() % mesh.pipeline == 0 and 2 * run.chunks * mesh.pipeline <= model_of(brief).layers
        more = run.chunks < 4 and filled
        advice = f"More chunks than {run.chunks} make it smaller" if more else "Micro-batches are counted per data rank"
        return (
            f"the batch leaves {run.micro_batches():g} micro-batches for {mesh.pipeline} pipeline ranks: the bubble is "
            f"{part / seconds:.0%} of the step. {advice}{of_layers(brief, run)}"
        )
    if name in ("products", "attention") and run.recompute == "full" and best.run.recompute == "none":
        return "each block's forward is computed twice, and there is a plan that fits without recomputing"
    if name == "products":
        return f"with {mesh.tensor} tensor ranks the matrices are thin, and products are slower: use fewer tensor ranks"
    return (
        f"{lesson21.WORDS[name]} take {part:.3g} s of a step of {seconds:.3g} s: the best known plan of this brief has less "
        "of them"
    )
