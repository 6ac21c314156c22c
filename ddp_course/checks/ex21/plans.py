"""Question 1: plans for three briefs."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex21.briefs import BRIEFS, model_of, plan_of
from ddp_course.checks.ex21.plans_claims import all_claims, as_built
from ddp_course.checks.ex21.plans_form import written
from ddp_course.estimates.rehearsal import built
from ddp_course.judge.question import question


def build(plans):
    """How many parameters rank 0 of each plan really has."""
    return [built(*plan) for plan in plans]


@question(
    "Search as the lesson does: go through lesson21.meshes and lesson21.runs_on, make a Plan of each run with "
    "lesson21.plan_of, and keep those that meet the brief. lesson21.plans does not know the limits of these briefs: the "
    "room per rank, the stages that are allowed, and the noise scale.",
    "Tonight: a plan's bytes are plan.kept.total(); blocks that are recomputed keep little. Week: try batches of 4 to 64 "
    "sequences, and compare seconds per useful token, seconds / tokens * (1 + batch * context / 500e3). Context ranks and "
    "tensor ranks let 32 GPUs share a small batch. Cluster: with stages 0 and 1 only, chunks make the bubble small.",
    "min((plan for batch in ... for mesh in lesson21.meshes(model, gpus, context) for run in lesson21.runs_on(mesh, model, "
    "context, batch) for plan in [lesson21.plan_of(model, run, gpu)] if it meets the brief), key=seconds per useful token). "
    "The numbers: plan.kept.total() / 1e9; 604800 * (1 - lost) / plan.seconds() * tokens / (1 + tokens / 500e3) / 1e9, with "
    "between = 400 * 3600 / 32, interval = best_interval(400, between) and lost = 400 / interval + (interval / 2 + 3600) / "
    "between; and 100 * plan.parts.bubble / plan.seconds().",
)
def check_plans(answer, draw):
    """Each plan is a mesh of the brief's GPUs, fits, keeps the constraints, and is about as
    fast as the best one; and its number is that of the plan. Rank 0's part of the model is
    then built, with torch's fake process group in place of the other ranks.
    """
    [seen] = answer.on_ranks(written)
    hold(all_claims(seen))
    runs = [(model_of(brief), plan_of(brief, seen[name]).run) for name, brief in BRIEFS.items()]
    [numbers] = answer.without(build, runs)
    for name, (model, run), number in zip(BRIEFS, runs, numbers):
        hold(as_built(name, model, run, number))
