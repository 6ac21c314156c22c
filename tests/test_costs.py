"""What a test costs is counted, also what its ranks and its processes cost."""

import subprocess
import sys
import time
from types import SimpleNamespace

from conftest import all_but_a_share
from costs import spent

from ddp_course.ranks.launch import launch

SECONDS = 1.0
BUSY = f"import time\nwhile time.process_time() < {SECONDS}: pass"


def busy():
    begin = time.process_time()
    while time.process_time() - begin < SECONDS:
        pass


def test_the_cpu_seconds_of_ranks_and_of_processes_count_and_waiting_does_not():
    launch(int)  # the server has imported what it needs
    before = spent()
    launch(busy, nproc=2)
    ranks = spent() - before
    assert 2 * SECONDS <= ranks < 2 * SECONDS + 2
    subprocess.run([sys.executable, "-c", BUSY])
    assert spent() - before - ranks >= SECONDS
    before = spent()
    time.sleep(1)
    assert spent() - before < 0.5


def test_of_a_tests_cases_a_third_is_run_of_each_test_one_and_a_new_case_changes_little():
    cases = [SimpleNamespace(nodeid=f"a[{number}]") for number in range(31)]
    for number in range(1, 31):
        some = cases[:number]
        left = all_but_a_share(some)
        run = {case.nodeid for case in some} - {case.nodeid for case in left}
        assert len(run) == -(-number // 3)
        assert all_but_a_share(some[::-1]) == left
        more = {case.nodeid for case in all_but_a_share(cases[: number + 1])}
        assert len(run & more) <= 1
