"""Two replica groups on two machines of the laboratory. One machine loses its power and
comes back, and nobody restarts the other group.

python clusters/torchft/two_groups.py

It writes timeline.json into --out, which plots.replica_groups draws.
"""

import importlib.util
import io
import json
import shlex
import time
from contextlib import redirect_stdout
from pathlib import Path

from ddp_course import UsageError, runs
from ddp_course.ranks.machines.machines import Machines

PROGRAM = Path(__file__).with_name("diloco.py")
# The lighthouse decides before each round which groups take part: those that are there
# within a second. A group that has sent no heartbeat for two seconds is dead.
LIGHTHOUSE = "torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 "
LIGHTHOUSE += "--heartbeat_timeout_ms 2000"
MANY = 10_000  # rounds
PATIENCE = 300  # seconds, for a busy laptop


def lose_a_group(machines, out):
    """Let two groups train. Cut the power of the second, let the first go on alone, and
    start the second again. Return the times of what was done, {what: seconds}.
    """
    quiet = {"RUST_LOG": "warn"}

    def start(group):
        line = f"python {shlex.quote(str(PROGRAM))} --data digits --batch-size 32"
        line += f" --timeout 5 --out {shlex.quote(str(out))} --group {group}"
        return machines.follow(group, line, quiet)

    machines.follow(0, LIGHTHOUSE, quiet)
    first, second = start(0), start(1)
    first.wait_for("ready", PATIENCE)
    second.wait_for("ready", PATIENCE)
    runs.write_atomically(out / "rounds", str(MANY))  # both groups begin
    second.wait_for("round 5, groups: 2", PATIENCE)
    times = {"off": time.time()}
    machines.power_off(1)
    first.wait_for(r"groups: 2(.|\n)*groups: 1\b(.|\n)*groups: 1\b", PATIENCE)
    times["on"] = time.time()
    machines.power_on(1)
    second = start(1)
    together = second.wait_for(r"round (\d+), groups: 2", PATIENCE)
    last = int(together[1]) + 5  # later than both groups are now
    runs.write_atomically(out / "rounds", str(last))
    for group in (first, second):
        code, text = group.wait(PATIENCE)
        if code:
            raise UsageError(f"a group ended with {code}: {text[-2000:]}")
    return times


def story(out, times):
    """The time line of both groups, for plots.replica_groups, in seconds since the first
    round began; and the results of both groups.
    """
    rows = [
        [json.loads(line) for line in (out / f"group{number}.jsonl").open()]
        for number in range(2)
    ]
    begin = min(row["begin"] for group in rows for row in group if "begin" in row)
    since = lambda time: round(time - begin, 2)
    groups = []
    for group in rows:
        rounds = [row for row in group if "begin" in row]
        for row in rounds:
            row |= {name: since(row[name]) for name in ("begin", "computed", "end")}
        received = [since(row["received"]) for row in group if "received" in row]
        groups.append({"rounds": rounds, "received": received, "off": []})
    groups[1]["off"] = [[since(times["off"]), since(times["on"])]]
    return groups, [group[-1] for group in rows]


def main(argv=()):
    parser = runs.parser(PROGRAM, __doc__, trains=None)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("torchft") is None:
        fix = 'pip install -c constraints.txt -e ".[engines]"'
        raise UsageError(f"torchft is not installed: {fix}")
    args.out = args.out.absolute()
    runs.empty_folder(args.out)
    with Machines(2) as machines:
        machines.real("torchft")
        with redirect_stdout(io.StringIO()):
            times = lose_a_group(machines, args.out)
    groups, results = story(args.out, times)
    (args.out / "timeline.json").write_text(json.dumps(groups) + "\n")
    for number, (group, result) in enumerate(zip(groups, results)):
        print(f"group {number}: {in_words(group)}")
        print("  ", *(f"{name} {value}" for name, value in result.items()))


def in_words(group):
    rounds = [row for row in group["rounds"] if row["committed"]]
    alone = sum(row["groups"] == 1 for row in rounds)
    lost, received = len(group["rounds"]) - len(rounds), len(group["received"])
    told = f"{len(rounds)} rounds, {alone} of them alone, and {lost} lost"
    return f"{told}; received its state from the other group: {received}"


if __name__ == "__main__":
    runs.start(main)
