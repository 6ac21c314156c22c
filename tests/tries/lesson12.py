from tries import new, run

FIRST_BELOW = """\
for precision in ("master", "autocast"):
    kept = {s: sum(memory.states(7.5e9, 2, s, precision)) for s in memory.STAGES}
    print(precision, [stage for stage, size in kept.items() if size < 80e9][0])
"""
TO_BLAME = """\
blocks = GPT(**shape).blocks
assert max(load) == max(sizes) == blocks[0].mlp.expand.weight.numel()
"""
LESS = """\
fp32, policy = (row["sent"] for row in rows[:2])
assert abs(policy / fp32 - 0.5) < 0.01  # with fp32 for gradients, it is 2 / 3
assert rows[1]["gradients"] == rows[0]["gradients"]
"""
GENERATE_FIRST = (
    "        model.represent(torch.zeros(1, 8, dtype=torch.long))\n"
    "        return model.generate([1, 2, 3], length=5)",
    "        written = model.generate([1, 2, 3], length=5)\n"
    "        model.represent(torch.zeros(1, 8, dtype=torch.long))\n"
    "        return written",
)
LARGER = "assert of_ranks[0][0] > of_ranks[-1][0] + 3 or nproc == 1\n"
TRIES = {
    "7af8c6b7": [
        run("memory-over-ranks", ('precision="master"', 'precision="autocast"')),
        new(FIRST_BELOW, says="^master 1\nautocast 2\n"),
    ],
    "c7d57cac": [
        new("before = formula"),  # which the cell below compares with what is kept
        run("726d96a5", ('"context": 64', '"context": 256')),
        run("67367474", ("torch.zeros(8, 64,", "torch.zeros(8, 256,")),
        run("93b4d90b", ("tokens=64", "tokens=256")),
        new("assert abs(formula / before - 4) < 0.01"),
    ],
    "ab5eeab3": [
        run(
            "bf23cc90", ("(2, 8)", "(2, 8, 64)"), says="64 ranks: the largest share is"
        ),
        new(TO_BLAME),
    ],
    "d7a5e40b": [
        run(
            "16d2e1bb",
            ("%%ranks {nproc}", "%%ranks 3"),
            says=r"(?s)(\(171, 128\).*){2}\(170, 128\)",
        )
    ],
    "279de6f0": [
        run(
            "cd0b26e7",
            ('"--sharding", "ddp"', '"--sharding", "zero1"'),
            fails="--resume needs --sharding ddp, fsdp or hsdp",
        )
    ],
    "719d7d23": [
        run("a155c618", ("nproc = 2", "nproc = 4")),
        run("f60fc611"),
        run("40b488fa"),
    ],
    "32fb2aae": [
        run("peak-ways", ("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16")),
        run("d0554b26"),
        new(LESS),
    ],
    "cca075b3": [
        run(
            "fb98a2c9",
            GENERATE_FIRST,
            fails="this was to fail, but it worked",
        ),
    ],
    "32a8a7aa": [
        run(
            "dd128237",
            (" if rank == 0 else {}", ""),
            ("broadcast_from_rank0=True", "broadcast_from_rank0=False"),
        ),
        run("0355549b", (LARGER, "")),
        new("assert max(of_ranks)[0] - min(of_ranks)[0] < 0.1"),
    ],
    "c1babc68": [
        run(
            "7254f106",
            (
                "get_model_state_dict(network, options=options)",
                "network.generate([1], 2)",
            ),
            says="in (all_gather|barrier)",
        )
    ],
}
