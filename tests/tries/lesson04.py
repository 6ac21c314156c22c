import re

from tries import new, run

COPIES = """
text, printed = script.read_text(), {}
no_set_epoch = "        sampler.set_epoch(epoch)  # 7", "        #"
wrap = "    model = DistributedDataParallel(model)  # 5", "    #"
undone = {
    3: [("sampler=sampler)", "shuffle=True)"), no_set_epoch],
    5: [wrap, ("model.module", "model")],
    7: [no_set_epoch],
}
for edit, changes in undone.items():
    copy = text
    for old, by in changes:
        assert copy.count(old) == (2 if by == "model" else 1), old
        copy = copy.replace(old, by)
    (folder / "wrong.py").write_text(copy)
    command = [*torchrun, "--nproc_per_node", "2", "wrong.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed[edit] = done.stdout.splitlines()
    print("without", edit, *printed[edit])
"""
WHAT_CHANGES = """
before = job.stdout.splitlines()
assert all(len(lines) == len(before) == 3 for lines in printed.values())
assert printed[7][0] == before[0]  # the first shuffle is the same
assert all(lines != before for lines in printed.values())
"""
NETWORK = "network = alpha, bandwidth = 2e-4, 2.5e7"
FAST = "assert min(lines[name][7] for name in scalings) > 7.5"
SLOW = "assert lines['48 samples in all'][7] < 1.5"  # as predicted, on 8 ranks
TRIES = {
    "3b58ef90": [new(COPIES), new(WHAT_CHANGES)],
    "98bf8781": [
        run(
            "a192cd1f",
            ("islice(range(8)", "islice(range(9)"),
            ("[*range(8)]", "[*range(9)]"),
            says=re.escape("worker: [0, 1, 4, 5, 8] [2, 3, 6, 7]"),
        )
    ],
    "d9bfb86e": [
        run("d48223fc", ("ConvNet()", "MLP(width=1024)"), says="=False +11.1 MiB")
    ],
    "632fb489": [
        run(
            "da43c79b",
            ("ConvNet(dropout=False).double()", "ConvNet(dropout=False)"),
            ("images.double()", "images"),
            fails=r"Greatest absolute difference: \d\.\d+e-0[56] ",
        ),
    ],
    "f085860a": [
        run(
            "316f0faa",
            ("range(101)", "range(2)"),
            ("launch(count, 101,", "launch(count, 2,"),
            says=r"world size 3: \(correct, seen\) is( \(\d, 2\)){3}",
        )
    ],
    "5305438c": [
        run(
            "pretended-steps", (NETWORK, NETWORK.replace("2e-4, 2.5e7", "2e-5, 2.5e9"))
        ),
        run("74895846"),
        new(FAST),
        run("pretended-steps", (NETWORK, NETWORK.replace("2e-4", "2e-3"))),
        run("74895846"),
        new(SLOW),
    ],
}
