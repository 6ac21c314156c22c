"""The small run of question 4: four ranks on two machines of the laboratory, with a budget."""

import json
import tempfile
import time
from pathlib import Path

from ddp_course.checks.ex21 import small_job
from ddp_course.checks.ex21.planted import BUDGET, MACHINES, PER_MACHINE, planted
from ddp_course.ranks.machines.machines import PIPES, Machines, end_session, free_port

RANKS = MACHINES * PER_MACHINE
LIMIT = 300  # seconds of an attempt; on a busy machine, starting torchrun twice takes a minute


def small_run(name):
    """Run your small job on two machines; return its pages, a list of rows per rank.

    name: yours, which decides what goes wrong. It takes about half a minute. Raises
    RuntimeError, with what torchrun has printed, if the job does not run as it should.
    """
    run = planted(name)
    with tempfile.TemporaryDirectory() as folder, Machines(MACHINES) as machines:
        folder = Path(folder)
        print(f"{RANKS} ranks, a checkpoint every {run.every} steps, a budget of {BUDGET} executions", flush=True)
        agents = start(machines, folder, name, attempt=0, executions=BUDGET)
        machine = run.lost[0]
        wait_for(lambda: silent(folder, machine), agents)
        cut_power(machines, machine, agents[machine])
        wait_for(lambda: len(gave_up(folder)) == RANKS - PER_MACHINE, agents)
        end(agents)
        used = executions(folder)
        print(f"a machine has lost its power: {used} executions are used up, and the machine starts again", flush=True)
        agents = start(machines, folder, name, attempt=1, executions=BUDGET - used)
        wait_for(lambda: all(agent.poll() == 0 for agent in agents), agents)
        end(agents)
        print(f"{executions(folder)} executions: the budget is used up")
        return pages_in(folder)


def start(machines, folder, name, attempt, executions):
    """Start torchrun on each machine; return the processes."""
    port = next(machines.ports) if machines.namespaces else free_port()
    program = ["-m", small_job.__name__, str(folder), name, str(attempt), str(executions)]
    return [
        machines.start(machine, [*machines.agent(machine, PER_MACHINE, port), *program], **PIPES)
        for machine in range(MACHINES)
    ]


def wait_for(condition, agents):
    """Wait until condition() holds. Raises RuntimeError if torchrun has ended everywhere and
    it does not, or after LIMIT seconds.
    """
    deadline = time.monotonic() + LIMIT
    while True:
        over = all(agent.poll() is not None for agent in agents) or time.monotonic() > deadline
        if condition():
            return
        if over:
            end(agents)
            raise RuntimeError("the small run has failed\n" + "\n".join(agent.stdout.read() for agent in agents))
        time.sleep(0.05)


def end(agents):
    for agent in agents:
        end_session(agent)


def silent(folder, machine):
    """Whether all ranks of a machine have come to the step in which it is lost."""
    return len(list(folder.glob(f"silent-{machine}-*"))) == PER_MACHINE


def cut_power(machines, machine, agent):
    if machines.namespaces:
        machines.power_off(machine)
        machines.power_on(machine)  # it is there again for the next attempt
    end_session(agent)


# ---- the pages ----


def page_of(folder, rank):
    path = folder / f"page-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pages_in(folder):
    return [page_of(folder, rank) for rank in range(RANKS)]


def gave_up(folder):
    """The ranks that have waited for a lost machine in vain."""
    return [rank for rank, page in enumerate(pages_in(folder)) if page and page[-1]["mean_norm"] is None]


def executions(folder):
    return len({(row["attempt"], row["step"]) for page in pages_in(folder) for row in page})
