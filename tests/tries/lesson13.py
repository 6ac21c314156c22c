from tries import new, run

FLAGS = '"--warmup", "100"]'
OF_STEPS = """\
    losses = lesson13.train_one_epoch(engine, [mine()] * steps, cpu)
"""
HALVES = """\
    halves = list(zip(*[part.chunk(2) for part in mine()]))
    losses = lesson13.train_one_epoch(engine, halves * steps, cpu)
    losses = [(one + two) / 2 for one, two in zip(losses[::2], losses[1::2])]
"""
DIVIDED = '"--precision", precision, "--batch-size", 1, "--accumulate", 2)'
FIRST_RATES = """\
assert warm_up["linear"][1:] == [min(1.0, done / 8) * 1e-3 for done in range(11)]"""
LAST = "assert default - ours > 0.9 * 5e8 * 4 / 1e6"
OTHER = "nproc + 1 if nproc < 3 else nproc - 1"
REPORT = '.txt"}', '.txt", "module_depth": 1, "top_modules": 3}'
MISSPELT = {"stage": 2, "reduce_bucket_sise": 1_000_000}
TRIES = {
    "89ae388a": [
        run(
            "06fbd7dc",
            (FLAGS, FLAGS[:-1] + ', "--accumulate", "4"]'),
            says=r'"gradient_accumulation_steps": 4',
        ),
        run(
            "06fbd7dc",
            (FLAGS, FLAGS[:-1] + ', "--precision", "bf16"]'),
            says=r'(?s)"bf16": \{\s*"enabled": true',
        ),
    ],
    "c98c6f0f": [run("e371258d", ('"--stage", "3"', '"--stage", "0"'))],
    "421b22a0": [
        run(
            "6618669c",
            ('"--precision", precision)', DIVIDED),
            (OF_STEPS, HALVES),
        ),
        run("3274d8dd"),
        run("6618669c"),
        run("5dff24f0", ("steps = 2, 4", "steps = 2, 20")),
        run("3274d8dd"),
        run("f87f6340", fails="AssertionError"),
        run("d2e5e272"),
    ],
    "3c33efcd": [
        run("b3f275ee", ("(config, 4)", "(config, 8)"), says=r"gives \(64, 4, 2\)"),
    ],
    "6108167b": [
        run(
            "b7fbfb96",
            (
                "launch(peak, nproc=nproc)",
                "launch(peak, reduce_bucket_size=10_000_000, nproc=nproc)",
            ),
            (LAST, ""),
        ),
        new("assert 30 < default - ours < 41"),  # 10 million in fp32, and ours,
    ],
    "8d398b38": [
        new('assert launch(rates, "cosine", nproc=nproc)[0] == warm_up["log"]'),
    ],
    "7da03288": [
        run("0bbe3326", REPORT),
        run("58013ebd"),
        new('print(Path(f"{folder.name}/1.txt").read_text())', says="Top 3 modules"),
    ],
    "5904866f": [
        run("c08af26a", (OTHER, "1")),
        run("c08af26a", (OTHER, "4")),
        run(
            "c08af26a",
            (
                '"--resume", "--universal"',
                '"--resume", "--universal", "--batch-size", str(24 // other)',
            ),
            fails="was made with train_batch_size 12, not 24",
        ),
    ],
    "2efb0fa5": [
        run(
            "6971b121",
            (
                "config = configuration()",
                f"config = configuration(zero_optimization={MISSPELT})",
            ),
            fails="Extra inputs are not permitted",
        ),
        run(
            "9a8a7da0",
            ('"type": "WarmupLR"', '"type": "WarmupDecayLR"'),
            (
                '["warmup_type"] = kind',
                '["warmup_type"] = kind\n    schedule["total_num_steps"] = 12',
            ),
            (FIRST_RATES, ""),
        ),
        new('print(warm_up["linear"][-1])', says=r"^0\.0005"),
    ],
}
