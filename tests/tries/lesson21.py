from tries import new

PLAN = """\
import subprocess, sys, tempfile

with tempfile.TemporaryDirectory() as out:
    command = [sys.executable, "-m", "ddp_course.cli.command", "plan", "--out", out]
    command += "{}".split()
    done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)
"""
# 96 is 32 x 3, and 3 does not divide 512 sequences
TRIES = {
    "ee3511a4": [
        new(
            PLAN.format("--gpus 64 --context 131072 --batch 32"),
            says=r"(?m)^ 1\. 4 data x 2 tensor x 8 context, micro-batch",
        ),
        new(PLAN.format("--gpus 96"), says=r"(?m)^ 1\. 16 data x 3 pipeline x 2 con"),
        new(PLAN.format("--gpus 96 --batch 480"), says=r"(?m)^ 1\. 96 data, micro-b"),
    ],
}
