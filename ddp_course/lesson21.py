"""A plan for a training run on a cluster: mesh, memory, time, and what comes second.

python ddp_course/lesson21.py --model llama3-8b --gpus 64 --gpu h100
python ddp_course/lesson21.py --model llama3-8b --gpus 64 --context 131072 --batch 32
python ddp_course/lesson21.py --model mixtral-8x7b --gpus 128 --show 3
torchrun --nproc_per_node 2 ddp_course/lesson21.py --model llama3-1b --gpus 32
"""

import math
from typing import NamedTuple

from ddp_course import UsageError, runs
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import (
    FITTED,
    GPUS,
    Parts,
    Run,
    parts,
    utilization,
)
from ddp_course.estimates.transformer import (
    FREE,
    MODELS,
    SHORTEST,
    Kept,
    kept_by_run,
    run_of,
)
from ddp_course.ranks.environment import torchrun_environment


class Plan(NamedTuple):
    """A way to do a step: what a rank keeps, and where the seconds go."""

    run: Run
    kept: Kept
    parts: Parts

    def seconds(self):
        return self.parts.total()

    def fits(self, gpu):
        return self.kept.total() <= FREE * GPUS[gpu].memory


# ---- all meshes, and what can be done on each ----


def divisors(number, most):
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def meshes(model, gpus, context, per_machine=8):
    """All meshes of so many GPUs that divide the model, as they are usual: tensor ranks
    inside a machine, no more expert ranks than experts, and context ranks, a power of
    two, with SHORTEST tokens or more.
    """
    for tensor in divisors(math.gcd(gpus, model.groups()), per_machine):
        for pipeline in divisors(gpus // tensor, model.layers):
            rest = gpus // tensor // pipeline
            for ring in (2**power for power in range(7)):
                if ring > 1 and context < SHORTEST * ring:
                    break
                pieces = 2 * ring if ring > 1 else 1  # of zigzag, see lesson 19
                if rest % ring or context % (pieces * tensor):
                    continue
                for expert in divisors(math.gcd(rest // ring, model.experts), 64):
                    data = rest // ring // expert
                    yield Mesh(data, tensor, pipeline, ring, expert)


def runs_on(mesh, model, context, batch):
    """Runs of a model on this mesh: micro-batches, ZeRO's stage, recomputing, chunks.

    Interleaved pipelines need as many micro-batches as fill their groups (lesson 18),
    and a pipeline would gather weights for each of them, so it does not shard weights.
    """
    own, rest = divmod(batch, mesh.data * mesh.expert)
    for micro_batch in divisors(own, 16) if not rest else ():
        filled = mesh.pipeline > 1 and own // micro_batch % mesh.pipeline == 0
        for stage in (0, 1, 3) if mesh.pipeline == 1 else (0, 1):
            for recompute in ("none", "full"):
                for chunks in (1, 2, 4) if filled else (1,):
                    if mesh.pipeline * chunks <= model.layers:
                        how = {"stage": stage, "recompute": recompute, "chunks": chunks}
                        yield run_of(model, mesh, context, batch, micro_batch, **how)


def plan_of(model, run, gpu):
    """The Plan of one run. gpu: one of GPUS."""
    return Plan(run, kept_by_run(model, run), parts(run, GPUS[gpu], FITTED[gpu]))


def plans(model, gpus, gpu, context, batch):
    """The fastest plan of each mesh that fits, the fastest first; and the fastest that
    does not fit, or None: ([Plan], Plan). If none fits, the latter is the smallest one.

    gpus: how many; gpu: one of GPUS; context: tokens per sequence; batch: sequences per
    step. Raises UsageError if no mesh can share the batch.
    """
    best, unfit, smallest = {}, None, None
    for mesh in meshes(model, gpus, context, GPUS[gpu].per_machine):
        for run in runs_on(mesh, model, context, batch):
            found = plan_of(model, run, gpu)
            if smallest is None or found.kept.total() < smallest.kept.total():
                smallest = found
            if not found.fits(gpu):
                if unfit is None or found.seconds() < unfit.seconds():
                    unfit = found
            elif mesh not in best or found.seconds() < best[mesh].seconds():
                best[mesh] = found
    if smallest is None:
        problem = (
            f"no mesh of {gpus} GPUs can share {batch} sequences of {context} tokens"
        )
        raise UsageError(f"{problem}: try a --batch that {gpus} divides")
    return sorted(best.values(), key=Plan.seconds), unfit if best else smallest


# ---- in words ----

WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "bubble": "bubble",
    "tensor": "tensor ranks' messages",
    "context": "context ranks' messages",
    "expert": "expert ranks' messages",
    "data": "data ranks' messages",
}


def reason(plan, best):
    """Why a plan takes longer than the best one: the part that grew most, in words."""
    more = [now - before for now, before in zip(plan.parts, best.parts)]
    name = Parts._fields[more.index(max(more))]
    return f"+{max(more):.2f} s {WORDS[name]}" if max(more) > 0 else "the best"


def in_words(run):
    """A plan as one would say it: `8 data x 4 tensor, ZeRO-3, micro-batch 1`."""
    sizes = vars(run.mesh).items()
    ranks = [f"{size} {name}" for name, size in sizes if size > 1] or ["1 rank"]
    told = [" x ".join(ranks), f"micro-batch {run.micro_batch}"]
    told += [f"ZeRO-{run.stage}"] if run.stage else []
    told += [f"{run.chunks} chunks"] if run.chunks > 1 else []
    told += ["recomputing"] if run.recompute == "full" else []
    return ", ".join(told)


def days(plan, tokens):
    """How long it takes to train on so many tokens, if nothing fails."""
    steps = tokens / (plan.run.batch * plan.run.context)
    return steps * plan.seconds() / 86400


# ---- the program ----


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains=None)
    flag, count = parser.add_argument, {"type": runs.count}
    flag("--model", choices=list(MODELS), default="llama3-8b", help="(llama3-8b)")
    flag("--gpus", **count, default=64, help="how many (64)")
    flag("--gpu", choices=list(GPUS), default="h100", help="which (h100)")
    flag("--context", **count, default=8192, help="tokens per sequence (8192)")
    flag("--batch", **count, help="sequences per step (4 million tokens)")
    each = "20 per parameter that a token uses"
    flag("--tokens", type=runs.number, help=f"to train on ({each})")
    flag("--show", **count, default=5, help="how many plans (5)")
    args = parser.parse_args(argv)
    args.batch = args.batch or max(1, 2**22 // args.context)
    return args


def main(argv=()):
    args = arguments(argv)
    model = MODELS[args.model]
    found, unfit = plans(model, args.gpus, args.gpu, args.context, args.batch)
    if not found:
        needs = f"needs {unfit.kept.total() / 1e9:.0f} GB per rank"
        problem = f"{args.model} does not fit on {args.gpus} x {args.gpu}"
        raise UsageError(f"{problem}: even {in_words(unfit.run)} {needs}")
    active = model.parameters(model.chosen)
    tokens = 20 * active if args.tokens is None else args.tokens
    rows = [as_data(plan, found[0], args.gpu, tokens) for plan in found]
    environment = torchrun_environment()
    result = {"lesson": args.lesson, "world_size": environment.world_size}
    result |= {"backend": "none", "device": "cpu", "model": args.model} | rows[0]
    del result["why"]
    if environment.rank == 0:
        log = runs.open_folder(args.out)
        for number, row in enumerate(rows[: args.show], start=1):
            plan, numbers = as_text(row)
            log.info(f"{number:2}. {plan}")
            log.info(numbers)
        if unfit and unfit.seconds() < found[0].seconds():
            needs = f"{unfit.kept.total() / 1e9:.0f} GB per rank"
            log.info(f"faster, but without room: {in_words(unfit.run)}, {needs}")
        runs.write_result(args.out, result, rows)
    return result


def as_data(plan, best, gpu, tokens):
    """A plan as a row of metrics.jsonl."""
    run, seconds = plan.run, plan.seconds()
    return {
        "plan": in_words(run),
        "gigabytes": round(plan.kept.total() / 1e9, 1),
        "seconds": round(seconds, 2),
        "utilization": round(utilization(run, GPUS[gpu], seconds), 3),
        "days": round(days(plan, tokens), 1),
        "gpu_hours": round(days(plan, tokens) * 24 * run.gpus()),
        "why": reason(plan, best),
    }


def as_text(row):
    """A row of as_data in two lines."""
    shown = f"{row['gigabytes']} GB, {row['seconds']} s per step, {row['days']} days"
    return [row["plan"], f"    {shown}: {row['why']}"]


if __name__ == "__main__":
    runs.start(main)
