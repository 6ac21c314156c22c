"""Question 1: a test of code that averages gradients, tried on right and wrong code."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_course.checks.claims import hold
from ddp_course.checks.ex20.averaging_claims import claims, described
from ddp_course.checks.ex20.averaging_codes import RIGHT, WRONG, code
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

# the wrong code that is tried on all meshes, because on some of them it is right
SOME = ("copies", "experts of the world", "experts alone", "experts along expert", "row by row", "four")


def observe_test(test, meshes, orders):
    """For each mesh, {kind of code: what the test did with it on this rank}."""
    seen = []
    with process_group(timeout=5):
        for rows, kinds in zip(meshes, orders):
            mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("data", "expert"))
            found = {}
            for kind in kinds:
                with trying(described(rows)):
                    found[kind] = outcome(test, kind, mesh)
                dist.barrier()
            seen.append(found)
    return seen


def outcome(test, kind, mesh):
    """Whether the test raised, and the text of its error, or what it returned."""
    given = []
    try:
        returned = test(code(kind, given), mesh)
    except AssertionError as error:
        text = " ".join(str(error).split())[:160] or "AssertionError"
        return {"raised": True, "text": text, "given": given, "name": "AssertionError"}
    except Exception as error:
        if kind in RIGHT or isinstance(error, NotImplementedError):
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return {"raised": True, "text": text, "given": given, "name": type(error).__name__}
    return {"raised": False, "text": repr(returned)[:60], "false": returned is False, "given": given, "name": ""}


@question(
    "You choose the gradients before averaging, so you can know the result. Let each rank make the gradients of *all* ranks "
    "from seeds, and take its own. For one parameter of the experts and one dense parameter: whose gradients have to be "
    "added up, and by what is the sum divided?",
    'Experts: the sum over dist.get_process_group_ranks(mesh.get_group("data")). Dense: the sum over all ranks. Both are '
    "divided by the number of all tokens of all ranks. To see all faults, use at least two parameters in each list, one "
    "more without a gradient in each, different tokens on each rank with 0 on one of them, and a relative tolerance of "
    "1e-9.",
    "def of(r): a list of four torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(r)), made "
    "from one generator. tokens = 3 * rank; total = the sum of 3 * r. Parameters of zeros with .grad = of(rank)[i]; two for "
    "experts, two for dense, and one frozen in each list. average(...). Then compare: torch.testing.assert_close(p.grad, "
    'sum(of(r)[i] for r in ranks) / total, rtol=1e-9, atol=1e-12), where ranks are those along "data" for experts and all '
    "for dense; assert frozen.grad is None.",
)
def check_test_averaging(answer, draw):
    """The test passes for right code, and fails for wrong code, on each mesh."""
    lists = []
    for meshes in ([[[0, 1], [2, 3]], [[0, 2], [1, 3]]], [[[0, 1, 2]], [[0], [1], [2]]]):
        chosen = [[*RIGHT, *(WRONG if number == 0 else SOME)] for number in range(len(meshes))]
        orders = [draw.sample(kinds, len(kinds)) for kinds in chosen]
        n = sum(map(len, meshes[0]))
        of_ranks = answer.on_ranks(observe_test, meshes, orders, nproc=n, timeout=20)
        lists += [(rows, [seen[number] for seen in of_ranks]) for number, rows in enumerate(meshes)]
    for rows, seen in lists:
        hold(claims(rows, seen))
