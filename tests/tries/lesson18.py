from tries import new, run

FIRST_F = '("B", 1, 0), ("F", 1, 1)', '("F", 1, 1), ("B", 1, 0)'
EARLY_B = (
    '("F", 0, 2), ("B", 0, 1), ("B", 0, 2)',
    '("B", 0, 2), ("F", 0, 2), ("B", 0, 1)',
)
GPIPE = '"--schedule", "gpipe"]'
SIZES = "print(result['samples_per_update'], other['samples_per_update'])"
TRIES = {
    "172f9516": [
        new("before = schedules.slots(spans)"),
        run("96c19a31", FIRST_F),
        new("print(schedules.slots(spans) - before)", says=r"^1(\.0)?$"),
        run(
            "96c19a31",
            FIRST_F,
            EARLY_B,
            says="rank 0 cannot do B of micro-batch 2 .* before F of micro-batch 2",
        ),
    ],
    "1f4a701d": [
        run("c062e557", (GPIPE, '"--schedule", "zb-h1"]')),
        run(
            "c062e557",
            (GPIPE, '"--schedule", "gpipe", "--accumulate", "8"]'),
            fails="AssertionError",
        ),
        new(SIZES, says=r"^16 32$"),
    ],
}
