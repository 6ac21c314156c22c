"""Exercise 21: planning a run."""

import functools
import inspect
import math
from fractions import Fraction

import numpy
import torch
from ddp_course import lesson21
from ddp_course.checkpoints import resumable
from ddp_course.estimates import memory, pipeline, scaling, step_time, traffic, transformer
from ddp_course.estimates.memory import Mesh

from mutants import right, wrong


def named(name, function):
    """A function under a name of its own, for the candidates that a program makes."""

    def answer(*args):
        return function(*args)

    answer.__name__ = name
    return answer


# Functions of the lesson and of the estimates, as they are: none is an answer.
MODULES = lesson21, step_time, transformer, memory, pipeline, scaling, traffic, resumable
GIVEN = {
    f"{module.__name__}_{name}".replace(".", "_"): function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__
}
SAME_ARGUMENTS = ("parts", "seconds", "data_seconds", "plan_of", "link", "best_interval", "utilization")
GIVEN_ARE = {name: function for name, function in GIVEN.items() if name.endswith(SAME_ARGUMENTS)}
GIVEN_ARE |= {"int": int, "dict": dict, "fsum": math.fsum, "Mesh": Mesh}
for question in ("plans", "pipeline_seconds"):
    for name, function in GIVEN_ARE.items():
        wrong(question, ".", "failed|your code raised")(named(f"given_{name}", function))


# ---- plans ----

TONIGHT = {"mesh": {"data": 4}, "batch": 32, "micro_batch": 1, "stage": 3, "recompute": "full", "number": 40.5}
WEEK = {"mesh": {"data": 16, "context": 2}, "batch": 16, "micro_batch": 1, "stage": 3, "number": 429.8}
LARGE = {"data": 4, "tensor": 4, "pipeline": 4, "context": 8}
CLUSTER = {"mesh": LARGE, "batch": 64, "micro_batch": 1, "stage": 1, "chunks": 4, "number": 4.01}


def all_three(tonight=None, week=None, cluster=None):
    return {"tonight": TONIGHT | (tonight or {}), "week": WEEK | (week or {}), "cluster": CLUSTER | (cluster or {})}


def but(name, pattern=None, status="failed", **changes):
    """The best plans, but for something: a wrong answer, or a right one without a pattern."""

    def plans():
        return all_three(**changes)

    plans.__name__ = name
    wrong("plans", pattern, None if pattern is None else status)(plans)


@right("plans")
def with_a_mesh_of_the_lesson():
    return all_three({"mesh": Mesh(data=4)}, {"mesh": Mesh(16, 1, 1, 2)}, {"mesh": Mesh(4, 4, 4, 8)})


@right("plans")
def with_other_kinds_of_numbers():
    tonight = {"batch": numpy.int64(32), "number": numpy.float64(40.5), "mesh": {"data": 4.0, "expert": 1}}
    return all_three(tonight, {"number": Fraction(4298, 10)}, {"chunks": 4.0})


@right("plans")
def found_by_a_search():
    def best(name, gpus, gpu, context, batches, cost, room, stages=(0, 1, 3)):
        model, found = transformer.MODELS[name], []
        for batch in batches:
            for mesh in lesson21.meshes(model, gpus, context):
                for run in lesson21.runs_on(mesh, model, context, batch):
                    plan = lesson21.plan_of(model, run, gpu)
                    if run.stage in stages and plan.kept.total() <= room:
                        found.append(plan)
        return min(found, key=cost)

    def written(plan, number):
        run = plan.run
        return {
            "mesh": run.mesh, "batch": run.batch, "micro_batch": run.micro_batch, "stage": run.stage,
            "recompute": run.recompute, "chunks": run.chunks, "number": number,
        }  # fmt: skip

    tokens = lambda plan: plan.run.batch * plan.run.context
    rate = lambda plan: plan.seconds() / tokens(plan)
    useful = lambda plan: rate(plan) * (1 + tokens(plan) / 5e5)
    tonight = best("llama3-8b", 4, "a100", 4096, [8, 32], rate, 45e9)
    week = best("llama3-1b", 32, "h100", 8192, [8, 16, 32], useful, 72e9)
    cluster = best("llama3-70b", 512, "h100", 32768, [64], rate, 72e9, (0, 1))
    between = 400 * 3600 / 32
    interval = resumable.best_interval(400, between)
    lost = 400 / interval + (interval / 2 + 3600) / between
    return {
        "tonight": written(tonight, tonight.kept.total() / 1e9),
        "week": written(week, 604800 * (1 - lost) / useful(week) / 1e9),
        "cluster": written(cluster, 100 * cluster.parts.bubble / cluster.seconds()),
    }


but("a_small_batch_of_the_week", week={
    "mesh": {"data": 8, "tensor": 2, "context": 2}, "batch": 8, "number": 388.2,
})  # fmt: skip
but("another_mesh_of_the_cluster", cluster={
    "mesh": {"data": 2, "tensor": 4, "pipeline": 8, "context": 8}, "chunks": 2, "number": 9.02,
})  # fmt: skip
but("one_step_of_four_sequences", tonight={"batch": 4})
but("numbers_a_bit_off", tonight={"number": 41.2}, week={"number": 423}, cluster={"number": 3.95})

but("the_plan_of_the_command", "it does not fit: 17.* GB too much. The largest part is activations", tonight={
    "recompute": "none", "number": 62.5,
})  # fmt: skip
but("four_tensor_ranks", "it is too late. tensor ranks' messages take", tonight={
    "mesh": {"tensor": 4}, "stage": 0, "recompute": "none", "number": 43.5,
})  # fmt: skip
but("ddp", "The largest part is optimizer", tonight={"stage": 0})
but("zero_1", "The largest part is", tonight={"stage": 1})
but("large_micro_batch", "The largest part is moment", tonight={"micro_batch": 8})
but("a_batch_too_large", "at most 32", tonight={"batch": 64})
but("eight_gpus", "product of its dimensions", tonight={"mesh": {"data": 8}})
but("gib", "these are GiB", tonight={"number": 37.72})
but("in_bytes", "these are bytes", tonight={"number": 40.5e9})
but("states_only", "these are the states only", tonight={"number": 32.12})
but("of_four_ranks", "what all four ranks keep", tonight={"number": 162})
but("pure_data", "times the noise scale, and each token counts for", week={
    "mesh": {"data": 32}, "batch": 32, "number": 420,
})  # fmt: skip
but("four_million_tokens", "the batch of 4,194,304 tokens is 8.4 times the noise scale", week={
    "mesh": {"data": 32}, "batch": 512, "number": 69,
})  # fmt: skip
but("tiny_batch", "thin|bubble", week={"mesh": {"data": 2, "tensor": 8, "context": 2}, "batch": 2, "number": 300})
but("a_pipeline_without_batch", "micro-batches for 8 pipeline ranks: the bubble is", week={
    "mesh": {"data": 4, "pipeline": 8}, "batch": 16, "stage": 1, "number": 300,
})  # fmt: skip
but("all_tokens", "divide by that", week={"number": 542.4})
but("without_failures", "checkpoints, failures and restarts cost time", week={"number": 546.3})
but("one_gpu_fails", "32 of them", week={"number": 532.05})
but("without_restarts", "each failure costs a restart", week={"number": 473.46})
but("half_of_the_loss", "one of two parts", week={"number": 466.17})
but("not_divided", "multiple of the data ranks", week={"batch": 24})
but("sixteen_tensor_ranks", "16 tensor ranks span 2 machines", cluster={
    "mesh": {"data": 1, "tensor": 16, "pipeline": 4, "context": 8}, "number": 4,
})  # fmt: skip
but("sharded_weights", "allows no sharded weights", cluster={
    "mesh": {"data": 32, "tensor": 2, "context": 8}, "stage": 3, "chunks": 1, "number": 0,
})  # fmt: skip
but("eight_stages_for_a_small_batch", "micro-batches for 16 pipeline ranks: the bubble is", cluster={
    "mesh": {"data": 2, "tensor": 4, "pipeline": 16, "context": 4}, "chunks": 1, "number": 30,
})  # fmt: skip
but("no_context_ranks", "it does not fit", cluster={
    "mesh": {"data": 8, "tensor": 8, "pipeline": 8}, "chunks": 1, "number": 30,
})  # fmt: skip
but("short_contexts", "4,096 tokens or more", cluster={"mesh": {"data": 2, "tensor": 4, "pipeline": 4, "context": 16}})
but("chunks_that_are_not_filled", "fill its groups", cluster={
    "mesh": {"data": 4, "tensor": 4, "pipeline": 4, "context": 8}, "micro_batch": 8,
})  # fmt: skip
but("chunks_without_a_pipeline", "chunks need a pipeline", tonight={"chunks": 2})
but("a_share", "return percent", cluster={"number": 0.0404})
but("of_computing", "divide by the seconds of the whole step", cluster={"number": 4.69})
but("all_that_waits", "bubble only", cluster={"number": 14.51})
but("ten_tensor_ranks", "product of its dimensions", cluster={"mesh": {"tensor": 10, "data": 51}})
but("experts_in_a_dense_model", "no experts", cluster={"mesh": {"tensor": 4, "pipeline": 4, "context": 8, "expert": 4}})
but("zero_3_in_a_pipeline", "would gather them", tonight={"mesh": {"pipeline": 4}, "batch": 32})
but("stage_2", "stages 0, 1 and 3", tonight={"stage": 2})
but("selective", '"none" or "full"|none.*full', tonight={"recompute": "selective"})
but("a_number_as_text", "one number", tonight={"number": "40.5"})
but("no_number", "one number", tonight={"number": None})
but("nan", "one number", tonight={"number": math.nan})
but("no_data_ranks", "whole number, 1 or more", tonight={"mesh": {"data": 0}})
but("half_a_batch", "whole number, 1 or more", tonight={"batch": 31.5})
but("an_unknown_dimension", "dict of these dimensions", tonight={"mesh": {"dp": 4}})
but("mesh_as_a_tuple", "dict of these dimensions", tonight={"mesh": (4, 1, 1, 1, 1)})
but("more_keys", tonight={"hours": 11, "why": object()})
but("millions_of_tokens", "these are millions", week={"number": 429.8e3})
but("sequences_by_the_noise_scale", "not sequences", week={"number": 542.39})
but("neither_noise_nor_failures", "leaves out both", week={"number": 689.5})
but("hours_for_seconds", "in hours here", week={"number": -161157})
but("hours_for_the_interval", "in the same unit", week={"number": -1683.2})
but("a_checkpoint_per_hour", "its number is another", week={"number": 546.29 * (1 - 4 / 36 - 5400 / 45000)})
but("a_checkpoint_each_three_hours", "its number is another", week={"number": 546.29 * (1 - 4 / 108 - 9000 / 45000)})
but("divided_by_one_and_the_loss", "multiply by 1 - lost", week={"number": 546.29 / 1.21333})
but("no_chunks", "More chunks than 1 make it smaller", cluster={"chunks": 1, "number": 14.3})
but("stages_that_do_not_divide", "32 stages do not divide 80 layers, so some of them have 3", cluster={
    "mesh": {"data": 1, "tensor": 2, "pipeline": 32, "context": 8}, "chunks": 1,
})  # fmt: skip
but("a_huge_batch", "whole number, 1 or more", week={"batch": 10**400})


@wrong("plans", "one plan for each brief")
def only_two():
    return {"tonight": TONIGHT, "week": WEEK}


@wrong("plans", "one plan for each brief")
def a_list():
    return [TONIGHT, WEEK, CLUSTER]


@wrong("plans", "one plan for each brief")
def nothing():
    return None


@wrong("plans", "a dict with these names")
def plans_of_the_lesson():
    best, _ = lesson21.plans(transformer.MODELS["llama3-8b"], 4, "a100", 4096, 32)
    return all_three() | {"tonight": best[0]}


@wrong("plans", ".", "timed out")
def never_ends():
    while True:
        pass


# ---- pipeline_seconds ----


def of_pipeline(run):
    return run.gpus() // run.mesh.data


def seconds(
    run, gpu, constants, messages=lambda p, v: 0 if p == 1 else 2 * v - (p == 2), tokens=None, size=2.0,
    far=lambda run, gpu: of_pipeline(run) > gpu.per_machine, hop=lambda gpu, far: gpu.hop if far else 0.0,
    count=lambda run: run.micro_batches(), times=lambda run: 1, network=lambda size, hop, n: n * (size + hop),
    slower=lambda network, across: network if across else max(1.0, network),
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    mesh = run.mesh
    of_rank = tokens(run) if tokens else run.micro_batch * run.context / mesh.tensor / mesh.context
    across = far(run, gpu)
    one = network(
        size * run.width * of_rank / (gpu.across if across else gpu.inside),
        hop(gpu, across),
        slower(constants.network, across),
    )
    return one * count(run) * messages(mesh.pipeline, run.chunks) * times(run)


def in_pipeline(name, pattern=None, **change):
    def answer(run, gpu, constants):
        return seconds(run, gpu, constants, **change)

    answer.__name__ = name
    wrong("pipeline_seconds", pattern, pattern and "failed")(answer)


def only(messages):
    return lambda p, v: messages(p, v) if p > 1 else 0


@right("pipeline_seconds")
def counted_stage_by_stage(run, gpu, constants):
    """Each border is crossed twice by each micro-batch."""
    ranks, sent = run.mesh.pipeline, [0] * run.mesh.pipeline
    for stage in range(ranks * run.chunks - 1 if ranks > 1 else 0):
        sent[stage % ranks] += 1
        sent[(stage + 1) % ranks] += 1
    return seconds(run, gpu, constants, messages=lambda *_: max(sent))


@right("pipeline_seconds")
def of_numpy(*args):
    return numpy.float64(seconds(*args))


@right("pipeline_seconds")
def as_a_fraction(*args):
    return Fraction(seconds(*args))


@right("pipeline_seconds")
def an_int_for_nothing(run, gpu, constants):
    return 0 if run.mesh.pipeline == 1 else seconds(run, gpu, constants)


@right("pipeline_seconds")
def with_bytes_of_own_tokens(run, gpu, constants):
    """From the tokens of the whole step that a rank sees."""
    p, v = run.mesh.pipeline, run.chunks
    all_bytes = 2 * run.width * step_time.own_tokens(run) / run.mesh.tensor
    far = of_pipeline(run) > gpu.per_machine
    messages = (2 * v - (p == 2)) * (p > 1)
    hops = run.micro_batches() * gpu.hop if far else 0
    slower = constants.network if far else max(1.0, constants.network)
    return slower * messages * (all_bytes / (gpu.across if far else gpu.inside) + hops)


in_pipeline("forward_only", "backward sends gradients back", messages=only(lambda p, v: v))
in_pipeline("two_for_each_stage", "with two ranks, none", messages=only(lambda p, v: 2 * v))
in_pipeline("of_the_first_rank", "of three ranks or more", messages=only(lambda p, v: 2 * v - 1))
in_pipeline("without_chunks", "has several stages", messages=only(lambda p, v: 2 - (p == 2)))
in_pipeline("of_the_whole_pipeline", "all ranks of the pipeline", messages=only(lambda p, v: 2 * p * v - 2))
in_pipeline("borders_between_ranks", "borders between ranks", messages=only(lambda p, v: 2 * p - 2))
in_pipeline("no_ring", "ring of the ranks", messages=only(lambda p, v: v if p == 2 else 2 * v))
in_pipeline("one_rank_sends", "one rank sends nothing", messages=lambda p, v: 2 * v - (p == 2))
in_pipeline("one_rank_sends_between_chunks", "one rank sends nothing", messages=lambda p, v: 2 * v - (p <= 2))
in_pipeline("not_shared_by_tensor_ranks", "tensor ranks share the tokens",
            tokens=lambda run: run.micro_batch * run.context / run.mesh.context)  # fmt: skip
in_pipeline("not_shared_by_context_ranks", "context ranks share the tokens",
            tokens=lambda run: run.micro_batch * run.context / run.mesh.tensor)  # fmt: skip
in_pipeline("not_shared_at_all", "tensor ranks and context ranks", tokens=lambda run: run.micro_batch * run.context)
in_pipeline("of_one_sequence", "all sequences of a micro-batch",
            tokens=lambda run: run.context / run.mesh.tensor / run.mesh.context)  # fmt: skip
in_pipeline("in_fp32", "in bf16", size=4.0)
in_pipeline("in_bits", "bits", size=16.0)
in_pipeline("always_inside", "has the slow link", far=lambda run, gpu: False)
in_pipeline("always_across", "has the fast link", far=lambda run, gpu: True)
in_pipeline(
    "by_pipeline_ranks", "pipeline ranks does not say", far=lambda run, gpu: run.mesh.pipeline > gpu.per_machine
)
in_pipeline("by_all_gpus", "data ranks are the outermost", far=lambda run, gpu: run.gpus() > gpu.per_machine)
in_pipeline(
    "without_pipeline_ranks", "count the pipeline ranks, too",
    far=lambda run, gpu: of_pipeline(run) / run.mesh.pipeline > gpu.per_machine,
)  # fmt: skip
in_pipeline("by_tensor_ranks", "tensor ranks alone do not say", far=lambda run, gpu: run.mesh.tensor > gpu.per_machine)
in_pipeline("a_full_machine_is_two", "holds all of it", far=lambda run, gpu: of_pipeline(run) >= gpu.per_machine)
in_pipeline("without_hops", "takes a hop, too", hop=lambda gpu, far: 0.0)
in_pipeline("hops_everywhere", "inside a machine have no hop", hop=lambda gpu, far: gpu.hop)
in_pipeline("hop_not_multiplied", "multiplies the hop", network=lambda size, hop, n: n * size + hop)
in_pipeline("without_constant", "as long as the data sheet", network=lambda size, hop, n: size + hop)
in_pipeline("divided_by_constant", "multiply by it", network=lambda size, hop, n: (size + hop) / n)
in_pipeline("faster_inside_a_machine", "never take less than the data sheet", slower=lambda network, across: network)
in_pipeline("never_faster", "is for messages inside a machine", slower=lambda network, across: max(1.0, network))
for name in ("tensor", "context", "expert"):
    in_pipeline(
        f"without_{name}_ranks", f"{name} ranks count, too",
        far=lambda run, gpu, name=name: of_pipeline(run) / getattr(run.mesh, name) > gpu.per_machine,
    )  # fmt: skip
in_pipeline("zero_3_sends", "the stage of ZeRO does not matter", times=lambda run: 2 if run.stage == 3 else 1)
in_pipeline("of_one_micro_batch", "this is one micro-batch", count=lambda run: 1)
in_pipeline("of_all_data_ranks", "data ranks have micro-batches", count=lambda run: run.batch / run.micro_batch)
in_pipeline("expert_ranks_forgotten", "expert ranks have sequences",
            count=lambda run: run.batch / run.micro_batch / run.mesh.data)  # fmt: skip
in_pipeline("recomputing_sends", "recomputing sends nothing", times=lambda run: 1.5 if run.recompute == "full" else 1)
in_pipeline("each_layer_sends", "each layer would send", times=lambda run: run.layers)
in_pipeline("in_milliseconds", "milliseconds", times=lambda run: 1000)


@wrong("pipeline_seconds", "without a return")
def no_return(*args):
    seconds(*args)


@wrong("pipeline_seconds", "return one number")
def as_text(*args):
    return str(seconds(*args))


@wrong("pipeline_seconds", "return one number")
def as_pair(*args):
    return seconds(*args), 0.0


@wrong("pipeline_seconds", ".")
def nan_for_one_rank(run, gpu, constants):
    return math.nan if run.mesh.pipeline == 1 else seconds(run, gpu, constants)


@wrong("pipeline_seconds", "ZeroDivision", "your code raised")
def divides_by_zero(run, gpu, constants):
    return seconds(run, gpu, constants) / (run.mesh.pipeline - 1)


known = functools.lru_cache(seconds)


@right("pipeline_seconds")
def with_a_cache(*args):
    return known(*args)


# ---- post_mortem ----


def executions_of(pages):
    found = {}
    for rank, page in enumerate(pages):
        for row in page:
            found.setdefault((row["attempt"], row["step"]), {})[rank] = row
    return dict(sorted(found.items()))


def runs_of(pages, key=lambda row: row["compute"], times=3, across=False, of=max, incomplete=False):
    """[rank, attempt, first, last] of slow steps in a row."""
    runs = []
    for (attempt, step), rows in executions_of(pages).items():
        if len(rows) < (2 if incomplete else len(pages)):
            continue
        *others, slowest = sorted(rows, key=lambda rank: key(rows[rank]))
        if key(rows[slowest]) > times * of([key(rows[rank]) for rank in others]):
            last = runs[-1] if runs else [None] * 4
            if last[0] == slowest and last[3] == step - 1 and (across or last[1] == attempt):
                last[3] = step
            else:
                runs.append([slowest, attempt, step, step])
    return runs


def found_in(
    pages, least=3, pick=lambda runs: max(runs, key=lambda run: run[3] - run[2]), norm="norm", bad=math.isfinite,
    order=lambda key: key, seen=1, of_run=lambda run: (run[0], run[2], run[3]), parts=("compute", "wait"), join=max,
    need=3, last=True, total=lambda rows: True, **how,
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    runs = [run for run in runs_of(pages, **how) if run[3] - run[2] + 1 >= least]
    steps = executions_of(pages)
    nans = [
        (rank, key[1])
        for key in sorted(steps, key=order)
        if len(steps[key]) >= seen
        for rank, row in steps[key].items()
        if row[norm] is not None and not bad(row[norm])
    ]
    done = [key for key, rows in steps.items() if len(rows) >= need]
    seconds = {key: join([sum(row[part] for part in parts) for row in rows.values()]) for key, rows in steps.items()}
    useful = {}
    for attempt, step in done if last else done[::-1]:
        useful[step] = seconds[attempt, step]
    return {
        "slow": of_run(pick(runs)) if runs else None,
        "nan": nans[0] if nans else None,
        "redone": len(done) - len(useful),
        "goodput": sum(useful.values()) / sum(seconds[key] for key, rows in steps.items() if total(rows)),
    }


def post(name, pattern=None, change=None, **how):
    def answer(pages):
        found = found_in(pages, **how)
        return found | change(pages, found) if change else found

    answer.__name__ = name
    wrong("post_mortem", pattern, pattern and "failed")(answer)


for name, function in list(GIVEN_ARE.items())[-6:]:
    wrong("post_mortem", ".", "failed|your code raised")(named(f"given_{name}", function))

post("as_the_text_says")
post("as_lists", change=lambda pages, found: {"slow": found["slow"] and list(found["slow"])})
post("of_numpy", change=lambda pages, found: {"redone": numpy.int64(found["redone"]),
                                              "goodput": numpy.float64(found["goodput"])})  # fmt: skip
post("as_fractions", change=lambda pages, found: {"goodput": Fraction(found["goodput"])})
post("as_arrays", change=lambda pages, found: {"nan": found["nan"] and numpy.array(found["nan"])})


@right("post_mortem")
def changes_its_pages(pages):
    found = found_in(pages)
    pages.clear()
    return found


post("who_waits", "it waits for it|look at .compute. alone", key=lambda row: row["wait"])
post(
    "compute_and_wait",
    "about the same on all ranks|it waits for it|look at .compute. alone",
    key=lambda row: row["compute"] + row["wait"],
)
post("any_slow_step", "no straggler: three in a row", least=1)
post("two_slow_steps", "nor are two", least=2)
post("four_slow_steps", "three slow steps in a row are enough", least=4)
for limit in (1.5, 2, 2.5, 3.5, 5):
    post(f"slow_from_{limit}_times", "your limit is larger" if limit > 3 else "your limit is smaller", times=limit)
post("slower_than_the_mean", "not their mean", of=numpy.mean)
post("slower_than_one", "slow: ", of=min)
post("over_a_restart", "ends with its attempt", across=True)
post("slow_in_an_incomplete_one", "an incomplete execution does not count", incomplete=True)
post("nan_of_complete_ones", "in an incomplete execution, too", seen=3)
post("least_of_ranks", "and not the minimum", join=min)
post("first_of_ranks", "not as long as the first", join=lambda values: values[0])
post("more_names", change=lambda *_: {"attempts": object()})
post("first_run", "and not the first one", pick=lambda runs: runs[0])
post("last_of_equal_runs", "the first one counts", pick=lambda runs: max(runs[::-1], key=lambda run: run[3] - run[2]))
post("without_the_last_step", "slow: ", of_run=lambda run: (run[0], run[2], run[3] - 1))
post("slow_steps_from_zero", "from 1", of_run=lambda run: (run[0], run[2] - 1, run[3] - 1))
post("never_slow", "no straggler is found", change=lambda *_: {"slow": None})
post("after_the_all_reduce", "before it", norm="mean_norm")
post("by_the_loss", "one step later", norm="loss")
post("without_inf", "inf is not finite", bad=lambda value: not math.isnan(value))
post("by_step", "an attempt comes after", order=lambda key: key[::-1])
post(
    "nan_from_zero", "from 1", change=lambda _, found: {"nan": found["nan"] and (found["nan"][0], found["nan"][1] - 1)}
)
post("nan_the_other_way", r"\(rank, step\)", change=lambda _, found: {"nan": found["nan"] and found["nan"][::-1]})
post("never_nan", "no NaN is found", change=lambda *_: {"nan": None})
post("incomplete_ones_count", "only if all ranks have a row", need=1)
post("number_of_restarts", "these are restarts", change=lambda pages, _: {
    "redone": max(row["attempt"] for page in pages for row in page),
})  # fmt: skip
post("rows_in_place_of_updates", "one row per rank", change=lambda _, found: {"redone": 3 * found["redone"]})
post("all_executions", "all updates that were done", change=lambda pages, _: {
    "redone": sum(len(rows) == 3 for rows in executions_of(pages).values()),
})  # fmt: skip
post("of_rank_0", "what one rank has written", change=lambda pages, _: {
    "redone": len(pages[0]) - len({row["step"] for row in pages[0]}),
})  # fmt: skip
post("first_execution_counts", "the last execution counts", last=False)
post("only_complete_seconds", "part of all seconds", total=lambda rows: len(rows) == 3)
post("without_waiting", "compute and wait", parts=("compute",))
post("mean_of_ranks", "and not the mean", join=lambda values: sum(values) / len(values))
post("sum_of_ranks", "and not the sum", join=sum)
post("what_was_lost", "share that was lost", change=lambda _, found: {"goodput": 1 - found["goodput"]})
post("in_percent", "from 0 to 1", change=lambda _, found: {"goodput": 100 * found["goodput"]})
post("share_of_steps", "share of seconds", change=lambda pages, _: {
    "goodput": len({step for (_, step), rows in executions_of(pages).items() if len(rows) == 3})
    / len(executions_of(pages)),
})  # fmt: skip


@wrong("post_mortem", "these four names")
def one_name_missing(pages):
    found = found_in(pages)
    return found | {"goodputs": found.pop("goodput")}


@wrong("post_mortem", "these four names")
def returns_a_tuple(pages):
    return tuple(found_in(pages).values())


@wrong("post_mortem", "these four names")
def returns_none(pages):
    found_in(pages)


@wrong("post_mortem", "KeyError|StopIteration", "your code raised")
def expects_all_rows(pages):
    for row in pages[0]:
        next(other for other in pages[1] if other["step"] == row["step"])["time"]


# ---- small_run ----

OWN = {"lost": (1, 18), "nan": (3, 14), "slow": (1, 13, 16), "redone": 5, "reached": 30, "every_3": 33}
OF_ADA = {"lost": (0, 17), "nan": (3, 13), "slow": (1, 13, 17), "redone": 4, "reached": 31, "every_3": 34}


def ran(name, pattern=None, status="failed", who="the course", **changes):
    """Findings of the course's own run with some changes. None leaves a finding out."""
    found = {key: value for key, value in (OWN | changes).items() if value is not None}

    def findings():
        return who, found

    findings.__name__ = name
    return wrong("small_run", pattern, None if pattern is None else status)(findings)


ran("as_lists", lost=[1, 18], slow=[1, 13, 16])
ran("from_numpy", redone=numpy.int64(5), nan=torch.tensor([3, 14]))
ran("a_name_in_capitals", who="  The  Course ")
ran("more_findings", goodput=0.35, attempts=2)
ran("of_ada", who="Ada", **OF_ADA)
ran("the_other_machine", "without a mean norm", lost=(0, 18))
ran("the_other_machines_last_step", "without a mean norm", lost=(0, 17))
ran("the_last_step_done", "lost in the next one", lost=(1, 17))
ran("a_lost_rank", "not a rank", lost=(3, 18))
ran("lost_the_other_way", r"\(machine, step\)", lost=(18, 1))
ran("only_the_step", "whose ranks have no row", lost=18)
ran("nan_from_zero", "from 1", nan=(3, 13))
ran("any_rank_has_the_nan", "mean norm is NaN", nan=(0, 14))
ran("nan_of_a_rank_from_one", "ranks are counted from 0", nan=(4, 14))
ran("nan_the_other_way", r"\(rank, step\)", nan=(14, 3))
ran("no_nan", "not finite", nan=...)
ran("slow_from_zero", "from 1", slow=(1, 12, 15))
ran("to_the_step_after", "not the one after", slow=(1, 13, 17))
ran("how_many_slow_steps", "number of steps", slow=(1, 13, 4))
ran("who_waits", "those that wait", slow=(3, 13, 16))
ran("slow_machine", "ranks are counted from 0", slow=(0, 13, 16))
ran("slow_the_other_way", r"\(rank, first step, last step\)", slow=(13, 16, 1))
ran("one_step_less", "more than 3 times", slow=(1, 13, 15))
ran("the_lost_step_counts", "was not done twice", redone=6)
ran("redone_rows", "one row per rank", redone=20)
ran("all_executions_are_redone", "all executions", redone=36)
ran("the_whole_budget", "done twice", reached=36)
ran("without_the_incomplete_one", "incomplete", reached=31)
ran("executions_of_attempt_1", "does not begin with step 1", reached=18)
ran("as_it_was", "what would it be", every_3=30)
ran("nothing_is_lost", "at least the execution", every_3=36)
ran("nothing_is_redone", "some steps after the latest checkpoint", every_3=35)
ran("every_3_without_the_incomplete_one", "incomplete execution", every_3=34)
ran("as_a_float", "whole number", redone=4.5)
ran("a_finding_less", "there is no reached", reached=None)
ran("of_somebody_else", "the name that you gave small_run", who="somebody")
ran("of_adas_run", "the name that you gave small_run", **OF_ADA)
ran("no_name", "your own name", who="your name")


@wrong("small_run", "a pair: a text, and a dict")
def only_the_dict():
    return OWN


@wrong("small_run", "a pair: a text, and a dict")
def findings_as_a_list():
    return "the course", list(OWN.values())


@wrong("small_run", "KeyError", "your code raised")
def raises():
    return "the course", {}["lost"]
