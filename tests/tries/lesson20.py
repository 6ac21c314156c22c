from tries import new, run

TRIES = {
    "dc643ecc": [
        run("65993d48", ("loads, 0.005)", "loads, 0.1)")),
        run("7bd4d244", fails="AssertionError"),
        new('assert lines["bias"][-1] > 3'),
    ],
    "91e88ea1": [
        run("bc491b14", ("(32, 128)", "(8, 128)")),
        run("60881a70", fails="AssertionError"),
        new("assert across < inside"),
    ],
}
