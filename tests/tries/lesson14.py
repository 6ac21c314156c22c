from tries import new, run

SLOW = "Machines(2)", 'Machines(2, "100mbit", "1ms")'
TIMER = "threading.Timer(2.0, happens, [1]).start()"
BACK = "threading.Timer(3.0, machines.plug_in, [1]).start()"
NOTICED = 'assert noticed["process"][0][0] < 1.5 < '
NOTICED += 'min(noticed["power"] + noticed["cable"])[0]'
TRIES = {
    "860133b5": [
        run(
            "d1b59f90",
            ("%%machines 2 --nproc {nproc}", "%%machines 3 --nproc 1"),
            says=r"rank 2 of 3 is local rank 0 on node 2: node2, 10\.77\.0\.3",
        ),
    ],
    "a676f66f": [
        run(
            "43186355",
            ("MASTER_ADDR", "MASTER_ADDR TORCHELASTIC_RUN_ID"),
            says="TORCHELASTIC_RUN_ID none",
        ),
    ],
    "5f8e38d5": [run("3ff3953a", SLOW), run("9e024f56", SLOW)],
    "7d2716b7": [
        run("a1f71192", ("200mbit", "1gbit")),
        run("a1f71192", ("200mbit", "20mbit"), ("in ways:", "in ways[::5]:")),
        new("assert rows[0]['seconds'] > 3 * rows[1]['seconds']"),  # of all and DiLoCo
    ],
    "8b601cb5": [
        run(
            "572fe692",
            ('("process", "power", "cable")', '("cable",)'),
            (TIMER, f"{TIMER}; {BACK}"),
            (NOTICED, "pass"),
        ),
        new("print(noticed['cable'])", says=r"^\[None, None\]$"),
    ],
}
