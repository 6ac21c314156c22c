"""The logits and targets on which question 1 tries an answer."""

import torch

from ddp_course.checks.ex17.meshes import in_words

IGNORED, LARGE = -100, 10_000
AROUND = {  # logits around LARGE and -LARGE, in one batch
    "tokens": "some tokens' logits around 10,000 and others' around -10,000",
    "ranks": "in each token, some ranks' logits around 10,000 and others' around -10,000",
    "groups": "logits around 10,000 in the first group and around -10,000 in the second",
}


def made(case, number):
    """The whole logits and the targets of a case, for its group of this number."""
    generator = torch.Generator().manual_seed(case["seed"] + number)
    shape = case["tokens"], sum(case["widths"])
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64) + middles(case, number)
    targets = torch.randint(shape[1], shape[:1], generator=generator)
    ignored = {"none": 0, "some": shape[0] // 3, "all but one": shape[0] - 1, "all": shape[0]}[case["ignored"]]
    targets[torch.randperm(shape[0], generator=generator)[:ignored]] = IGNORED
    return logits, targets


def second(case, number):
    """The logits and targets of the second loss, which may have the first one's logits or targets."""
    (logits, targets), others = made(case, number), made(case, number + 10)
    return logits if case["same"] == "logits" else others[0], targets if case["same"] == "targets" else others[1]


def middles(case, number):
    """Around which numbers the logits are: (tokens, columns), or one for all."""
    if case["around"] not in AROUND:
        return case["around"]
    ranks = torch.arange(len(case["widths"])).repeat_interleave(torch.tensor(case["widths"]))
    place = {"tokens": 0, "ranks": ranks, "groups": number % 10}[case["around"]]
    tokens = 0 if case["around"] == "groups" else torch.arange(case["tokens"])[:, None]
    return LARGE * (1 - 2 * ((tokens + place) % 2))


def columns(case, place):
    first = sum(case["widths"][:place])
    return slice(first, first + case["widths"][place])


def described(case):
    widths = ", ".join(map(str, case["widths"]))
    words = f"{in_words(case['groups'])}, with {widths} columns, {case['tokens']} tokens"
    around = case["around"]
    words += f", {AROUND.get(around) or f'logits around {around:g}'}" if around else ""
    return words + (f", {case['ignored']} targets -100" if case["ignored"] != "none" else "")
