"""Lesson 4's program on Ray Train, on two machines of the laboratory.

python clusters/ray/two_machines.py --epochs 1
python clusters/ray/two_machines.py --epochs 1 --lose-a-worker

The flags are those of lesson04_on_ray.py, with one worker per machine.
"""

import importlib.util
import io
import secrets
import shlex
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from ddp_course import UsageError, runs
from ddp_course.ranks.machines.machines import Machines
from ddp_course.ranks.machines.namespaces import address

PROGRAM = Path(__file__).with_name("lesson04_on_ray.py")


def main(flags=()):
    if importlib.util.find_spec("ray") is None:
        fix = 'pip install -c constraints.txt -e ".[engines]"'
        raise UsageError(f"Ray is not installed: {fix}")
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        with Machines(2) as machines:
            machines.real("Ray on two machines")
            sys.stdout.flush()  # before the program prints
            sys.exit(on_ray(machines, folder, flags))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def on_ray(machines, folder, flags):
    """Start Ray on both machines, and the program on machine 0; return its exit code."""
    # All of Ray's processes, and the program, have one token; without it, everyone who
    # reaches their ports can give them work. They listen on all of a machine's cards.
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    env["RAY_raylet_start_wait_time_s"] = "120"  # on a busy laptop, 30 are too few
    # `ray`, also where the environment of this Python is not activated
    ray = f"{shlex.quote(sys.executable)} -m ray.scripts.scripts"
    start = f"{ray} start --block --num-cpus 1 --disable-usage-stats --node-ip-address"
    head = f"{start} {address(0)} --head --port 6379 --include-dashboard false"
    with redirect_stdout(io.StringIO()):  # Ray says much at the start
        head = machines.follow(0, f"{head} --temp-dir {folder}", env)
        head.wait_for("Ray runtime started", 300)
        join = f"{start} {address(1)} --address node0:6379"
        machines.follow(1, join, env).wait_for("Ray runtime started", 300)
    program = [sys.executable, str(PROGRAM), "--address", "node0:6379", *flags]
    return machines.start(0, program, env).wait()


if __name__ == "__main__":
    runs.start(main)
