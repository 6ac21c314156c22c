from tries import new, run

KILLED = 'with Job("clinic/killed.py") as job:'
ONE_CAUSE = """\
assert re.search(r"(?s)Root Cause.*rank      : 1 .*exitcode  : -9", text)"""
FIVE_TIMES = """\
named = []
for _ in range(5):
    with Job("clinic/killed.py", flags="--monitor-interval 3") as job:
        code, text = job.wait(60)
    # rarely, torchrun prints no table
    named += re.findall(r"(?s)Root Cause.*?rank      : (\\d) ", text)
assert set(named) <= {"0", "1"} and named
print(named)
"""
WITH_DETAIL = """\
with fails("Detected mismatch"):
    launch(treat, "{}", env={{"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}})
"""
FASTER = """\
with tempfile.TemporaryDirectory() as copies:
    path = Path(copies, "straggler.py")
    before = Path("clinic/straggler.py").read_text()
    after = before.replace("0.06", "0.025")
    assert after != before
    path.write_text(after)
    patient = os.path.relpath(path, Path("clinic").resolve())[: -len(".py")]
    assert "needs" not in heard(patient, watch=watch_speed)
"""
GUARD = """\
def guard(model, optimizer):
    def hook_for(name):
        def look(layer, inputs, output):
            if not output.isfinite().all():
                raise FloatingPointError(f"layer {name} on rank {dist.get_rank()}")
        return look
    for name, layer in model.module.named_modules():
        layer.register_forward_hook(hook_for(name))


launch(treat, "nan_on_one_rank", guard)
"""
TRIES = {
    "ca391ef3": [
        run(
            "75f868f5",
            (KILLED, KILLED.replace("killed", "out_of_memory")),
            (ONE_CAUSE, "pass"),
            says="can't allocate memory",
        ),
        run(
            "75f868f5",
            (KILLED, KILLED.replace("killed", "full_disk")),
            (ONE_CAUSE, "pass"),
            says="unexpected pos",
        ),
        new(FIVE_TIMES),
    ],
    "71e4e6c3": [
        new(
            'said = heard("half_a_broadcast")',
            says=r"rank 1: \[(1\.0, ){5}(2\.0(, )?){5}\]",
        ),
        new(WITH_DETAIL.format("half_a_broadcast")),
        new('heard("other_shapes")', fails="SIGABRT(?s:.*)gloo::EnforceNotMet"),
        new(WITH_DETAIL.format("other_shapes")),
    ],
    "e1a8c125": [
        run(
            "cb075464",
            ("None, records.name)", "None, records.name, nproc=3)"),
            says="Culprit rank (0;.* Culprit rank 1|1;.* Culprit rank 0);",
        ),
    ],
    "ac11377a": [new(FASTER)],
    "e0ccc560": [new(GUARD, fails="FloatingPointError: layer 2 on rank 1")],
}
