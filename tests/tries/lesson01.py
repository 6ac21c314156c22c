from tries import new, run

TRIES = {
    "61e6a66c": [
        run("59f3b47f", ("batch_size=64", "batch_size=100")),
        new("print(len(list(train_loader)[-1][1]))", says=r"^52$"),
    ],
    "67c14159": [
        run("4af8514e", ("lr=1e-3", "lr=1e-1")),
        new("assert min(losses[-5:]) > 2\nprint(losses[-5:])"),  # log 10 is 2.30
    ],
    "4b6c36b8": [
        run(
            "3d838cd4",
            (
                "one_batch = [next(iter(train_loader))]",
                "one_batch = [next(iter(DataLoader(train_set, 8)))]",
            ),
            says="parameters      4,799,528 bytes",
        ),
        run("7f9bb215", says="0.57 GFLOP per step of 8 images"),
        run("15115690", says="of the machine's peak"),
    ],
}
