"""Question 1: from what SLURM tells a task to what torchrun would tell a rank."""

import builtins
import os
import socket
from contextlib import suppress
from itertools import groupby

import torch
import torch.distributed as dist

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

SAME = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
NAMES = [*SAME, "MASTER_ADDR", "MASTER_PORT"]
PORTS = range(20_000, 30_000)


# ---- jobs ----


def a_job(number, nodelist, hosts, tasks, cyclic=False, asked=False):
    """What SLURM sets for each task of a job: a list of dicts, by SLURM_PROCID.

    nodelist: the names of the hosts in SLURM's short form. tasks: how many on each host.
    cyclic: as after srun --distribution=cyclic, which deals the tasks over the hosts.
    asked: as after --ntasks-per-node, the most that a host may have.
    """
    runs = [(size, len(list(group))) for size, group in groupby(tasks)]
    shared = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": nodelist,
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_TASKS_PER_NODE": ",".join(f"{size}(x{times})" if times > 1 else f"{size}" for size, times in runs),
    }
    if asked:
        shared["SLURM_NTASKS_PER_NODE"] = str(max(tasks))
    places = [(node, local) for node, size in enumerate(tasks) for local in range(size)]
    if cyclic:
        places.sort(key=lambda place: place[::-1])
    return [
        {
            **shared,
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "SLURMD_NODENAME": hosts[node],
        }
        for rank, (node, local) in enumerate(places)
    ]


def jobs_of(draw):
    """Jobs as (hosts, tasks on each host, what SLURM sets for each task)."""
    number = draw.randrange(20_000, 4_000_000)
    planned = [
        ("gpu[03-05,11],login7", ["gpu03", "gpu04", "gpu05", "gpu11", "login7"]),
        ("node7", ["node7"]),
        ("login1,gpu[08-10]", ["login1", "gpu08", "gpu09", "gpu10"]),
        ("r[1-2]n[098-099]", ["r1n098", "r1n099", "r2n098", "r2n099"]),
        ("c[9-11]-ib", ["c9-ib", "c10-ib", "c11-ib"]),
    ]
    uneven = [[2, 2, 2, 2, 1], [4], [1, 3, 2, 2], [2, 1, 3, 2], [3, 2, 3]]
    jobs = [
        (hosts, tasks, {"nodelist": nodelist, "asked": place == 0, "cyclic": place > 3})
        for place, ((nodelist, hosts), tasks) in enumerate(zip(planned, uneven))
    ]
    for _ in range(4):
        name, first = draw.choice(["a", "dgx-", "node"]), draw.randrange(1, 90)
        count, wide = draw.randrange(3, 12), draw.choice([3, 4])
        hosts = [f"{name}{first + node:0{wide}}" for node in range(count)]
        nodelist = f"{name}[{first:0{wide}}-{first + count - 1:0{wide}}]"
        tasks = [draw.randrange(1, 5)] * (count - 1) + [draw.randrange(5, 9)]
        jobs.append((hosts, tasks, {"nodelist": nodelist}))
    numbers = [number, *draw.sample(range(number + 1, number + 10_000), 7)]
    numbers.append(draw.randrange(1, 100))  # on a new cluster
    return [
        (hosts, tasks, a_job(number, hosts=hosts, tasks=tasks, **options))
        for number, (hosts, tasks, options) in zip(numbers, jobs)
    ]


def neighbours(draw):
    """Small jobs: the beginning, the middle and the end of 10,000 in a row."""
    first = draw.randrange(20_000, 4_000_000)
    numbers = [first + start + k for start in (0, 4900, 9800) for k in range(200)]
    return [(["node7"], [1], a_job(n, "node7", ["node7"], [1])) for n in numbers]


def meeting_jobs(draw):
    """Some jobs of four tasks that can really meet, each at a port of its own."""
    hosts, sizes = ["localhost", "node4", "node5"], [2, 1, 1]
    numbers = draw.sample(range(10_000, 20_000), 20)
    return [(hosts, sizes, a_job(number, "localhost,node[4-5]", hosts, sizes)) for number in numbers]


def expected_of(hosts, tasks, slurm):
    """What torchrun would set for this task, but for the port."""
    node = int(slurm["SLURM_NODEID"])
    numbers = {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": sum(tasks),
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": node,
    }
    texts = {name: str(value) for name, value in numbers.items()}
    return texts | {"MASTER_ADDR": hosts[0]}


# ---- observers ----


def answers_for(rank_variables, tasks):
    """What the answer returns for each of these dicts."""
    seen = []
    for slurm in tasks:
        with trying(in_words(slurm)):
            seen.append(rank_variables(dict(slurm)))
    return seen


def in_words(slurm):
    return ", ".join(f"{name}={value}" for name, value in slurm.items() if "SLURM_" in name)


def answer_in_this_task(rank_variables, tasks):
    """What the answer returns in a process of its own, where hash() of a text differs as
    it does between the tasks of a job. The fork server gives all ranks the same.
    """
    original, rank = builtins.hash, int(os.environ["RANK"])
    builtins.hash = lambda value: original((rank, original(value)))
    try:
        return rank_variables(dict(tasks[rank]))
    finally:
        builtins.hash = original


def join(rank_variables, tasks):
    """Join the group with nothing but the answer's variables; return this process's
    place in it, and a sum over all.
    """
    own = rank_variables(dict(tasks[int(os.environ["RANK"])]))
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC") or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ |= own
    with process_group(timeout=8) as (rank, n):
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        return [rank, n, total.item()]


# ---- the question ----


@question(
    "SLURM says most of it directly: SLURM_PROCID is the task's number in the job, SLURM_LOCALID that on its machine, and "
    "SLURM_NODEID that of the machine. Only the sizes, the first host's name and the port need some work. All values of an "
    "environment are texts.",
    "Write out SLURM_TASKS_PER_NODE as a list first: 2(x3),1 is [2, 2, 2, 1]. Its sum is WORLD_SIZE, and the entry of this "
    "machine is LOCAL_WORLD_SIZE. For MASTER_ADDR you need the first host only: in each pair of brackets, its number ends "
    "at the first - , or ], and it keeps its zeros. What is before and behind the brackets is part of the name.",
    "for part in text.split(','): size, _, times = part.rstrip(')').partition('(x'); sizes += [int(size)] * int(times or "
    "1). First host: replace each pair of brackets by its first number, re.sub(r'\\[(\\d+)[^\\]]*\\]', r'\\1', nodelist), "
    "and then take .split(',')[0]. Port: 20000 + int(job) % 10000. Make every value a str.",
)
def check_rank_variables(answer, draw):
    """For all tasks of several jobs, the variables that torchrun would set; then four
    real processes meet with nothing but these.
    """
    meeting = meeting_jobs(draw)
    jobs = [*jobs_of(draw), *neighbours(draw), *meeting]
    tasks = [slurm for _, _, of_tasks in jobs for slurm in of_tasks]
    [seen] = answer.on_ranks(answers_for, tasks, timeout=10)
    expected = [expected_of(hosts, sizes, slurm) for hosts, sizes, of_tasks in jobs for slurm in of_tasks]
    for slurm, got in zip(tasks, seen):
        judge_form(slurm, got)
    for name in [*SAME, "MASTER_ADDR"]:
        judge_variable(name, tasks, expected, seen)
    judge_neighbours(judge_ports(tasks, seen))
    of_tasks, answers = at_a_free_port(meeting, tasks, seen)
    judge_meeting(answer, of_tasks, answers)


def judge_form(slurm, got):
    """Raise Wrong unless it is a dict with all variables, and all of them are texts."""
    told = {"rank": slurm["SLURM_PROCID"]}
    if not isinstance(got, dict):
        cause = "return a dict, {'RANK': '3', ...}"
        if got is None:
            cause = "the function ends without a return statement: return a dict"
        raise Wrong(in_words(slurm), **told, expected="a dict", got=got, cause=cause)
    if missing := [name for name in NAMES if name not in got]:
        cause = f"{missing[0]} is missing: init_process_group or the program needs it"
        told |= {"expected": ", ".join(NAMES), "got": ", ".join(map(str, got))}
        raise Wrong(in_words(slurm), **told, cause=cause)
    for name, value in got.items():
        if not isinstance(value, str):
            cause = "the environment holds texts only: os.environ would raise a TypeError"
            told |= {"expected": f"{name} as a text", "got": f"{value!r}"}
            raise Wrong(in_words(slurm), **told, cause=cause)


def judge_variable(name, tasks, expected, seen):
    """Raise Wrong at the first task with another value."""
    for slurm, right, got in zip(tasks, expected, seen):
        if got[name] != right[name]:
            cause = (
                cause_of_host(slurm, right[name], got[name])
                if name == "MASTER_ADDR"
                else cause_of_number(name, tasks, [each[name] for each in seen])
            )
            raise Wrong(
                f"{name} for {in_words(slurm)}",
                rank=slurm["SLURM_PROCID"],
                expected=right[name],
                got=got[name] or "an empty text",
                cause=cause,
            )


def sizes_of(slurm):
    """SLURM_TASKS_PER_NODE as a list."""
    sizes = []
    for part in slurm["SLURM_TASKS_PER_NODE"].split(","):
        size, _, times = part.rstrip(")").partition("(x")
        sizes += [int(size)] * int(times or 1)
    return sizes


FIRST = "all machines are taken to be like the first: SLURM_TASKS_PER_NODE has a number for each of them"
WITHOUT_TIMES = "2(x3) in SLURM_TASKS_PER_NODE means three machines with 2 tasks each: here it is counted once"
# {variable: [(formula, cause)]}; p: the task in the job, q: on its machine, k: the machine
LOOKS = {
    "RANK": [
        (lambda p, q, k, sizes: q, "this is the number on the task's machine: two tasks of a job would be the same rank"),
        (lambda p, q, k, sizes: k, "this is the number of the machine: its tasks would all be the same rank"),
        (lambda p, q, k, sizes: k * sizes[0] + q, FIRST + ". SLURM has counted already: SLURM_PROCID"),
        (lambda p, q, k, sizes: k * sizes[k] + q, "the machines before this one may have other numbers of tasks. SLURM has "
         "counted already: SLURM_PROCID"),
        (lambda p, q, k, sizes: k * max(sizes) + q, "not all machines have the largest number of tasks. SLURM has counted "
         "already: SLURM_PROCID"),
        (lambda p, q, k, sizes: sum(sizes[:k]) + q, "this counts machine after machine, but srun --distribution=cyclic "
         "deals tasks over the machines. SLURM has counted already: SLURM_PROCID"),
        (lambda p, q, k, sizes: p + 1, "ranks are counted from 0, as SLURM_PROCID is"),
    ],
    "LOCAL_RANK": [
        (lambda p, q, k, sizes: p, "this is the number in the whole job: with it, a rank would look for GPU 7 on a machine "
         "with 4"),
        (lambda p, q, k, sizes: k, "this is the number of the machine, not that of the task on it"),
        (lambda p, q, k, sizes: p % sizes[0], FIRST + ". SLURM has counted already: SLURM_LOCALID"),
        (lambda p, q, k, sizes: p % sizes[k], "the machines before this one may have other numbers of tasks. SLURM has "
         "counted already: SLURM_LOCALID"),
        (lambda p, q, k, sizes: p % max(sizes), "not all machines have the largest number of tasks. SLURM has counted "
         "already: SLURM_LOCALID"),
        (lambda p, q, k, sizes: p - sum(sizes[:k]), "this counts machine after machine, but srun --distribution=cyclic "
         "deals tasks over the machines. SLURM has counted already: SLURM_LOCALID"),
        (lambda p, q, k, sizes: 0, "it is 0 everywhere: all tasks of a machine would take its first GPU"),
    ],
    "WORLD_SIZE": [
        (lambda p, q, k, sizes: len(sizes), "this is the number of machines: count their tasks"),
        (lambda p, q, k, sizes: len(sizes) * sizes[0], FIRST),
        (lambda p, q, k, sizes: len(sizes) * sizes[k], "all machines are taken to be like this one: SLURM_TASKS_PER_NODE "
         "has a number for each of them, and the world size is the same on all"),
        (lambda p, q, k, sizes: len(sizes) * max(sizes), "not all machines have the largest number of tasks: add up "
         "SLURM_TASKS_PER_NODE"),
        (lambda p, q, k, sizes: sizes[k], "these are the tasks of this machine only: add those of all machines"),
        (lambda p, q, k, sizes: sizes[0], "these are the tasks of the first machine only: add those of all machines"),
        (lambda p, q, k, sizes: sum(size for size, _ in groupby(sizes)), WITHOUT_TIMES),
        (lambda p, q, k, sizes: sum(sizes) - 1, "this is the last rank: ranks are counted from 0, so there is one more"),
        (lambda p, q, k, sizes: p + 1, "this grows with the rank, but the world size is the same for all"),
    ],
    "LOCAL_WORLD_SIZE": [
        (lambda p, q, k, sizes: sizes[0], FIRST),
        (lambda p, q, k, sizes: max(sizes), "this is the largest number of tasks of any machine: take this machine's own, "
         "at place SLURM_NODEID"),
        (lambda p, q, k, sizes: sizes[-1], "this is the number of the last machine: take this machine's own, at place "
         "SLURM_NODEID"),
        (lambda p, q, k, sizes: sum(sizes), "these are the tasks of the whole job: take those of this machine"),
        (lambda p, q, k, sizes: len(sizes), "this is the number of machines, not of the tasks on this one"),
        (lambda p, q, k, sizes: sum(sizes) // len(sizes), "this is the mean: machines may have different numbers of tasks"),
        (lambda p, q, k, sizes: -(-sum(sizes) // len(sizes)), "this is the mean: machines may have different numbers of "
         "tasks"),
        (lambda p, q, k, sizes: q + 1, "this is one more than the task's own number on its machine: count all tasks there"),
        (lambda p, q, k, sizes: 1, "this machine may have several tasks: SLURM_TASKS_PER_NODE says how many"),
    ],
    "GROUP_RANK": [
        (lambda p, q, k, sizes: p, "this is the rank: GROUP_RANK is the number of the machine"),
        (lambda p, q, k, sizes: q, "this is the number on the machine: GROUP_RANK is the number of the machine"),
        (lambda p, q, k, sizes: p // sizes[0], FIRST + ". SLURM has counted already: SLURM_NODEID"),
        (lambda p, q, k, sizes: p // sizes[k], "the machines before this one may have other numbers of tasks. SLURM has "
         "counted already: SLURM_NODEID"),
        (lambda p, q, k, sizes: p // max(sizes), "not all machines have the largest number of tasks. SLURM has counted "
         "already: SLURM_NODEID"),
        (lambda p, q, k, sizes: k + 1, "machines are counted from 0, as SLURM_NODEID is"),
        (lambda p, q, k, sizes: 0, "it is 0 everywhere: each machine has a number of its own, SLURM_NODEID"),
    ],
}  # fmt: skip
OTHERWISE = {
    "RANK": "RANK is the task's number in the job: SLURM_PROCID",
    "LOCAL_RANK": "LOCAL_RANK is the task's number on its machine: SLURM_LOCALID",
    "WORLD_SIZE": "the world size is the sum of SLURM_TASKS_PER_NODE over all machines",
    "LOCAL_WORLD_SIZE": "this machine's entry in SLURM_TASKS_PER_NODE, at place SLURM_NODEID, is its number of tasks",
    "GROUP_RANK": "GROUP_RANK is the number of the task's machine: SLURM_NODEID",
}  # fmt: skip


def cause_of_number(name, tasks, values):
    """The likely mistake: the formula that explains the values for all tasks."""
    for formula, cause in LOOKS[name]:
        if all(value == str(formula(*numbers_of(slurm))) for slurm, value in zip(tasks, values)):
            return cause
    if any(not value.isdecimal() for value in values):
        return f"{OTHERWISE[name]}, a whole number"
    return OTHERWISE[name]


def numbers_of(slurm):
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"]
    return *(int(slurm[name]) for name in names), sizes_of(slurm)


def cause_of_host(slurm, right, got):
    """Why this is not the name of the first host."""
    if got in ("localhost", "127.0.0.1", "::1"):
        return "this means 'this machine' on every machine: each would wait for itself"
    if set("[]") & set(got):
        return "this is still SLURM's short form, which no machine can look up: write out the first name"
    if "," in got:
        return "this is a list of hosts: rank 0 is on the first of them"
    if got == slurm["SLURMD_NODENAME"]:
        return "this is the task's own machine, another one on each: all have to meet at the first"
    if without_zeros(got) == without_zeros(right):
        return "the zeros in front of a number belong to the name: gpu03 is not gpu3"
    if right.startswith(got) and got:
        return "a part of the name is missing: what is behind a pair of brackets, another pair, too, belongs to it"
    return "rank 0 is on the first host of SLURM_JOB_NODELIST, and all have to meet there"


def without_zeros(name):
    """A name with all its numbers without zeros in front."""
    parts = "".join(c if c.isdecimal() else f" {c} " for c in name).split()
    return [int(part) if part.isdecimal() else part for part in parts]


def judge_ports(tasks, seen):
    """Raise Wrong unless all tasks of a job have the same port; return {job: port}."""
    found = {}  # {job: its port}
    for slurm, got in zip(tasks, seen):
        port, job = got["MASTER_PORT"], slurm["SLURM_JOB_ID"]
        told = {"rank": slurm["SLURM_PROCID"], "got": port}
        if not port.isdecimal() or int(port) not in PORTS:
            cause = "MASTER_PORT has to be a whole number from 20000 to 29999"
            if port.isdecimal() and int(port) > 65535:
                cause += ". Ports end at 65535, and a job's number may be larger"
            expected = "a port from 20000 to 29999"
            checked = f"MASTER_PORT for {in_words(slurm)}"
            raise Wrong(checked, expected=expected, **told, cause=cause)
        if found.setdefault(job, port) != port:
            cause = "the tasks of a job have to compute the same port: take it from the job's number alone"
            expected = f"{found[job]}, as for rank 0 of this job"
            checked = f"MASTER_PORT for {in_words(slurm)}"
            raise Wrong(checked, expected=expected, **told, cause=cause)
    return found


def judge_neighbours(found):
    """Raise Wrong if jobs have the same port whose numbers are close to each other.

    found: {job: its port}, texts.
    """
    owners = {}
    for job, port in found.items():
        for other in owners.setdefault(port, []):
            if abs(int(job) - int(other)) >= 10_000:
                continue
            cause = "two jobs may share a machine: those whose numbers differ by less than 10,000 need different ports"
            if len(set(found.values())) == 1:
                cause = (
                    "all jobs have the same port, and two of them may share a machine: derive it from the job's number"
                )
            checked = f"MASTER_PORT for the jobs {other} and {job}"
            got = f"{port} for both"
            raise Wrong(checked, expected="two ports", got=got, cause=cause)
        owners[port].append(job)


def at_a_free_port(meeting, tasks, seen):
    """The tasks of a job at whose port nobody listens here, and the answers for them."""
    for _, _, of_tasks in meeting:
        start = tasks.index(of_tasks[0])
        answers = seen[start : start + len(of_tasks)]
        if is_free(int(answers[0]["MASTER_PORT"])):
            break
    return of_tasks, answers


def judge_meeting(answer, tasks, expected):
    """Raise Wrong unless four processes meet that have only these variables."""
    for rank, got in enumerate(answer.on_ranks(answer_in_this_task, tasks, nproc=4)):
        if got != expected[rank]:
            cause = (
                "the same variables give another answer in another process: is it drawn at random, or from hash() of a "
                "text, which differs from process to process?"
            )
            checked = f"{in_words(tasks[rank])}, in four processes"
            told = {"rank": f"{rank} of 4", "expected": expected[rank], "got": got}
            raise Wrong(checked, **told, cause=cause)
    of_ranks = answer.on_ranks(join, tasks, nproc=4, timeout=15)
    for rank, got in enumerate(of_ranks):
        if got != [rank, 4, 10.0]:
            told = {"rank": f"{rank} of 4", "expected": [rank, 4, 10.0], "got": got}
            checked = "rank, world size, and 1 + 2 + 3 + 4 of four processes that join with these variables"
            cause = "does the function return the same for the same variables each time?"
            raise Wrong(checked, **told, cause=cause)


def is_free(port):
    """Whether nobody listens at this port of loopback at this moment."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
