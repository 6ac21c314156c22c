"""What each test costs in CPU seconds: a pytest plugin.

Counted are the test's own process, the processes that it has started and that have ended,
and the fork server with its ranks, which no one waits for here and `time` does not see. So
a figure does not depend on how busy the machine is, but for what waiting in a loop takes.
"""

import json
import multiprocessing.forkserver
import os
import resource
from pathlib import Path

import pytest

BUDGET = 720  # of `make test`, in all
FILE = "DDP_COURSE_COSTS"  # a file for a line per test: its name, its cost, its outcome
# of one test, but for those that are marked as dear, and without what it shares with others
MOST = 30 if "DDP_COURSE_THOROUGH" not in os.environ else float("inf")
CURE = "make it cheaper, or name it in tests/dear.txt, if `make test` can do without it"
CLOCK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def spent():
    """The CPU seconds that this process has cost so far, with those that it has started."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        seconds += used.ru_utime + used.ru_stime
    return seconds + of_the_fork_server()


def of_the_fork_server():
    """Those of the fork server, and of its ranks that have ended: 0 where none runs."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    try:
        text = Path(f"/proc/{server}/stat").read_text()
    except OSError:
        return 0.0
    # utime, stime, cutime and cstime of proc(5), after the name, which may hold spaces
    return sum(map(int, text.rpartition(")")[2].split()[11:15])) / CLOCK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.costs = {"before": spent()}
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.costs[report.when] = spent()
    if (
        report.when == "call"
        and report.passed
        and item.get_closest_marker("dear") is None
    ):
        own = item.costs["call"] - item.costs["setup"]
        if own > MOST:
            report.outcome = "failed"
            report.longrepr = (
                f"it takes {own:.0f} CPU seconds, of {MOST} at most: {CURE}"
            )
    if report.when == "teardown":
        report.user_properties.append(("cost", spent() - item.costs["before"]))
    return report


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # this is a worker of xdist
        session.config.workeroutput["cost"] = spent()


class Total:
    """In the process that collects the reports of all workers."""

    def __init__(self):
        self.costs, self.of_workers, self.file = {}, 0.0, os.environ.get(FILE)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.of_workers += getattr(node, "workeroutput", {}).get("cost", 0.0)

    def pytest_runtest_logreport(self, report):
        line = {"test": report.nodeid}
        if report.failed:
            line["failed"] = str(report.longrepr)[-3000:]
        if report.when == "teardown":
            cost = round(dict(report.user_properties)["cost"], 2)
            line["cost"] = self.costs[report.nodeid] = cost
        if self.file and len(line) > 1:
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        tests, whole = sum(self.costs.values()), spent()
        if self.of_workers:  # they have been waited for, and would count twice
            used = resource.getrusage(resource.RUSAGE_SELF)
            whole = self.of_workers + used.ru_utime + used.ru_stime
        line = (
            f"{whole:.0f} CPU seconds, {tests:.0f} of them in {len(self.costs)} tests"
        )
        terminalreporter.write_line(f"{line}; make test is to take {BUDGET} at most")
