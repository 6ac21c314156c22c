from tries import new

LONG = '"--context", "1024", "--train-samples", "16", "--batch-size", "2"'
TRIES = {
    "4697b897": [
        new(f'print(run(2, {LONG})["tokens_per_rank"])', says=r"^512$"),
    ],
}
