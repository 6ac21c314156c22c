"""Question 1: from what SLURM tells a task to what torchrun would tell a rank."""

import builtins
import os
import socket
from collections import defaultdict
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course.checks.claims import Between, Claim, hold, on_every_rank
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
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
        ("r[1-2]n[098-099]-ib", ["r1n098-ib", "r1n099-ib", "r2n098-ib", "r2n099-ib"]),
        ("c[9-11]-ib", ["c9-ib", "c10-ib", "c11-ib"]),
        ("n[2,4-6],m1", ["n2", "n4", "n5", "n6", "m1"]),
    ]
    uneven = [[2, 2, 2, 2, 1], [4], [1, 3, 2, 2], [2, 1, 3, 2], [3, 2, 3], [1, 1, 2, 2, 1]]
    jobs = [
        (hosts, tasks, {"nodelist": nodelist, "asked": place == 0, "cyclic": place == 4})
        for place, ((nodelist, hosts), tasks) in enumerate(zip(planned, uneven))
    ]
    for fewest in (3, 3, 3, 11):
        name, first = draw.choice(["a", "dgx-", "node"]), draw.randrange(1, 90)
        count, wide = draw.randrange(fewest, 13), draw.choice([3, 4])
        hosts = [f"{name}{first + node:0{wide}}" for node in range(count)]
        nodelist = f"{name}[{first:0{wide}}-{first + count - 1:0{wide}}]"
        tasks = [draw.randrange(1, 5)] * (count - 1) + [draw.randrange(9, 17)]
        jobs.append((hosts, tasks, {"nodelist": nodelist}))
    numbers = [number, *draw.sample(range(number + 1, number + 10_000), 8)]
    numbers.append(draw.randrange(1, 100))  # on a new cluster
    return [
        (hosts, tasks, a_job(number, hosts=hosts, tasks=tasks, **options))
        for number, (hosts, tasks, options) in zip(numbers, jobs)
    ]


def neighbours(draw):
    """Small jobs, whose numbers have all differences from 1 to 10,000, small ones more often;
    some of them get the first port and the last one.
    """
    first = 10_000 * draw.randrange(2, 400) - 200
    numbers = sorted({10_000, *range(first, first + 400), *range(first, first + 10_001, 100)})
    return [(["node7"], [1], a_job(n, "node7", ["node7"], [1])) for n in numbers]


def meeting_jobs(draw):
    """Some jobs of four tasks that can really meet, each at a port of its own."""
    hosts, sizes = ["localhost", "node4", "node5"], [2, 1, 1]
    numbers = draw.sample(range(10_001, 20_000), 20)
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
    builtins.hash = lambda value: original(value) if isinstance(value, int) else original((rank, original(value)))
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


# ---- what is claimed ----


def form(slurm, got):
    """It is a dict with all variables, and all of them are texts."""
    words = in_words(slurm)
    yield Claim(
        words, type(got).__name__, "dict", "return a dict, {'RANK': '3', ...}",
        [("NoneType", "the function ends without a return statement: return a dict")], told="a dict", shown=got,
    )  # fmt: skip
    missing = [name for name in NAMES if name not in got]
    yield Claim(
        words, missing, [], f"{', '.join(missing[:1])} is missing: init_process_group or the program needs it",
        told=", ".join(NAMES), shown=", ".join(map(str, got)),
    )  # fmt: skip
    others = {name: value for name, value in got.items() if not isinstance(value, str)}
    yield Claim(
        words, others, {}, "the environment holds texts only: os.environ would raise a TypeError",
        told=f"{', '.join(map(str, others))} as a text",
    )  # fmt: skip


def variable(name, tasks, expected, seen, here):
    """One variable of one of the tasks, tasks[here]."""
    slurm, right, got = tasks[here], expected[here][name], seen[here][name]
    cause = partial(cause_of_number, name, tasks, [each[name] for each in seen])
    if name == "MASTER_ADDR":
        cause = partial(cause_of_host, slurm, right, got)
    yield Claim(f"{name} for {in_words(slurm)}", got, right, cause, shown=got or "an empty text")


class Task(NamedTuple):
    """A task's number in the job and on its machine, its machine, and the tasks of each."""

    rank: int
    local: int
    node: int
    sizes: list


def task_of(slurm):
    sizes = []
    for part in slurm["SLURM_TASKS_PER_NODE"].split(","):
        size, _, times = part.rstrip(")").partition("(x")
        sizes += [int(size)] * int(times or 1)
    return Task(*(int(slurm[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")), sizes)


FIRST = "all machines are taken to be like the first: SLURM_TASKS_PER_NODE has a number for each of them"
WITHOUT_TIMES = "2(x3) in SLURM_TASKS_PER_NODE means three machines with 2 tasks each: here it is counted once"
COUNTED = ". SLURM has counted already: "
CYCLIC = f"this counts machine after machine, but srun --distribution=cyclic deals tasks over the machines{COUNTED}"


def with_size(formula, name):
    """A formula with one number of tasks for all machines. name: of what SLURM has counted."""
    counted = COUNTED + name
    return [
        (lambda t: formula(t, t.sizes[0]), FIRST + counted),
        (
            lambda t: formula(t, t.sizes[t.node]),
            "the machines before this one may have other numbers of tasks" + counted,
        ),
        (lambda t: formula(t, max(t.sizes)), "not all machines have the largest number of tasks" + counted),
    ]


# {variable: [(formula, cause)]}
LOOKS = {
    "RANK": [
        (lambda t: t.local, "this is the number on the task's machine: two tasks of a job would be the same rank"),
        (lambda t: t.node, "this is the number of the machine: its tasks would all be the same rank"),
        *with_size(lambda t, size: t.node * size + t.local, "SLURM_PROCID"),
        (lambda t: sum(t.sizes[:t.node]) + t.local, CYCLIC + "SLURM_PROCID"),
        (lambda t: t.rank + 1, "ranks are counted from 0, as SLURM_PROCID is"),
    ],
    "LOCAL_RANK": [
        (lambda t: t.rank, "this is the number in the whole job: with it, a rank would look for GPU 7 on a machine "
         "with 4"),
        (lambda t: t.node, "this is the number of the machine, not that of the task on it"),
        *with_size(lambda t, size: t.rank % size, "SLURM_LOCALID"),
        (lambda t: t.rank - sum(t.sizes[:t.node]), CYCLIC + "SLURM_LOCALID"),
        (lambda t: 0, "it is 0 everywhere: all tasks of a machine would take its first GPU"),
    ],
    "WORLD_SIZE": [
        (lambda t: len(t.sizes), "this is the number of machines: count their tasks"),
        (lambda t: len(t.sizes) * t.sizes[0], FIRST),
        (lambda t: len(t.sizes) * t.sizes[t.node], "all machines are taken to be like this one: SLURM_TASKS_PER_NODE "
         "has a number for each of them, and the world size is the same on all"),
        (lambda t: len(t.sizes) * max(t.sizes), "not all machines have the largest number of tasks: add up "
         "SLURM_TASKS_PER_NODE"),
        (lambda t: t.sizes[t.node], "these are the tasks of this machine only: add those of all machines"),
        (lambda t: t.sizes[0], "these are the tasks of the first machine only: add those of all machines"),
        (lambda t: sum(size for size, _ in groupby(t.sizes)), WITHOUT_TIMES),
        (lambda t: sum(t.sizes) - 1, "this is the last rank: ranks are counted from 0, so there is one more"),
        (lambda t: t.rank + 1, "this grows with the rank, but the world size is the same for all"),
    ],
    "LOCAL_WORLD_SIZE": [
        (lambda t: t.sizes[0], FIRST),
        (lambda t: max(t.sizes), "this is the largest number of tasks of any machine: take this machine's own, at "
         "place SLURM_NODEID"),
        (lambda t: t.sizes[-1], "this is the number of the last machine: take this machine's own, at place "
         "SLURM_NODEID"),
        (lambda t: sum(t.sizes), "these are the tasks of the whole job: take those of this machine"),
        (lambda t: len(t.sizes), "this is the number of machines, not of the tasks on this one"),
        (lambda t: sum(t.sizes) // len(t.sizes), "this is the mean: machines may have different numbers of tasks"),
        (lambda t: -(-sum(t.sizes) // len(t.sizes)), "this is the mean: machines may have different numbers of tasks"),
        (lambda t: t.local + 1, "this is one more than the task's own number on its machine: count all tasks there"),
        (lambda t: 1, "this machine may have several tasks: SLURM_TASKS_PER_NODE says how many"),
    ],
    "GROUP_RANK": [
        (lambda t: t.rank, "this is the rank: GROUP_RANK is the number of the machine"),
        (lambda t: t.local, "this is the number on the machine: GROUP_RANK is the number of the machine"),
        *with_size(lambda t, size: t.rank // size, "SLURM_NODEID"),
        (lambda t: t.node + 1, "machines are counted from 0, as SLURM_NODEID is"),
        (lambda t: 0, "it is 0 everywhere: each machine has a number of its own, SLURM_NODEID"),
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
        if all(value == str(formula(task_of(slurm))) for slurm, value in zip(tasks, values)):
            return cause
    return OTHERWISE[name] + ", a whole number" * any(not value.isdecimal() for value in values)


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


def port(slurm, got, of_job):
    """of_job: the port that the first task of this job has."""
    checked, cause = f"MASTER_PORT for {in_words(slurm)}", "MASTER_PORT has to be a whole number from 20000 to 29999"
    yield Claim(
        checked, int(got) if got.isdecimal() else got, PORTS, cause,
        [(Between(65536), f"{cause}. Ports end at 65535, and a job's number may be larger")],
        told="a port from 20000 to 29999",
    )  # fmt: skip
    yield Claim(
        checked, got, of_job, "the tasks of a job have to compute the same port: take it from the job's number alone",
        told=f"{of_job}, as for rank 0 of this job",
    )  # fmt: skip


def different_ports(ports):
    """Jobs whose numbers are close to each other have different ports. ports: {job: its
    port}, texts.
    """
    owners = defaultdict(list)
    cause = "two jobs may share a machine: those whose numbers differ by less than 10,000 need different ports"
    if len(set(ports.values())) == 1:
        cause = "all jobs have the same port, and two of them may share a machine: derive it from the job's number"
    for job, port in ports.items():
        close = [other for other in owners[port] if abs(int(job) - int(other)) < 10_000]
        yield Claim(
            f"MASTER_PORT for the jobs {' and '.join([*close, job])}", close, [], cause,
            told="different ports", shown=f"{port} for all of them",
        )  # fmt: skip
        owners[port].append(job)


def in_another_process(tasks, expected, rank, of_ranks):
    yield Claim(
        f"{in_words(tasks[rank])}, in four processes", of_ranks[rank], expected[rank], "the same variables give another "
        "answer in another process: is it drawn at random, or from hash() of a text, which differs from process to process?",
    )  # fmt: skip


def meeting(rank, of_ranks):
    yield Claim(
        "rank, world size, and 1 + 2 + 3 + 4 of four processes that join with these variables", of_ranks[rank],
        [rank, 4, 10.0], "does the function return the same for the same variables each time?",
    )  # fmt: skip


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
    jobs_that_meet = meeting_jobs(draw)
    jobs = [*jobs_of(draw), *neighbours(draw), *jobs_that_meet]
    tasks = [slurm for _, _, of_tasks in jobs for slurm in of_tasks]
    [seen] = answer.on_ranks(answers_for, tasks, timeout=10)
    expected = [expected_of(hosts, sizes, slurm) for hosts, sizes, of_tasks in jobs for slurm in of_tasks]
    for slurm, got in zip(tasks, seen):
        hold(form(slurm, got), slurm["SLURM_PROCID"])
    for name in [*SAME, "MASTER_ADDR"]:
        for here, slurm in enumerate(tasks):
            hold(variable(name, tasks, expected, seen, here), slurm["SLURM_PROCID"])
    ports = {}  # {job: its port}
    for slurm, got in zip(tasks, seen):
        of_job = ports.setdefault(slurm["SLURM_JOB_ID"], got["MASTER_PORT"])
        hold(port(slurm, got["MASTER_PORT"], of_job), slurm["SLURM_PROCID"])
    of_tasks, answers = at_a_free_port(jobs_that_meet, tasks, seen)
    # before the ports of other jobs: a hash() gives some of them the same, which is not its main fault
    on_every_rank(
        partial(in_another_process, of_tasks, answers), answer.on_ranks(answer_in_this_task, of_tasks, nproc=4)
    )
    hold(different_ports(ports))
    on_every_rank(meeting, answer.on_ranks(join, of_tasks, nproc=4, timeout=15))


def at_a_free_port(jobs, tasks, seen):
    """The tasks of a job at whose port nobody listens here, and the answers for them."""
    for _, _, of_tasks in jobs:
        start = tasks.index(of_tasks[0])
        answers = seen[start : start + len(of_tasks)]
        if is_free(int(answers[0]["MASTER_PORT"])):
            break
    return of_tasks, answers


def is_free(port):
    """Whether nobody listens at this port of loopback at this moment."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
