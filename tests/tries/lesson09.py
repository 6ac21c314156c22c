import re

from tries import new, run

KILL = "launch(attempt, killed, nproc - 1, updates * 2 // 5 + 1, nproc=nproc)"
RANGES = "range(1, 9), range(7, 15), range(13, 19)"
DAMAGE = """\
shared = torch.load(bad / "shared.pt")
shared["model"]["conv1.bias"][0] = torch.nan
manifest = json.loads((bad / "manifest.json").read_text())
manifest["shared.pt"] = resumable.write(bad / "shared.pt", shared)
(bad / "manifest.json").write_text(json.dumps(manifest))
"""
WITHOUT_A_FILE = (
    (DAMAGE, '(bad / "rank0.pt").unlink()\n'),
    ('assert f"{bad.name} cannot be used because conv1.bias" in log', ""),
)
LONGER = '"--resume", "--out", str(whole)]'
LEFT = """\
sampler = ResumableSampler(range(20), 2, 0)
ten = list(sampler)
sampler.start = 4
print(list(sampler))
assert len(ten) == 10 and list(sampler) == ten[4:]
"""
ADDITION = """\
assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
assert (0.1 + 0.2) + 0.3 == (0.2 + 0.1) + 0.3
"""
RENAMED = """\
(there / "checkpoint-200").rename(there / "checkpoint-200.bak")
print(Path(get_last_checkpoint(there)).name)
"""
TRIES = {
    "a0684ee0": [
        run(
            "19f6895d",
            (RANGES, "range(1, 9), range(6, 15), range(11, 19)"),
            ("save_every=3", "save_every=5"),
        )
    ],
    "03771536": [
        run("df46f882", (KILL, KILL.replace("updates * 2 // 5 + 1", "1"))),
        run("39ab82eb"),
        run("9cfabbcb"),
        run("bb0f9676"),
        run("bd502baa"),
        new("assert attempts[0][0] == 1"),  # from the start
    ],
    "c9e203c0": [new(LEFT)],
    "d7befbae": [new("lesson09.settings_of??")],
    "b56671f4": [new(ADDITION)],
    "053cb50c": [
        run(
            "2b277e24",
            *WITHOUT_A_FILE,
            says="step-00000027 cannot be used because rank0.pt is missing",
        ),
        run(
            "2b277e24",
            *WITHOUT_A_FILE,
            (LONGER, '"--seed", "1", ' + LONGER),
            fails="was made with seed 0, not 1",
        ),
    ],
    "28c1f73e": [
        run(
            "2d6b619f",
            ('"--max-restarts", "3"', '"--max-restarts", "0"'),
            says="torchrun ended with 1\n",
            fails="FileNotFoundError.*result.json",
        )
    ],
    "c993ae59": [
        run(
            "0bf3176b",
            ('"save", shards, nproc=2', '"save", shards, nproc=3'),
            ("in (1, 3)", "in (2,)"),
            says="__2_0.distcp(?s:.*)world size 2: " + re.escape("[[0.0, 1.0, 2.0, 3"),
        ),
        run(
            "0bf3176b",
            ('"save", shards, nproc=2', '"save", shards, nproc=3'),
            ("in (1, 3)", "in (2,)"),
            ("zeros(7, 3", "zeros(6, 3"),
            fails=re.escape("torch.Size([7, 3]) and current: torch.Size([6, 3])"),
        ),
    ],
    "c6d3d537": [
        new("epoch = noise(0, 0, True)"),
        run(
            "9aab46fc",
            ("(Noisy(), 2,", "(torch.utils.data.Subset(Noisy(), [2, 3]), 2,"),
        ),
        new("assert drawn[0] == epoch[:2] != epoch[2:]"),  # its first two
    ],
    "42d99b3c": [new(RENAMED, says="^checkpoint-100\n")],
}
