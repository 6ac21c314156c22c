from tries import new, run

OF_5 = "checkpointed_in_5 = recomputed"
MORE = "assert recomputed > 1.2 * checkpointed_in_5"
TRIES = {
    "280a4725": [
        run(
            "73dcd458",
            ("K = 16, 4", "K = 16, 2"),
            says="and with 1 all-reduce, after the last backward",
        ),
    ],
    "5b0d3fa7": [
        new(
            "plots.item_weights([5, 5])",
            says=r"weighs 1/10 .* 1/10 .* 10 items, .* 1/10 .* 1/10",
        ),
        new(
            "plots.item_weights([8, 4, 1])",
            says=r"weighs 1/24 .* 1/12 .* 1/3 .* 13 items, .* 1/13",
        ),
    ],
    "ef0436fd": [
        new("with_no_sync = seen[-1]"),
        run("b2915a51", ("model.no_sync()", "nullcontext()")),
        new("assert abs(seen[-1] - with_no_sync) < 2e-4"),  # both are rounded
    ],
    "c541ad82": [new("!wc -l {folder.name}/metrics.jsonl", says=r"^\s*10 ")],
    "a1f1f11c": [
        run("14d2343a", ("2.0**20", "2.0**22")),
        new("assert [row['step'] for row in rows] == ['skipped'] * 5 + ['taken']"),
    ],
    "4ef8fed4": [
        run("f6009638", ('"--no-dropout", ', ""), fails="AssertionError"),
        new("assert 0.01 < max(found) - min(found) < 0.3"),
    ],
    "9abaca99": [run("bcc699b8", ("(1e-4, 1.25e8)", "(1e-5, 1.25e9)"))],
    "6d6e40d9": [
        new(OF_5),
        run("7daeae1b", ("segments = 5", "segments = 2"), fails="AssertionError"),
        new(MORE),
        run("7daeae1b", ("segments = 5", "segments = 12"), fails="AssertionError"),
        new(MORE),
    ],
    "d554797b": [
        run(
            "fdb2784e",
            ("in (1, 4)", "in (1, 2, 4, 8)"),
            says=r"Sync.* 8 \| .* 14 \| .* 26 \| .* 50 \|\n.*Group(.*\b0.0% \| 2){4}",
        ),
    ],
}
