"""The logits and targets on which question 1 tries an answer."""

import torch

from ddp_course.checks.ex17.meshes import in_words

IGNORED = -100


def made(case, number):
    """The whole logits and the targets of a case, for its group of this number."""
    generator = torch.Generator().manual_seed(case["seed"] + number)
    shape = case["tokens"], sum(case["widths"])
    logits = case["around"] + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(shape[1], shape[:1], generator=generator)
    ignored = {"none": 0, "some": shape[0] // 3, "all but one": shape[0] - 1, "all": shape[0]}[case["ignored"]]
    targets[torch.randperm(shape[0], generator=generator)[:ignored]] = IGNORED
    return logits, targets


def columns(case, place):
    first = sum(case["widths"][:place])
    return slice(first, first + case["widths"][place])


def described(case):
    widths = ", ".join(map(str, case["widths"]))
    words = f"{in_words(case['groups'])}, with {widths} columns, {case['tokens']} tokens"
    words += f", logits around {case['around']:g}" if case["around"] else ""
    return words + (f", {case['ignored']} targets -100" if case["ignored"] != "none" else "")
