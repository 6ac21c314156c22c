"""The form of question 1's plans: dicts of plain values."""

from dataclasses import asdict, is_dataclass

from ddp_course.checks.claims import Between, Claim, OneOf

DIMENSIONS = ["data", "tensor", "pipeline", "context", "expert"]
COUNTS = ["batch", "micro_batch", "chunks"]
DEFAULTS = {"stage": 0, "recompute": "none", "chunks": 1}
NAMES = sorted(["mesh", "batch", "micro_batch", *DEFAULTS, "number"])
MOST = 10**6


def written(plans):
    """What the answer is, as plain values; a Mesh counts as its dict. Names of a plan that
    nobody asked for are left out.
    """
    found = plans()
    if not isinstance(found, dict):
        return "nothing (None)" if found is None else repr(found)[:200]
    return {str(name): as_dict(plan) for name, plan in found.items()}


def as_dict(plan):
    if not isinstance(plan, dict):
        return repr(plan)[:200]
    plan = DEFAULTS | {name: whole(value) for name, value in plan.items() if name in NAMES}
    mesh = plan.get("mesh")
    if is_dataclass(mesh) and not isinstance(mesh, type):
        mesh = asdict(mesh)
    if isinstance(mesh, dict):
        plan["mesh"] = {str(name): whole(size) for name, size in mesh.items()}
    return plan


def whole(value):
    """An int if it is a whole number, so that 4.0 counts as 4."""
    if isinstance(value, bool | int) or not hasattr(value, "__float__"):
        return value
    value = float(value)
    return int(value) if value.is_integer() else value


def of_form(name, plan):
    yield Claim(
        f"{name}: the plan", sorted(plan) if isinstance(plan, dict) else plan, NAMES,
        "a plan is a dict with these names, of which stage, recompute and chunks may be left out",
    )  # fmt: skip
    mesh = plan["mesh"]
    known = isinstance(mesh, dict) and all(dimension in DIMENSIONS for dimension in mesh)
    yield Claim(
        f"{name}: the mesh", known, True, "the mesh is a dict of these dimensions; those left out have 1 rank",
        told=f"a dict with some of {', '.join(DIMENSIONS)}", shown=mesh,
    )  # fmt: skip
    sizes = {f"{dimension} ranks": size for dimension, size in mesh.items()} | {each: plan[each] for each in COUNTS}
    for what, size in sizes.items():
        fits = type(size) is int and 1 <= size <= MOST
        yield Claim(
            f"{name}: {what}", fits, True, "this is a whole number, 1 or more", told=f"1 to {MOST:,}", shown=size,
        )  # fmt: skip
    yield Claim(
        f"{name}: recompute", plan["recompute"], OneOf(["none", "full"]), "the lesson plans with \"none\" or \"full\"",
        told="'none' or 'full'",
    )  # fmt: skip
    yield Claim(
        f"{name}: the number", plan["number"], Between(float("-inf")), "the number is what the brief asks for: one number",
        told="a number",
    )  # fmt: skip
