"""Hints: found by the names that people use, given one by one, and offered by a verdict
where the learner reads it.
"""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel

from ddp_course import UsageError
from ddp_course.checks import ex02
from ddp_course.cli import exercises
from ddp_course.judge import hints, progress
from ddp_course.judge.answer import Source
from ddp_course.judge.verdict import GRADER_ERROR, Verdict

NUMBERS = sorted(exercises.notebooks("solutions"))
RING, BUGS = list(hints.questions("02")), list(hints.questions("04"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, so that the progress is nobody else's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- which question ----


@pytest.mark.parametrize("number", NUMBERS)
def test_the_questions_of_an_exercise_come_in_the_order_of_its_notebook(number):
    solution = exercises.read(exercises.notebooks("solutions")[number])
    names = [task.name for task in exercises.tasks(solution)]
    assert list(hints.questions(number)) == names


@pytest.mark.parametrize(
    "wanted",
    [
        "3",
        "ring",
        "ring_reduce",
        "Ring-Reduce-Scatter",
        "ring reduce",
        "reduce",
        " RING ",
    ],
)
def test_a_question_is_found_as_people_name_it(wanted):
    assert hints.find_question("02", wanted, RING) == "ring_reduce_scatter"


def test_a_whole_name_comes_before_first_letters_and_these_before_any_part():
    assert hints.find_question("99", "train", ["retrain", "train_all", "train"]) == (
        "train"
    )
    assert hints.find_question("99", "train", ["retrain", "train_all"]) == "train_all"
    assert hints.find_question("04", "bug 3", BUGS) == "find_the_bug_3"


@pytest.mark.parametrize("wanted", ["x", "6", "0", "-", "ringg", "3.0"])
def test_an_unknown_question_gives_one_line_with_all_choices(wanted):
    with pytest.raises(UsageError) as error:
        hints.find_question("02", wanted, RING)
    assert str(error.value) == (
        f"exercise 02 has no question {wanted}: choose one of rank_arithmetic, "
        "broadcast, ring_reduce_scatter, crossover, count_classes, or 1 to 5"
    )


def test_an_ambiguous_question_gives_one_line_with_those_that_match():
    with pytest.raises(UsageError) as error:
        hints.find_question("04", "find-the", BUGS)
    assert str(error.value) == (
        "exercise 04 has several questions that match find-the: choose one of "
        "find_the_bug_1, find_the_bug_2, find_the_bug_3"
    )


@pytest.mark.parametrize("number", ["77", "x", "../ex02", ""])
def test_an_unknown_exercise_gives_one_line(number):
    with pytest.raises(UsageError, match="there is no exercise .*: choose one of 01, "):
        hints.next_hint(number)


# ---- one after the other ----


def test_hints_grow_stronger_are_numbered_and_the_last_one_says_so():
    given = [hints.next_hint("2", "ring") for _ in range(5)]
    assert [title for title, _ in given] == [
        "02 ring_reduce_scatter, hint 1 of 3",
        "02 ring_reduce_scatter, hint 2 of 3",
        "02 ring_reduce_scatter, hint 3 of 3 (the last one)",
        "02 ring_reduce_scatter, hint 3 of 3 again (there are no more)",
        "02 ring_reduce_scatter, hint 3 of 3 again (there are no more)",
    ]
    texts = ex02.check_ring_reduce_scatter.hints
    assert tuple(text for _, text in given) == (*texts, texts[-1], texts[-1])
    assert progress.load()["02 ring_reduce_scatter"]["hints"] == 3


def test_without_a_name_the_hint_is_on_the_first_question_that_has_not_passed():
    assert hints.next_hint("02")[0] == "02 rank_arithmetic, hint 1 of 3"
    progress.record(Verdict("02 rank_arithmetic", "passed", {}))
    assert hints.next_hint("02")[0] == "02 broadcast, hint 1 of 3"
    for name in RING:
        progress.record(Verdict(f"02 {name}", "passed", {}))
    with pytest.raises(UsageError, match="all questions of exercise 02 have passed: "):
        hints.next_hint("02")
    assert hints.next_hint("02", "1")[0] == "02 rank_arithmetic, hint 2 of 3"


# ---- in the verdict ----


class Folds(HTMLParser):
    """The texts of a page by how deep they are folded away: [[unfolded], [once], ...]."""

    def __init__(self, page):
        super().__init__()
        self.depth, self.texts, self.summary = 0, [[]], False
        self.feed(page)
        assert self.depth == 0

    def handle_starttag(self, tag, attributes):
        self.summary |= tag == "summary"
        if tag == "details":
            assert not attributes or "open" not in dict(attributes)
            self.depth += 1
            self.texts += [[]] * (len(self.texts) == self.depth)

    def handle_endtag(self, tag):
        self.summary &= tag != "summary"
        self.depth -= tag == "details"

    def handle_data(self, text):
        # a summary is seen where its details are folded
        self.texts[self.depth - self.summary].append(text)


def unsolved(text="raise NotImplementedError"):
    return Source("broadcast", "", f"def broadcast(tensor):\n    {text}")


@pytest.mark.parametrize(
    "text, status",
    [("raise NotImplementedError", "not attempted"), ("1 / 0", "your code raised")],
)
def test_a_verdict_that_has_not_passed_holds_the_hints_each_folded_in_the_one_before(
    text, status
):
    verdict = ex02.check_broadcast.judge(unsolved(text))
    assert verdict.status == status
    box = Folds(verdict.to_html())
    first, second, third = ex02.check_broadcast.hints
    assert box.texts[0][0] == f"02 broadcast: {status}"
    assert box.texts[0][-1] == "Hint 1 of 3"
    assert box.texts[1:] == [
        [first, "Hint 2 of 3"],
        [second, "Hint 3 of 3 (the last one)"],
        [third],
    ]


def test_as_text_a_verdict_that_has_not_passed_says_how_to_get_a_hint():
    text = str(ex02.check_broadcast.judge(unsolved("1 / 0"), seed=7))
    *_, repeat, hint = text.splitlines()
    assert repeat == "  to repeat     checks.ex02.check_broadcast(..., seed=7)"
    assert hint == (
        "  for a hint    %hint 02 broadcast; in a terminal: ddp-course hint 02 broadcast"
    )


def test_a_passed_verdict_and_the_graders_own_error_offer_no_hints(monkeypatch):
    verdict = Verdict("02 broadcast", "passed", {})
    assert str(verdict) == "02 broadcast: passed" and "Hint" not in verdict.to_html()

    def broken(answer, draw):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(ex02.check_broadcast, "body", broken)
    verdict = ex02.check_broadcast.judge(unsolved())
    assert verdict.status == GRADER_ERROR
    assert "Hint" not in verdict.to_html() and "%hint" not in str(verdict)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_box_of_a_passed_verdict_is_the_one_that_the_solutions_store(number):
    """By it, nbval decides and grades are given."""
    solution = exercises.read(exercises.notebooks("solutions")[number])
    for task in exercises.tasks(solution):
        [stored] = task.check.outputs
        verdict = Verdict(f"{number} {task.name}", "passed", {})
        assert stored.data["text/html"] == verdict.to_html()
        assert stored.data["text/plain"] == str(verdict)


# ---- in a kernel ----


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Run a cell in a kernel: its messages, and what they display, text and HTML."""
    folder = tmp_path_factory.mktemp("kernel")
    manager, client = start_new_kernel(cwd=str(folder))

    def run(cell, reader=False):
        messages = []
        client.execute_interactive(
            cell, allow_stdin=reader, output_hook=messages.append, timeout=600
        )
        contents = [message["content"] for message in messages]
        shown = [content["data"] for content in contents if "data" in content]
        return SimpleNamespace(
            shown=shown,
            texts=[data.get("text/plain", "") for data in shown],
            said="".join(content.get("text", "") for content in contents),
            errors=[content["evalue"] for content in contents if "evalue" in content],
        )

    yield run
    client.stop_channels()
    manager.shutdown_kernel()


def test_the_magic_gives_hints_on_the_exercise_imported_or_checked_last(kernel):
    assert kernel("import ddp_course.checks.ex02").errors == []
    first, second = kernel("%hint ring"), kernel("%hint 3")
    assert first.texts == [
        f"02 ring_reduce_scatter, hint 1 of 3: {ex02.check_ring_reduce_scatter.hints[0]}"
    ]
    assert second.texts[0].startswith("02 ring_reduce_scatter, hint 2 of 3: ")
    assert "hint 2 of 3" in second.shown[0]["text/html"]
    assert kernel("%hint").texts[0].startswith("02 rank_arithmetic, hint 1 of 3: ")
    assert kernel("%hint 3 over").texts[0].startswith("03 overlapped, hint 1 of 3: ")

    # importing exercise 7 makes it the one meant, until exercise 2 is checked again
    assert kernel("import ddp_course.checks.ex07").errors == []
    assert kernel("%hint").texts[0].startswith("07 plan, hint 1 of 3: ")
    checked = kernel("ddp_course.checks.ex02.check_rank_arithmetic(None, None)")
    assert checked.texts[0].startswith("02 rank_arithmetic: ")
    assert kernel("%hint").texts[0].startswith("02 rank_arithmetic, hint 2 of 3: ")
    assert kernel("%hint 03").texts[0].startswith("03 average_gradients, hint 1 of 3: ")


def test_what_the_magic_cannot_find_it_says_in_one_line(kernel):
    kernel("import ddp_course.checks.ex02")
    for cell, line in [
        ("%hint x", "exercise 02 has no question x: choose one of rank_arithmetic, "),
        ("%hint 77", "there is no exercise 77: choose one of 01, "),
        ("%hint 04 bug", "exercise 04 has several questions that match bug: "),
    ]:
        done = kernel(cell)
        assert done.said.startswith(line) and done.said.count("\n") == 1, done.said
        assert not done.shown and not done.errors


# ---- the picture after a pass ----

PARTS = """
import torch, torch.distributed as dist

def broadcast(tensor):
    rank, n, have = dist.get_rank(), dist.get_world_size(), 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2

def ring_reduce_scatter(tensor, lengths):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(tensor.clone().split(lengths))
    for step in range(n - 1):
        mine, coming = pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n]
        came = torch.empty_like(coming)
        BEGIN
        coming += came
    return pieces[rank]
"""
SEND_FIRST = """work = dist.isend(mine, (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()"""
RECEIVE_FIRST = """works = [dist.irecv(came, (rank - 1) % n),
                 dist.isend(mine, (rank + 1) % n)]
        [work.wait() for work in works]"""
IN_TURN = """if rank % 2:
            dist.recv(came, (rank - 1) % n)
            dist.send(mine, (rank + 1) % n)
        else:
            dist.send(mine, (rank + 1) % n)
            dist.recv(came, (rank - 1) % n)"""


def drawn(check, name, begin=SEND_FIRST):
    verdict = check.judge(Source(name, "", PARTS.replace("BEGIN", begin)), seed=3)
    assert verdict.status == "passed", str(verdict)
    picture, arguments = verdict.picture
    assert picture == "messages"
    return arguments["messages"], arguments["ranks"]


def test_a_passed_broadcast_gives_its_messages_in_rounds():
    messages, n = drawn(ex02.check_broadcast, "broadcast")
    assert n in (5, 6)
    sent = [(each["round"], each["source"], each["target"]) for each in messages]
    pairs = [(1, 0, 1), (2, 0, 2), (2, 1, 3), (3, 0, 4), (3, 1, 5)]
    assert sent == [pair for pair in pairs if pair[2] < n]
    assert len({each["bytes"] for each in messages}) == 1 and messages[0]["bytes"] > 0


@pytest.mark.parametrize("begin", [SEND_FIRST, RECEIVE_FIRST], ids=["send", "receive"])
def test_a_passed_ring_gives_a_message_of_each_rank_in_each_round(begin):
    messages, n = drawn(ex02.check_ring_reduce_scatter, "ring_reduce_scatter", begin)
    assert [(each["round"], each["source"], each["target"]) for each in messages] == [
        (round, rank, (rank + 1) % n) for round in range(1, n) for rank in range(n)
    ]
    assert len({each["bytes"] for each in messages}) == 1


def test_a_ring_in_which_ranks_wait_for_each_other_takes_more_rounds():
    messages, n = drawn(ex02.check_ring_reduce_scatter, "ring_reduce_scatter", IN_TURN)
    assert max(each["round"] for each in messages) > n - 1


def test_after_a_pass_a_reader_sees_the_messages_and_nbval_does_not(kernel):
    kernel("import ddp_course.checks.ex02 as ex02\n" + PARTS.replace("BEGIN", "pass"))
    alone = kernel("ex02.check_broadcast(broadcast)")
    assert alone.texts == ["02 broadcast: passed"] and alone.errors == []
    read = kernel("ex02.check_broadcast(broadcast)", reader=True)
    assert read.texts[0] == "02 broadcast: passed" and read.errors == []
    assert len(read.shown) > 1
    assert any(re.search(r"image/|text/html", kind) for kind in read.shown[1]), (
        read.shown
    )
