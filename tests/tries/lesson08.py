import re

from tries import new, run

LABELS = 'text_trainer().data_collator(held_out[:2])["labels"]'
ON_LOG = """\
    def on_log(self, args, state, control, **_):
"""
STOPPING = """\
    def on_log(self, args, state, control, logs, **_):
        if logs.get("loss", 1) < 0.2:
            control.should_training_stop = True
"""
BATCH = 'batch = ["--batch-size", "{}"]'
TRIES = {
    "3703bea2": [
        new(f"before = {LABELS}\nprint(before)"),
        run("2f3a1a95", ('"pad_token": "[PAD]"', '"pad_token": "[END]"')),
        run("10090474"),
        run("74706ff1"),
        new(f"after = {LABELS}\nprint(after)"),
        new("print(tokenizer.decode(before[before != after]))", says=r"^(\[END\]){2}$"),
    ],
    "9a47f09a": [
        run("08f70928", (ON_LOG, STOPPING)),
        new("assert trainer.state.global_step < trainer.state.max_steps"),
    ],
    "2f475890": [
        new('lines_of(Trainer._get_train_sampler, "Sampler(")', says="RandomSampler"),
        new(
            'lines_of(Trainer._get_dataloader, "prepare")',
            says=re.escape("accelerator.prepare("),
        ),
    ],
    "686badc6": [
        run("4611e7af", (', "--resume"', ""), fails="AssertionError"),
        new("assert resumed == whole != half and (both, second) == (2, 2)"),
    ],
    "8350e9cd": [
        new(BATCH.format(6)),
        run("c5ba4c4c"),
        new(BATCH.format(96)),
        run("c5ba4c4c"),
    ],
    "ddd9d5ac": [
        run(
            "a84ccb0b",
            (
                "dist.all_reduce(stop, dist.ReduceOp.MAX)",
                "dist.broadcast(stop, 1)",
            ),
            says=re.escape("together: stopped after steps [2, 2]"),
        )
    ],
}
