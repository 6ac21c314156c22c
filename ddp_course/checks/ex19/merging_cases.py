"""The blocks of attention that question 1 merges."""

import torch

EMPTY = {
    "none": "",
    "first": ", no row sees a key of block 0",
    "last": ", no row sees a key of the last block",
    "some": ", some rows see no key of some blocks",
    "rows": ", some rows see no key of some blocks, and some see none at all",
    "all": ", no row sees any key",
}

GAPPED = {
    False: "",
    True: ", logsumexps up to 26 below the largest one of a row",
    "far": ": the first gives 0 everywhere, and the logsumexps of the second are about 60 below",
}

GAPS = -torch.tensor([0, 15, 18, 21, 26], dtype=torch.float64)


def made(case):
    """[(output, logsumexp)] of the blocks of a case: (2, 3, queries, width or 1)."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape = case["blocks"], 2, 3, case["queries"], case["width"]
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    outputs, logsumexps = draw(*shape), 2 * draw(*shape[:-1], 1)
    empty = empty_rows(case, torch.rand(*shape[:-1], 1, generator=generator))
    logsumexps = (logsumexps + middles(case)).masked_fill(empty, -torch.inf)
    outputs = outputs.masked_fill(empty, torch.nan if case["nan"] else 0)
    if case["gaps"] == "far":
        outputs[0] = 0
    dtype = getattr(torch, case["dtype"])
    return [(output.to(dtype), logsumexp.to(dtype)) for output, logsumexp in zip(outputs, logsumexps)]


def middles(case):
    """Around which numbers the logsumexps are; of some rows, around both. With gaps, each
    block is the one with the largest weight in some rows, and has a tiny one in others.
    """
    if case["gaps"] == "far":
        return -60 * torch.arange(case["blocks"])[:, None, None, None, None]
    if case["gaps"]:
        places = torch.arange(case["blocks"])[:, None] + torch.arange(case["queries"])
        return GAPS[places % len(GAPS)][:, None, None, :, None]
    if case["around"] != "both":
        return case["around"]
    blocks, rows = torch.arange(case["blocks"])[:, None], torch.arange(case["queries"])
    signs = 1 - 2 * ((blocks + rows) % 2)
    signs[:, 0], signs[:, 1] = 1, -1
    return 1000 * signs[:, None, None, :, None]


def empty_rows(case, chances):
    """Which rows see no key of which block; at least one row sees something, but for all."""
    empty, kind = torch.zeros_like(chances, dtype=torch.bool), case["empty"]
    if kind == "first":
        empty[0] = True
    if kind == "last":
        empty[-1] = True
    if kind in ("some", "rows"):
        empty = chances < 0.4
        empty[case["seed"] % case["blocks"]] = False
        empty[0, :, :, 2] = len(empty) > 1  # in the first block, but not in the last one
        empty[-1, :, :, 2] = False
        empty[:, :, :, 4] = torch.arange(len(empty))[:, None, None, None] < len(empty) - 1  # only the last one
    if kind == "rows":
        empty[:, :, 0, 3], empty[:, 1, :, 5] = True, True
    return torch.ones_like(empty) if kind == "all" else empty


def gradients_that_come(case):
    """Those of the merged output and logsumexp."""
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    dtype, shape = getattr(torch, case["dtype"]), (2, 3, case["queries"])
    return [
        torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(dtype) for width in (case["width"], 1)
    ]


def described(case):
    words = f"{case['blocks']} block{'s' * (case['blocks'] > 1)} in {case['dtype']}"
    around = {0: "", "both": ", logsumexps around 1000 and -1000"}
    words += around.get(case["around"], f", logsumexps around {case['around']}") + EMPTY[case["empty"]]
    words += GAPPED[case["gaps"]]
    return words + (" (the output is NaN there)" if case["nan"] else "")
