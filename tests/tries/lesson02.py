from tries import new, run

AT_ONCE = """\
            if path.exists():
                return f"rank {rank} found it"
            time.sleep(0.2)  # a long download
            path.write_text("data")
            return f"rank {rank} downloaded it"
"""
IN_TURN = "        with lesson02.rank_zero_first():\n" + AT_ONCE
FINISHED = """
marks = [torch.stack(frame).sum(-1).max().item() for frame in frames]
assert [step for step, most in enumerate(marks) if most == nproc][0] == 3
"""
TRIES = {
    "bbfdcb7c": [
        run(
            "bf92f0af",
            ("who_am_i():\n", "who_am_i():\n    global kernel\n"),
            ("    return", "    kernel = 0\n    return"),
        ),
        new("assert kernel == os.getpid()"),
    ],
    "c883e54b": [
        run(
            "c602823b",
            (IN_TURN, AT_ONCE.replace("    " * 3, "    " * 2)),
            ("file.txt", "other.txt"),
            says=r"0 downloaded it', 'rank 1 downloaded it', 'rank 2 downloaded",
        ),
    ],
    "f314136e": [
        run("ba2558a6", ("nproc = 3", "nproc = 4")),
        run("89000d50", says="60"),
        run("bf92f0af"),
        run("237863cf"),
        run("58eba150"),
        run("c602823b"),
        run("eff16592"),
        new(FINISHED),
        run("b20b9680"),
    ],
    "d2e02cad": [
        run("3dc2dfee", ("(2, 3, 4)", "(2, 3, 4, 5)"), says=r"\n\| 5 \|"),
    ],
}
