"""Question 2: the messages of a pipeline, which the lesson's model leaves out."""

from ddp_course.checks.ex21.messages_cases import cases_of
from ddp_course.checks.ex21.messages_claims import MISTAKES, otherwise, right
from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question


@question(
    "Take one rank and one micro-batch. For each of its stages: does the output of forward go to another rank? Does the "
    "gradient of backward? The first stage of all sends no gradient back, and the last one sends nothing on.",
    "A rank has `chunks` stages. Rank 0 sends each of them on, but has the first stage of all; the last rank sends all "
    "gradients back, but has the last stage. With three ranks or more, some rank has neither. So with v chunks, the rank "
    "that sends most sends 2 v messages per micro-batch, or 2 v - 1 if there are two ranks. With one rank, nothing is sent.",
    "numbers = run.micro_batch * run.context * run.width / mesh.tensor / mesh.context, in 2 bytes each. across = "
    "mesh.tensor * mesh.context * mesh.expert * mesh.pipeline > gpu.per_machine. network = constants.network if across "
    "else max(1.0, constants.network). one = network * (2 * numbers / (gpu.across if across else gpu.inside) + (gpu.hop if "
    "across else 0)). Return one * run.micro_batches() * per_micro_batch, as a float.",
)
def check_pipeline_seconds(answer, draw):
    """The seconds are those of the formula, on meshes with and without a pipeline."""
    check_function(
        answer, draw, "pipeline_seconds", cases_of(draw), right, MISTAKES, otherwise, scale=lambda case: 1e-6,
    )  # fmt: skip
