"""The checks: right answers pass, also those that are not ours; wrong ones are
rejected, for the right cause, in time.
"""

import ast
import bisect
import functools
import importlib
import inspect
import io
import os
import pickle
import pkgutil
import re
import subprocess
import time
import zlib
from fractions import Fraction
from functools import partial
from pathlib import Path

import mutants
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH
from mutants import made
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from ddp_course import checks
from ddp_course.checks import ex03, ex16, functions
from ddp_course.checks.checked_watch import UNSEEN, CheckedWatch
from ddp_course.checks.claims import Claim, OneOf, agree, hold
from ddp_course.checks.ex16 import analyse
from ddp_course.cli import exercises
from ddp_course.judge import answer as answers
from ddp_course.judge import hints
from ddp_course.judge import verdict as verdicts
from ddp_course.judge.answer import Source
from ddp_course.judge.known_errors import some_rank_has_not_begun
from ddp_course.judge.values import plain
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
from ddp_course.ranks.variables import PATIENCE

for module in pkgutil.iter_modules(mutants.__path__):
    importlib.import_module(f"mutants.{module.name}")
RIGHT = [candidate for candidate in mutants.CANDIDATES if candidate.pattern is None]
WRONG = [candidate for candidate in mutants.CANDIDATES if candidate.pattern is not None]


EXERCISES = sorted(
    module.name
    for module in pkgutil.iter_modules(checks.__path__)
    if module.name.startswith("ex")
)


def questions():
    for name in EXERCISES:
        yield from hints.questions(name.removeprefix("ex")).values()


def some(candidates, every):
    """In `make test`, all answers to the questions that have been changed here, those that
    are new, and a wrong one for each other question; a part of the others in `make rest`.
    """
    touched, new = touched_questions(), new_candidates()
    once, chosen = set(), []
    for candidate in candidates:
        question = candidate.lesson, candidate.question
        name = f"{candidate.lesson}-{candidate.question}-{candidate.name}"
        first = candidate.pattern is not None and question not in once
        once.add(question)
        cheap = (
            first or question in touched or (candidate.lesson, candidate.line) in new
        )
        # by its name, so that a new answer does not change which others are judged
        if cheap or zlib.crc32(name.encode()) % every == 0 or THOROUGH:
            marks = [] if cheap else [pytest.mark.dear]
            chosen.append(pytest.param(candidate, marks=marks, id=name))
    return chosen


def difference(*arguments):
    """What git says of the files here that are not as in origin/main, or nothing."""
    ask = [
        "git",
        "diff",
        *arguments,
        "origin/main",
        "--",
        "ddp_course",
        "tests/mutants",
    ]
    return subprocess.run(ask, cwd=COURSE, capture_output=True, text=True).stdout


def touched_questions():
    """The (exercise, question) of which a page is not as in origin/main."""
    changed = {COURSE / line for line in difference("--name-only").splitlines()}
    return {
        (question.lesson, question.name)
        for question in questions()
        if changed & pages_of(question.body.__module__)
    }


def new_candidates():
    """The (exercise, line) of those whose text has lines that origin/main has not."""
    lines = {}
    for candidate in mutants.CANDIDATES:
        lines.setdefault(candidate.lesson, set()).add(candidate.line)
    begins = {lesson: sorted(of_it) for lesson, of_it in lines.items()}
    found, lesson = set(), None
    for text in difference("--unified=0").splitlines():
        if text.startswith("+++"):
            lesson = (re.findall(r"mutants/ex(\d\d)", text) or [None])[0]
        added = re.match(r"@@ \S+ \+(\d+),?(\d*) @@", text)
        if added and lesson:
            first, count = int(added[1]), int(added[2] or 1)
            for line in range(first, first + count):
                place = bisect.bisect_right(begins[lesson], line) - 1
                found |= {(lesson, begins[lesson][place])} if place >= 0 else set()
    return found


@functools.cache
def pages_of(name):
    """The files of a question: its module's, and those of its exercise that it imports."""
    module = importlib.import_module(name)
    text = Path(module.__file__).read_text()
    folder = name.rpartition(".")[0]
    imported = re.findall(rf"(?m)^from {re.escape(folder)}(?:\.| import )(\w+)", text)
    others = [f"{folder}.{page}" for page in imported]
    return {Path(module.__file__)}.union(*map(pages_of, others))


def test_a_changed_page_and_a_new_answer_name_what_is_to_be_judged(monkeypatch):
    said = {"--name-only": "ddp_course/checks/ex02/messages.py\n"}
    candidate = next(each for each in mutants.CANDIDATES if each.lesson == "18")
    hunk = f"@@ -1 +{candidate.line + 1},2 @@"
    said["--unified=0"] = f"+++ b/tests/mutants/ex18.py\n{hunk}\n"
    monkeypatch.setitem(globals(), "difference", said.get)
    assert touched_questions() == {
        ("02", "broadcast"),
        ("02", "ring_reduce_scatter"),
    }
    assert new_candidates() == {("18", candidate.line)}


# of the checks' random choices: the same in each run of `make test`, so that the suite
# is green or red for the same code; `make thorough` draws them
CHOICES = None if THOROUGH else 1
SECONDS = 10  # for a verdict, on a quiet machine


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first launch of a process waits for torch to be imported, for seconds."""
    launch(int)


def observers():
    """What the checks let ranks call: the first argument of on_ranks, or of apart."""
    found = []
    for each in pkgutil.walk_packages(checks.__path__, "ddp_course.checks."):
        module = importlib.import_module(each.name)
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", None)
            if called in ("on_ranks", "apart", "without") and isinstance(
                node.args[0], ast.Name
            ):
                found.append(getattr(module, node.args[0].id, None))
    return sorted({each for each in found if each}, key=lambda each: each.__module__)


def judge(candidate):
    module = importlib.import_module(f"ddp_course.checks.ex{candidate.lesson}")
    begin = time.perf_counter()
    check = getattr(module, f"check_{candidate.question}")
    verdict = check.judge(*candidate.answers, seed=CHOICES)
    return verdict, time.perf_counter() - begin


@pytest.mark.parametrize("candidate", some(RIGHT, every=4))
def test_a_right_answer_passes(candidate, monkeypatch):
    # other tests run beside it, and it ends long before any limit on a quiet machine
    monkeypatch.setenv(PATIENCE, "3")
    verdict, _ = judge(candidate)
    assert str(verdict) == f"{candidate.lesson} {candidate.question}: passed"


@pytest.mark.parametrize("candidate", some(WRONG, every=6))
def test_a_wrong_answer_is_rejected_for_the_right_cause(candidate):
    verdict, seconds = judge(candidate)
    assert re.fullmatch(candidate.status, verdict.status), str(verdict)
    assert re.search(candidate.pattern, str(verdict)), str(verdict)
    # a program that torchrun starts gets 30 seconds, because it imports torch anew
    limit = 3 * SECONDS if verdict.status == "timed out" else SECONDS
    programs = 1 + os.getloadavg()[0] / os.cpu_count()  # that share a core, about
    assert seconds < limit * programs, f"{seconds:.1f} s\n{verdict}"


@pytest.mark.parametrize(
    "cell, said",
    [
        ("def average_gradients(module)\n    pass", "SyntaxError: expected ':'"),
        (
            "def average(module):\n    pass",
            "where         the cell defines no average_gradients\n  to repeat",
        ),
    ],
)
def test_a_cell_that_does_not_load_is_told_by_its_own_lines(cell, said):
    verdict = ex03.check_average_gradients.judge(
        Source("average_gradients", "import torch", cell)
    )
    assert verdict.status == "your code raised"
    assert said in str(verdict) and "judge/" not in str(verdict)


RETURNS_CODE = """
import pickle
import torch

class Code:
    def __reduce__(self):
        return exec, ("import ddp_course.judge.verdict as j; j.Verdict = lambda *_: j.PASSED",)

def average_gradients(module):
    torch.save = lambda value, file: pickle.dump(Code(), file)
"""
REPLACES_OURS = """
import ddp_course.judge.answer as judge

def replacing(function):  # as soon as the cell runs
    judge.plain = lambda value: 1 / 0
    return function

@replacing
def average_gradients(module):
    pass
"""
USES_THE_CHECK = """
def analyse(traces):
    from ddp_course.checks.ex16.analyse import truth
    return truth(traces)
"""


@pytest.mark.parametrize(
    "got, expected, scale, same",
    [
        (2, 2, 0, True),
        (2.0, 2, 0, False),  # a fraction is no rank
        (True, 1, 0, False),
        ("2", 2, 0, False),
        (None, 2, 0, False),
        (1.0000001, 1.0, 0, True),
        (1.00001, 1.0, 0, False),
        (1, 1.0, 0, True),
        (True, 1.0, 0, False),
        (1e-10, 0.0, 0, False),
        (1e-10, 0.0, 1e-3, True),  # nothing, beside numbers of a thousandth
        (float("nan"), 1.0, 1, False),
        (float("inf"), 1.0, 1, False),
        ([1, 2], [1, 2], 0, True),
        ([1, 2, 3], [1, 2], 0, False),
        ([1, 2.0], [1, 2], 0, False),
        (3, [1, 2], 0, False),
    ],
)
def test_values_agree_if_they_are_the_same_and_of_the_same_type(
    got, expected, scale, same
):
    assert agree(got, expected, functions.DIGITS, scale) == same


def test_of_several_mistakes_the_first_that_explains_all_results_is_told():
    cases = [(1, 2), (0, 0), (3, 3)]
    right = lambda a, b: a + b  # noqa: E731
    seen = [right(*case) + 1 for case in cases]
    explains = partial(functions.explains, right=right, cases=cases, seen=seen)
    assert explains(lambda a, b: a + b + 1, scale=lambda case: 0)
    assert not explains(lambda a, b: a * b + 2, scale=lambda case: 0)
    assert explains(lambda a, b: a + b + b // b, scale=lambda case: 0)  # where it gives
    right = [
        functions.as_plain(np.int64(3)),
        functions.as_plain((torch.tensor(2), 1.5)),
    ]
    assert repr(right) == "[3, [2, 1.5]]"
    assert functions.as_plain(np.array([1, 2.5])) == [1.0, 2.5]
    assert functions.as_plain(Fraction(1, 4)) == 0.25
    assert not functions.explains(
        lambda a, b: a + b, lambda a, b: a + b, cases, [3, 0, 6], lambda case: 0
    )  # what is right is no mistake


def sent_in_each_way(hidden):
    """The log of each way to send something, and the error that it ends with."""
    seen = {}
    with process_group() as (rank, n):
        t, group = torch.ones(2 * n), dist.group.WORLD
        backend, other = group._get_backend(t.device), (rank + 1) % n
        pieces, of_its_own = list(t.chunk(n)), dist.new_group()

        def messages(group=None):
            pair = [
                dist.P2POp(dist.isend, t, other, group),
                dist.P2POp(dist.irecv, t + 0, (rank - 1) % n, group),
            ]
            [work.wait() for work in dist.batch_isend_irecv(pair)]

        def without_modes():
            with _disable_current_modes():
                dist.all_reduce(t)

        def messages_without_modes():
            with _disable_current_modes():
                messages(dist.new_group())

        def train():
            model = DistributedDataParallel(torch.nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()

        ways = {
            "all_reduce": lambda: dist.all_reduce(t),
            "functional all_reduce": lambda: functional.wait_tensor(
                functional.all_reduce(t, "sum", group)
            ),
            "functional all_gather": lambda: functional.wait_tensor(
                functional.all_gather_tensor(t, 0, group)
            ),
            "objects": lambda: dist.all_gather_object([None] * n, rank),
            "messages": messages,
            "messages in a group": lambda: messages(of_its_own),
            "reduce_scatter": lambda: dist.reduce_scatter(pieces[0] + 0, pieces),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
                pieces[0] + 0, t
            ),
            "monitored_barrier": dist.monitored_barrier,
            "DDP": train,
        }
        secrets = {
            "nothing": lambda: None,
            "without modes": without_modes,
            "messages in a group of its own": messages_without_modes,
            "by the backend": lambda: backend.allreduce([t]).wait(),
        }
        for name, way in ways.items():
            try:
                with CheckedWatch() as watch:
                    way()
                    secrets[hidden]()
                seen[name] = [entry["name"] for entry in watch.log]
            except RuntimeError as error:
                seen[name] = str(error)
    return seen


def test_what_is_sent_is_counted_however_it_is_sent():
    for seen in launch(sent_in_each_way, "nothing", nproc=3):
        assert seen["functional all_reduce"] == seen["all_reduce"] == ["allreduce"]
        assert seen["functional all_gather"] == ["allgather"]
        assert seen["messages"] == ["send", "recv"]
        assert seen["DDP"].count("allreduce") == 1
        assert all(isinstance(log, list) for log in seen.values())


@pytest.mark.parametrize(
    "hidden", ["without modes", "by the backend", "messages in a group of its own"]
)
def test_what_is_sent_behind_the_dispatcher_is_told_whatever_stands_before_it(hidden):
    for seen in launch(sent_in_each_way, hidden, nproc=3):
        assert all(UNSEEN in log for log in seen.values()), seen


def test_who_waits_for_a_rank_that_is_still_starting_is_not_to_blame():
    late = "the 2 ranks did not finish within 6 s\n"
    late += (
        "  rank 0 was in a.py, line 3, in f: dist.recv(x)\n  rank 1 was still starting"
    )
    assert some_rank_has_not_begun(late)
    elsewhere = late.replace("still starting", "in a.py, line 4, in g: dist.recv(x)")
    assert not some_rank_has_not_begun(elsewhere)


def test_where_no_rank_has_begun_the_machine_is_too_busy_and_the_answer_not_wrong(
    monkeypatch,
):
    tries = []
    once = answers.Answer._once
    monkeypatch.setattr(
        answers.Answer, "_once", lambda *a, **k: (tries.append(1), once(*a, **k))[1]
    )
    # such ranks import torch, for seconds, and get half of one
    monkeypatch.setenv("DDP_COURSE_START_METHOD", "spawn")
    monkeypatch.setenv("DDP_COURSE_PATIENCE", "0.02")
    verdict = ex03.check_average_gradients.judge(lambda module: None)
    assert verdict.status == "the grader's own error" and len(tries) == 2
    assert "this machine is too busy" in str(verdict)
    assert "likely cause" not in str(verdict) and "for a hint" not in str(verdict)


def test_an_answer_that_sends_code_home_runs_nothing_there():
    before = verdicts.Verdict
    verdict = ex03.check_average_gradients.judge(
        Source("average_gradients", "", RETURNS_CODE)
    )
    assert verdict.status == "your code raised" and verdicts.Verdict is before
    assert "cannot be sent back" in str(verdict) or "is no plain value" in str(verdict)


def test_what_an_answer_puts_in_the_place_of_the_judges_functions_is_not_used():
    answer = Source("average_gradients", "", REPLACES_OURS)
    verdict = ex03.check_average_gradients.judge(answer)
    assert verdict.status == "failed", str(verdict)  # nothing was averaged


SHOWN = """
def average_gradients(module):
    from ddp_course import checks
    assert len(checks.ex15.CAUSES) > 3, "what the exercise shows"
"""


def test_what_an_exercise_shows_of_its_checks_is_there_for_an_answer():
    answer = Source("average_gradients", "import ddp_course.checks.ex15", SHOWN)
    verdict = ex03.check_average_gradients.judge(answer)
    assert verdict.status == "failed", str(verdict)  # nothing was averaged


@pytest.mark.parametrize(
    "answer",
    [Source("analyse", "", USES_THE_CHECK), analyse.truth],
    ids=["text", "own"],
)
def test_what_a_check_compares_with_cannot_be_handed_in(answer):
    """Neither imported where it runs, nor as the answer itself."""
    verdict = ex16.check_analyse.judge(answer)
    assert verdict.status == "your code raised"
    assert "truth is not here: an answer runs without the checks" in str(verdict)


def names_in(packed):
    """The names that a pickle imports. It is loaded in a rank: here, cloudpickle would
    take its classes for ours, and give ours other methods.
    """
    found = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module, name):
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    Noting(io.BytesIO(packed)).load()
    return found


def test_what_a_rank_gets_of_the_checks_is_code_and_plain_values():
    """A library's own object would be a copy, and what a judge compares with is not
    needed there.
    """
    functions = observers()
    assert len(functions) > 80
    packed = [answers.by_value(function) for function in functions]
    [of_each] = launch(lambda: [names_in(one) for one in packed], nproc=1, timeout=600)
    for function, found in zip(functions, of_each):
        where = f"{function.__module__}.{function.__name__}"
        assert not [one for one in found if one.startswith("ddp_course.checks")], where
        assert not [one for one in found if one.endswith("dynamic_subimport")], where


def test_an_answer_that_prints_without_end_fills_neither_memory_nor_disk():
    answer = (
        "def average_gradients(module):\n    while True:\n        print('x' * 10**6)"
    )
    verdict = ex03.check_average_gradients.judge(
        Source("average_gradients", "", answer)
    )
    assert verdict.status == "your code raised" and "does it print without end?" in str(
        verdict
    )
    assert len(str(verdict)) < 5000


GIVEN = "import torch, torch.distributed as dist"
TRIED = """%%time
%matplotlib inline
import matplotlib.pyplot as plt
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
from ddp_course.ranks.variables import PATIENCE
from ddp_course import checks
files = !ls
dist.all_reduce?

def average_gradients(module):
    x = (7
        % 4)
    grads = [each.grad for each in module.parameters() if each.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad) / SIZES[-1]())

SIZES = [None]
SIZES.append(dist.get_world_size)
checks.ex03.check_average_gradients(average_gradients)
result = launch(average_gradients, None, nproc=2)
plt.plot([1, 2]).of_nothing
await nothing
dist.barrier()
"""


def test_a_cell_that_tries_itself_is_judged_as_in_the_notebook():
    source = Source("average_gradients", GIVEN, TRIED)
    verdict = ex03.check_average_gradients.judge(source)
    assert str(verdict) == "03 average_gradients: passed"


def test_an_error_in_a_cell_with_magics_names_the_learners_line():
    cell = "%time\n!ls\ndef average_gradients(module):\n    raise ValueError('mine')"
    verdict = ex03.check_average_gradients.judge(Source("average_gradients", "", cell))
    assert verdict.status == "your code raised" and "line 4" in str(verdict)
    assert "raise ValueError('mine')" in str(verdict)


def test_numbers_of_numpy_are_plain_numbers():
    given = [np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), 2]
    values = plain(given)
    assert values == [3, 0.5, True, "x", 2]
    assert [type(value) for value in values] == [int, float, bool, str, int]


@pytest.mark.parametrize(
    "expected, got",
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
        (torch.zeros(9), torch.tensor([0.0] * 8 + [1])),
        (torch.ones(2), torch.ones(2).double()),
        ("a" * 500 + "b", "a" * 500 + "c"),
        (True, "True"),
        ([1] * 300, [1] * 299 + [2]),
    ],
)
def test_expected_and_got_never_print_alike(expected, got):
    rows = Wrong("x", cause="y", expected=expected, got=got).rows
    assert rows["expected"] != rows["got"]
    assert max(map(len, rows.values())) < 500


def test_one_of_several_values_agrees_with_any_of_them_and_with_nothing_if_there_are_none():
    assert agree(2, OneOf([1, 2]))
    assert not agree(3, OneOf([1, 2])) and not agree(None, OneOf([]))


def test_a_claim_about_many_numbers_tells_the_first_that_is_wrong():
    ours, theirs = torch.zeros(50), torch.zeros(50)
    theirs[40] = torch.nan
    with pytest.raises(Wrong) as told:
        hold([Claim("numbers", theirs, ours, "nan is no number")])
    assert told.value.rows["got"].startswith("from number 40: nan")
    sparse = plain(torch.eye(2).to_sparse())  # no verdict could show it
    assert sparse == "a tensor with the layout torch.sparse_coo"


@pytest.mark.parametrize(
    "question", list(questions()), ids=lambda question: question.title
)
def test_every_question_has_enough_answers_to_be_tried_on_and_hints(question):
    mine = [
        c
        for c in mutants.CANDIDATES
        if (c.lesson, c.question) == (question.lesson, question.name)
    ]
    assert sum(c.pattern is None for c in mine) >= 2
    assert sum(c.pattern is not None for c in mine) >= 4
    assert len(question.hints) >= 2 and inspect.getdoc(question)


@pytest.mark.parametrize("title", made.EQUIVALENT)
def test_a_change_that_is_listed_as_none_can_be_made_of_todays_answer(title):
    """Their names have numbers of lines, which move."""
    number, name = title.split()
    [task] = [task for task in exercises.questions_of(number) if task.name == name]
    ours = exercises.answer_of(task.cell.source)
    changes = [*made.with_nan(ours, task.names), *made.changes(ours)]
    assert set(made.EQUIVALENT[title]) <= {what for what, _ in changes}


def imported(text):
    """The modules of ddp_course.checks that a file imports, as `ex04.recorded`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("ddp_course.checks"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name.removeprefix("ddp_course.checks.") for name in names)


def other_exercises(path, text):
    """The imports of a file in checks/ from exercises other than its own."""
    own = path.relative_to(CHECKS).parts[0].removesuffix(".py")
    for name in imported(text):
        if re.match(r"ex\d\d", name) and name.split(".")[0] != own:
            yield name


CHECKS = Path(checks.__path__[0])


@pytest.mark.parametrize(
    "path", sorted(CHECKS.rglob("*.py")), ids=lambda path: path.name
)
def test_no_exercise_imports_another_and_what_they_share_imports_none(path):
    text = path.read_text()
    assert not list(other_exercises(path, text))
    planted = f"{text}\nfrom ddp_course.checks.ex99 import check_x\n"
    assert list(other_exercises(path, planted)) == ["ex99.check_x"]


@pytest.mark.parametrize("name", EXERCISES)
def test_a_question_knows_its_exercise_wherever_in_it_it_is_defined(name):
    number = name.removeprefix("ex")
    for question in hints.questions(number).values():
        assert question.lesson == number
        assert question.title == f"{number} {question.name}"
        module = importlib.import_module(f"ddp_course.checks.{name}")
        assert getattr(module, f"check_{question.name}") is question
