from importlib.metadata import version

from tries import new, run

APART = """
def apart():
    first, second = (torch.tensor(seen[f"rank {rank}"])[:, 0] for rank in (0, 1))
    return (first - second).abs().mean().item()


of_two = apart()
"""
LOSS = "(rank + 1) * all_reduce(1.0 * x)"
TORCH = tuple(map(int, version("torch").split(".")[:2]))
OPTION = "forward_sync_buffers" if TORCH >= (2, 13) else "broadcast_buffers"
WRAPPED = "convert(nn.BatchNorm1d(1, momentum=0.5))"
FIRST_ASSERTION = 'assert name != "BatchNorm" or abs(means[-1] - 5 * rank) < 0.1'
TRIES = {
    "9889f486": [
        new(APART),
        run("50c661e4", ("per_rank = 2 ", "per_rank = 12 ")),
        new("assert apart() < of_two / 1.5"),
    ],
    "6f726ac0": [
        run("6ffc3d3f", ("= 1000", "= 10"), says=r"float32\s+variance [01]\.\d"),
        run(
            "6ffc3d3f",
            ("= 1000", "= 100_000"),
            says=r"float32\s+variance (-|0\.0000|\d{3,})",
        ),
    ],
    "686fac17": [
        run(
            "002d3021",
            (LOSS, LOSS + " ** 2"),
            says=r"in_place\s+4.0 8.0\s+differentiable\s+12.0 12.0",
            fails="AssertionError",
        ),
    ],
    "705cdf8b": [
        run("52bab068", ("batch_size=24", "batch_size=25"), fails="are not close"),
    ],
    "ae14fdff": [run("da846083", ("network = (1e-3, 1e9)", "network = (1e-4, 1e9)"))],
    "0cadf75c": [
        run(
            "3d94c22f",
            (WRAPPED, f"{WRAPPED}, {OPTION}=False"),
            (FIRST_ASSERTION, "pass"),
            says=r"\bBatchNorm\s+rank 1: \[\S+, 7\.\d+, 8\.\d+\]",
        ),
    ],
}
