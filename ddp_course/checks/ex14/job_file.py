"""Question 1: a job file that SLURM can run."""

import io
import re
from contextlib import redirect_stderr

from ddp_course.checks.claims import Between, Claim, OneOf, hold
from ddp_course.checks.ex14.pretended_slurm import directives, run_jobs, signal_of
from ddp_course.judge.question import question

PORTS = range(20_000, 30_000)
LISTS = {
    2: ("gpu[07-08]", ["gpu07", "gpu08"]),
    3: ("gpu[07-08,11]", ["gpu07", "gpu08", "gpu11"]),
    4: ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
}


@question(
    "Take the wishes one by one, and ask of each line of the file: who reads it, and when? sbatch reads the #SBATCH lines, "
    "and stops at the first command. bash replaces each $NAME in the script, on the first machine, before srun starts "
    "anything. srun starts the rest of its line once per task.",
    "One task per machine is enough, because torchrun starts the ranks. --gpus counts the GPUs of the whole job. A time "
    "with one colon is minutes and seconds. Without B:, a signal goes to what srun has started and not to the script. "
    "bash runs a trap only when the command in the foreground has ended. The file's exit code is that of its last command.",
    "#SBATCH --ntasks-per-node=1, --gpus-per-node, --cpus-per-task, --time in minutes, --signal=B:USR1@120, --requeue, "
    "--open-mode=append, all before the first command. Then port=$((20000 + SLURM_JOB_ID % 10000)), and: srun "
    "--cpus-per-task=... --kill-on-bad-exit=1 torchrun --nnodes ... --nproc-per-node ... --rdzv-backend c10d --rdzv-id "
    "$SLURM_JOB_ID --rdzv-endpoint $head:$port train.py & and, as the last line, wait $!.",
)
def check_job_file(answer, draw):
    """The directives mean what was asked for, and the file, run as SLURM would run it,
    starts the right torchruns; it ends well, it fails, and its time ends.
    """
    cases = cases_of(draw)
    of_ranks = answer.on_ranks(run_jobs, cases, nproc=2, timeout=30)
    seen = [of_ranks[place % 2][place // 2] for place in range(len(cases))]
    for case, what in zip(cases, seen):
        hold(form(case, what))
    for case, what in zip(cases, seen):
        hold(asked_for(case, what))
    for case, what in zip(cases, seen):
        hold(started(case, what))
        hold(rendezvous(case, what))
        hold(steps(case, what))
    hold(ports(cases, seen))
    for case, what in zip(cases, seen):
        hold(ended(case, what))


NO_OCTAL = [tens + ones for tens in range(0, 90, 10) for ones in (8, 9)]


def cases_of(draw):
    """The same job three times, with three ends; then others, whose numbers are close, and
    one with a short number. The first number is no port: it is 10,000 too many for a
    remainder of 10,001, and its last digits are no octal number.
    """
    number, cases = 10_001 * draw.choice(NO_OCTAL) + 10_000, []
    short = draw.randrange(100, 400) - number
    plans = [(0, ("ends", "time", "fails")), (1, ("killed",)), (100, ("time",)), (999, ("ends",)), (short, ("ends",))]
    used = set()
    for more, ends in plans:
        while True:
            machines, gpus = draw.choice([(2, 4), (3, 2), (3, 4), (4, 2), (2, 2)])
            if (machines, gpus) not in used:
                break
        used.add((machines, gpus))
        minutes = 60 * draw.randrange(1, 6) + draw.randrange(5, 55) + 24 * 60 * (more == 1)  # more than a day
        asked = [machines, gpus, gpus * draw.choice([5, 7, 9]), minutes]
        nodelist, hosts = LISTS[machines]
        for how in ends:
            cases.append({"asked": asked, "number": number + more, "nodelist": nodelist, "hosts": hosts, "how": how})
    return cases


def called(case):
    machines, gpus, cores, minutes = case["asked"]
    return f"job_file(machines={machines}, gpus={gpus}, cores={cores}, minutes={minutes})"


# ---- the file ----


def form(case, what):
    yield Claim(
        called(case), what["kind"], "str", "return the file as a text",
        [("NoneType", "the function ends without a return statement"),
         ("list", 'these are the lines: join them, "\\n".join(lines)')], told="a text",
    )  # fmt: skip
    first = (what["text"] or "").split("\n")[0]
    yield Claim(
        called(case), first.startswith("#!"), True, "sbatch takes a script: its first line names a shell, #!/bin/bash",
        told="#! at the very beginning", shown=first[:60] or "an empty line",
    )  # fmt: skip


def asked_for(case, what):
    """What the #SBATCH lines ask for."""
    machines, gpus, cores, minutes = case["asked"]
    options, text = directives(what["text"]), what["text"]

    def directive(name, got, expected, otherwise, mistakes=(), told=None):
        shown = f"--{name}={options[name]}" if name in options else f"no --{name}"
        missing = lambda: where_it_is(text, name) or otherwise  # noqa: E731
        return Claim(
            called(case), got, expected, otherwise if name in options else missing, mistakes, told=told, shown=shown,
        )  # fmt: skip

    yield directive(
        "nodes", number(options.get("nodes")), machines, "ask for the machines: --nodes",
        [(gpus, "these are the GPUs of a machine"), (machines * gpus, "these are the ranks, not the machines")],
        told=f"--nodes={machines}",
    )  # fmt: skip
    per_machine, name = gpus_per_machine(options), "gpus-per-node"
    if per_machine is None and "gpus" in options:
        name = "gpus"
        whole = "--gpus counts the GPUs of the whole job, and SLURM may divide them over the machines as it likes: "
        yield directive(name, options[name], None, f"{whole}--gpus-per-node", told=f"{gpus} GPUs on each machine")
    yield directive(
        name, per_machine, gpus, "ask for the GPUs of each machine: --gpus-per-node",
        [(machines * gpus, "these are the GPUs of all machines: --gpus-per-node counts those of one")],
        told=f"--gpus-per-node={gpus}",
    )  # fmt: skip
    yield directive(
        "cpus-per-task", number(options.get("cpus-per-task")), cores,
        "ask for the cores of the task on each machine: --cpus-per-task. Without it, many clusters give one core",
        [(cores // gpus, "these are the cores for one rank: the task is torchrun with all ranks of its machine")],
        told=f"--cpus-per-task={cores}",
    )  # fmt: skip
    yield directive(
        "time", seconds_of(options.get("time")), 60 * minutes, "ask for the time: --time, a number of minutes is enough",
        [(minutes, "this is read as minutes and seconds: a time with one colon has no hours"),
         (3600 * minutes, "these are hours: SLURM reads a number without a colon as minutes")],
        told=f"{minutes} minutes",
    )  # fmt: skip
    only_script, name, seconds = signal_of(options.get("signal"))
    told = "--signal=B:USR1@120, with B:"
    yield directive(
        "signal", only_script, True,
        "without B:, SLURM tells the processes that srun has started, but not the script, which has the trap", told=told,
    )  # fmt: skip
    yield directive("signal", name is None, False, "there is no such signal", told="the name of a signal")
    yield directive("signal", seconds, 120, "SLURM counts the seconds before the end: two minutes are 120", told=told)
    again = "a job that has lost a machine does not start again on a cluster whose JobRequeue is 0: --requeue"
    yield directive("requeue", "requeue" in options and "no-requeue" not in options, True, again, told="--requeue")
    yield directive(
        "open-mode", options.get("open-mode"), OneOf(["append", "a"]),
        "the second attempt would begin the log anew, and that of the first one is lost: --open-mode=append",
        told="--open-mode=append",
    )  # fmt: skip


def where_it_is(text, name):
    """Why sbatch does not see an option that is in the file; None if it is not there."""
    names = {"nodes": "-N", "cpus-per-task": "-c", "time": "-t"}
    sought = rf"(--{name}\b|{names.get(name, '--' + name)}\b)"
    for line in text.split("\n"):
        if re.match(rf"#SBATCH\b.*{sought}", line):
            return "sbatch reads no #SBATCH line after the first command of the script: move it up"
        if re.match(rf"[ \t#]+SBATCH\b.*{sought}|[ \t]+#.*{sought}", line):
            return "sbatch reads a line only if it begins with #SBATCH: no space, and one #"
    return None


def number(text):
    """The whole number of an option, also of 2-2; else the text itself."""
    found = re.fullmatch(r"(\d+)(?:-\1)?", text or "")
    return int(found[1]) if found else text


def gpus_per_machine(options):
    """From any of the options for it; None if none is there."""
    texts = [options.get(name) for name in ("gpus-per-node", "gres", "gpus-per-task", "tres-per-node")]
    found = {number(re.split("[:=]", text)[-1]) for text in texts if text and re.search(r"^\d|[:=]", text)}
    return found.pop() if len(found) == 1 else str(sorted(map(str, found))) if found else None


def seconds_of(text):
    """A time of SLURM: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so
    on, in seconds; None for any other text.
    """
    days, dash, rest = (text or "").rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        numbers = [int(days), *numbers, 0, 0][:4]
    else:
        numbers = {1: [0, 0, *numbers, 0], 2: [0, 0, *numbers], 3: [0, *numbers]}[len(numbers)]
    return sum(value * unit for value, unit in zip(numbers, (86400, 3600, 60, 1)))


# ---- what is started ----


def started(case, what):
    """One torchrun on each machine, started by srun, with the right numbers."""
    machines, gpus, *_ = case["asked"]
    where, hosts = f"{called(case)}, run by SLURM on {', '.join(case['hosts'])}", case["hosts"]
    tasks = sorted(what["started"], key=lambda task: hosts.index(task["host"]))
    too_early = what["left"] > 0 or goes_on_alone(what["text"])
    yield Claim(
        where, too_early, False, "the script ends while srun is at work, and SLURM then ends the whole job: wait for srun",
        told="the script ends after srun", shown="the script ends before srun",
    )  # fmt: skip
    said = what["printed"].strip().split("\n")[-1][:150]
    yield Claim(
        where, bool(tasks), True, "srun has to start torchrun with train.py" + f". The file printed: {said}" * bool(said),
        told="torchrun on each machine", shown="none has started",
    )  # fmt: skip
    yield Claim(
        where, [task["host"] for task in tasks if task["words"] is None], [],
        "train.py was started without torchrun: one rank per task, which nobody has told its rank",
        told="torchrun, which starts the ranks",
    )  # fmt: skip
    yield Claim(
        where, [task["host"] for task in tasks if task["step"] is None], [],
        "the script itself runs on the first machine only: srun starts torchrun on all", told="torchrun behind srun",
    )  # fmt: skip
    places = [task["host"] for task in tasks]
    yield Claim(where, places, hosts, lambda: cause_of_places(places, case, what), told="one torchrun on each machine")
    for task in tasks:
        args, error = parsed(task["words"])
        at = f"{where}: torchrun on {task['host']}"
        yield Claim(
            at, error, None, cause_of_error(task["words"]), told="options that torchrun knows",
        )  # fmt: skip
        yield Claim(
            at, args.standalone, False, "--standalone is for one machine: each would train by itself",
            told="no --standalone",
        )  # fmt: skip
        nnodes = args.nnodes.split(":")
        yield Claim(
            at, [number(nnodes[0]), number(nnodes[-1])], [machines, machines], "--nnodes is the number of machines",
            [([1, 1], "torchrun's default is one machine: each would train by itself. --nnodes"),
             ([1, machines], "with a range from 1, torchrun goes on without machines that are late: here all are needed"),
             ([machines * gpus] * 2, "these are the ranks: --nnodes counts the machines")],
            told=f"--nnodes {machines}", shown=f"--nnodes {args.nnodes}",
        )  # fmt: skip
        yield Claim(
            at, number(args.nproc_per_node), OneOf([gpus, "gpu", "auto"]),
            "--nproc-per-node is the number of ranks on each machine",
            [(1, "one rank per machine: the other GPUs have nothing to do. --nproc-per-node"),
             (machines * gpus, "these are the ranks of all machines: --nproc-per-node counts those of one")],
            told=f"--nproc-per-node {gpus}", shown=f"--nproc-per-node {args.nproc_per_node}",
        )  # fmt: skip


def goes_on_alone(text):
    """Whether a script starts something in the background, and waits for nothing."""
    return bool(re.search(r"(?m)&[ \t]*(#.*)?$", text)) and not re.search(r"\bwait\b|tail --pid", text)


def cause_of_places(places, case, what):
    """Why there is not one torchrun on each machine."""
    gpus, counts = case["asked"][1], {places.count(host) for host in case["hosts"]}
    if counts == {1}:
        return "one torchrun on each machine"
    own = any("ntasks-per-node" in (task["step"] or {}) for task in what["started"])
    if counts == {gpus}:
        cause = f"there are {gpus} tasks on each machine, and each is a torchrun that starts {gpus} ranks: "
        cause += "--ntasks-per-node=1"
        more = (
            ". srun's own --ntasks-per-node does not help: it follows SLURM_NTASKS, which comes from the #SBATCH line"
        )
        return cause + more * own
    if 0 in counts:
        return "some machines have no task: srun starts one on each of them with --ntasks-per-node=1 in an #SBATCH line"
    return "srun starts several tasks on a machine: one is enough, torchrun starts the ranks"


def parsed(words):
    """torchrun's options, read by its own parser, and None; or None and its complaint."""
    from torch.distributed.run import get_args_parser

    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return get_args_parser().parse_args(words), None
    except SystemExit:
        return None, complaint.getvalue().strip().split("error: ")[-1][:200]


def cause_of_error(words):
    if any("$" in word for word in words):
        return "nobody replaces this $NAME: srun starts torchrun without a shell. Let bash replace it, or start a shell"
    return "torchrun does not understand its options"


# ---- where they meet ----


def rendezvous(case, what):
    """All torchruns have the same meeting place, on a machine of the job."""
    hosts, checked = case["hosts"], f"{called(case)}, run by SLURM on {', '.join(case['hosts'])}"
    of_host = {task["host"]: parsed(task["words"])[0] for task in what["started"]}
    of_host = {host: of_host[host] for host in hosts}
    backends = {args.rdzv_backend for args in of_host.values()}
    yield Claim(
        checked, sorted(backends), OneOf([["c10d"], ["static"]]), "take --rdzv-backend c10d, or the static rendezvous",
    )  # fmt: skip
    places = {host: place_of(args) for host, args in of_host.items()}
    for host, (name, _) in places.items():
        yield Claim(
            f"{checked}: the rendezvous of torchrun on {host}", machine_of(name, hosts), OneOf(hosts),
            "no machine of the job has this name",
            [(None, cause_of_name(name, case))], told=f"a machine of the job, such as {hosts[0]}", shown=name or "nothing",
        )  # fmt: skip
    names = [machine_of(name, hosts) for name, _ in places.values()]
    differ = "each machine has another rendezvous, and waits there alone: the script finds the first one, once, before srun"
    yield Claim(checked, names, [names[0]] * len(hosts), differ, told="one machine, the same for all")
    numbers = [port for _, port in places.values()]
    yield Claim(
        checked, numbers, numbers[:1] * len(hosts), "the ports differ: compute the port in the script, before srun"
    )
    if backends == {"c10d"}:
        ids = [args.rdzv_id for args in of_host.values()]
        yield Claim(checked, ids, ids[:1] * len(ids), "each machine has another --rdzv-id: they never meet")
        return
    ranks = [args.node_rank for args in of_host.values()]
    early = (
        "bash replaces $SLURM_NODEID in the script, on the first machine, before srun starts the tasks: it is 0 for all. "
        "With --rdzv-backend c10d no machine needs its number"
    )
    yield Claim(
        f"{checked}: --node-rank", sorted(ranks), list(range(len(hosts))), "each machine needs a number of its own",
        [([0] * len(hosts), early)], shown=ranks,
    )  # fmt: skip
    yield Claim(
        f"{checked}: --node-rank of {names[0]}, which is --master-addr", ranks[hosts.index(names[0])], 0,
        "the machine of the address has to be that of node rank 0",
    )  # fmt: skip


def place_of(args):
    """(host, port) of the rendezvous that torchrun is told."""
    text = args.rdzv_endpoint
    if not text and args.rdzv_backend == "static":
        text = f"{args.master_addr}:{args.master_port}"
    name, colon, port = (text or "").rpartition(":")
    return (name, number(port)) if colon else (text, 29400)


def machine_of(name, hosts):
    """The machine that a name or an address leads to; None if it is none of the job's."""
    addresses = {f"10.20.0.{11 + place}": host for place, host in enumerate(hosts)}
    return name if name in hosts else addresses.get(name)


def cause_of_name(name, case):
    if not name:
        return "torchrun is not told where to meet: --rdzv-endpoint host:port"
    if name in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
        return "this means 'this machine' on every machine: each would wait for itself. The first one's name is $(hostname)"
    if "[" in name or "," in name:
        return "this is SLURM's short form of all names, and no machine's: scontrol show hostnames writes them out"
    if "$" in name:
        return "nobody replaces this $NAME: srun starts torchrun without a shell"
    return "no machine of the job has this name"


def ports(cases, seen):
    owners = {}
    for case, what in zip(cases, seen):
        job = case["number"]
        port = place_of(parsed(what["started"][0]["words"])[0])[1]
        yield Claim(
            f"{called(case)}: the port for job {job}", port, PORTS,
            "take a port from the job's number: 20000 + SLURM_JOB_ID % 10000",
            [(Between(65536), "ports end at 65535, and a job's number may be larger")],
            told="a port from 20000 to 29999",
        )  # fmt: skip
        owners.setdefault(job, port)
        yield Claim(
            f"the port for job {job}, in two attempts", port, owners[job],
            "is it drawn at random? Two jobs may draw the same: derive it from the job's number",
        )  # fmt: skip
    jobs, all_ports = list(owners), set(owners.values())
    cause = "two jobs may share a machine: those whose numbers differ by less than 1,000 need different ports"
    if all_ports == {29400}:
        cause = "this is torchrun's default port for all jobs, and two may share a machine: derive one from the job's number"
    elif len(all_ports) == 1:
        cause = "all jobs have the same port, and two may share a machine: derive it from the job's number"
    for place, job in enumerate(jobs):
        same = [other for other in jobs[:place] if owners[other] == owners[job] and abs(other - job) < 1000]
        yield Claim(
            f"the ports for the jobs {' and '.join(map(str, [*same, job]))}", same, [], cause, told="different ports",
            shown=f"{owners[job]} for all of them",
        )  # fmt: skip


# ---- the step, and the end ----


def steps(case, what):
    """What srun was told for the tasks."""
    _, gpus, cores, _ = case["asked"]
    checked = f"{called(case)}: srun"
    for task in what["started"]:
        step = task["step"]
        yield Claim(
            checked, number(step.get("cpus-per-task") or task["cores"]), cores,
            "since SLURM 22.05, srun does not take --cpus-per-task over from the #SBATCH line: without it, ranks share "
            "one core",
            [(cores // gpus, "these are the cores for one rank: the task is torchrun with all ranks of its machine")],
            told=f"srun --cpus-per-task={cores}",
        )  # fmt: skip
        own = gpus_per_machine(step)
        yield Claim(
            checked, own, OneOf([None, gpus]),
            "the task gets these GPUs only, and all ranks of its machine share them: leave the option out",
            told=f"all {gpus} GPUs of the machine",
        )  # fmt: skip
        kill = step.get("kill-on-bad-exit", task["SLURM_KILL_BAD_EXIT"] or "0")
        yield Claim(
            checked, kill == "0", False,
            "when one torchrun fails, the others would wait for it until their time limit: --kill-on-bad-exit=1",
            told="--kill-on-bad-exit", shown="no --kill-on-bad-exit",
        )  # fmt: skip


def ended(case, what):
    """How the attempt ends."""
    checked, code = called(case), what["code"]
    alone = re.search(r"(?m)^\s*wait\s*$", what["text"])
    if case["how"] == "time":
        told = f"{checked}, when SLURM sends the signal"
        cause = "bash runs a trap only when the command in the foreground has ended, and srun runs on: srun ... &, then wait"
        if what["sbatched"]:
            cause = (
                "sbatch makes another job, at the end of the queue: scontrol requeue $SLURM_JOB_ID puts back this one"
            )
        elif code is not None:
            cause = (
                "the signal has ended the script, or it ended without scontrol requeue $SLURM_JOB_ID: trap '...' USR1"
            )
        yield Claim(told, what["requeued"], True, cause, told="back into the queue at once", shown="it is not put back")
        return
    yield Claim(
        checked, what["requeued"], False,
        "put the job back only at the signal: a job that is done, or fails, would begin again and again",
        told="not put back", shown="put back into the queue",
    )  # fmt: skip
    if case["how"] in ("fails", "killed"):
        cause = (
            "the exit code of a file is that of its last command: SLURM would call the job COMPLETED. End with srun's"
        )
        if alone:
            cause = "wait without a number gives 0, whatever srun has given: wait $! gives its exit code"
        how = "fails" if case["how"] == "fails" else "is killed"
        yield Claim(
            f"{checked}, where one torchrun {how}", code == 0, False, cause, told="an exit code that is not 0",
            shown="exit code 0",
        )  # fmt: skip
    else:
        yield Claim(
            f"{checked}, where all torchruns succeed", code, 0, "the job is done, but SLURM would call it FAILED",
            told="exit code 0",
            shown="it did not end" if code is None else f"exit code {code}: {what['printed'].strip()[-150:]}",
        )  # fmt: skip
