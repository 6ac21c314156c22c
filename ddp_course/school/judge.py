"""How an answer is judged: on real ranks, in bounded time, with a verdict in words.

The learner's code never runs in the judging process. It is sent to the ranks; what they
observe comes back as plain numbers and is compared here. An answer that exits, hangs or
forks affects only its own ranks.
"""

import functools
import importlib.abc
import importlib.machinery
import io
import json
import linecache
import os
import random
import re
import secrets
import sys
import tempfile
import textwrap
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import torch

from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout, launch_untrusted
from ddp_course.school import boxes, progress, sandbox
from ddp_course.school.cells import run_everything, run_what_defines
from ddp_course.school.cleaning import remove

PASSED, FAILED, NOT_ATTEMPTED = "passed", "failed", "not attempted"
RAISED, TIMED_OUT, GRADER_ERROR = (
    "your code raised",
    "timed out",
    "the grader's own error",
)
# environment variables that the grader sets: the file for the verdict, the seed of the
# checks' random choices, and a factor for their time limits
VERDICT, SEED, PATIENCE = (
    f"DDP_COURSE_{name}" for name in ("VERDICT", "SEED", "PATIENCE")
)
MOST_TEXT = 10_000  # characters of a row that a grader keeps
COLORS = {PASSED: "46, 160, 67", FAILED: "248, 81, 73", NOT_ATTEMPTED: "140, 140, 140"}


class Wrong(Exception):
    """A wrong answer, explained as a teacher would.

    checked: what was tried; rank: where it went wrong, e.g. "1 of 3"; expected, got:
    values or words; cause: the likely mistake, a sentence.
    """

    def __init__(self, checked, *, cause, rank=..., expected=..., got=...):
        rows = {
            "checked": checked,
            "on rank": rank,
            "expected": expected,
            "got": got,
            "likely cause": cause,
        }
        super().__init__(cause)
        self.rows = {
            name: _short(value) for name, value in rows.items() if value is not ...
        }
        if expected is not ... and self.rows["expected"] == self.rows.get("got"):
            self.rows |= _told_apart(expected, got)


@dataclass(frozen=True)
class Verdict:
    """The result of a check. status: one of the six above; rows: the explanation,
    {name: text}; hints: those that it offers; picture: a picture to show with it, the
    name of a function of ddp_course.notebook.plots and its arguments.
    """

    question: str
    status: str
    rows: dict
    hints: tuple = ()
    picture: tuple | None = None

    def __str__(self):
        lines, rows = [f"{self.question}: {self.status}"], dict(self.rows)
        if self.hints:
            rows["for a hint"] = (
                f"%hint {self.question}; in a terminal: ddp-course hint {self.question}"
            )
        for name, text in rows.items():
            lines.append(
                textwrap.indent(f"{name:<14}{text}", "  ").replace(
                    "\n", "\n" + " " * 14
                )
            )
        return "\n".join(lines)

    def to_html(self):
        """A box with the verdict, and with the hints folded away."""
        color = COLORS.get(self.status, "210, 153, 34")
        rows = boxes.table(self.rows, prose=("checked", "likely cause"))
        title = f"{self.question}: {self.status}"
        return boxes.box(title, rows + boxes.folded(self.hints), color)

    def show(self):
        """Display the verdict, and then its picture if a person is reading. In a
        notebook that nobody reads, raise NotPassed instead of a picture.
        """
        from ddp_course.notebook.reader import reader_is_there

        boxes.show(str(self), self.to_html())
        if reader_is_there():
            if self.picture:
                from ddp_course.notebook import plots

                name, arguments = self.picture
                getattr(plots, name)(**arguments)
        elif self.status != PASSED and hasattr(boxes.shell(), "kernel"):
            raise NotPassed(str(self))


class Question:
    """One question of an exercise: called with the learner's functions or classes, it
    checks them and shows the verdict.
    """

    latest = None  # the exercise whose questions were defined or called last: "03"

    def __init__(self, body, hints):
        self.body, self.hints = body, hints
        self.lesson = Question.latest = re.search(r"\bex(\d\d)", body.__module__)[1]
        self.name = body.__name__.removeprefix("check_")
        self.title = f"{self.lesson} {self.name}"
        functools.update_wrapper(self, body)

    def __call__(self, *objects, seed=None):
        Question.latest = self.lesson
        graded = os.environ.get(VERDICT)
        if graded:  # the verdict if the answer ends this process
            rows = {"where": "your code ended, or held up, the process that judges it"}
            Path(graded).write_text(json.dumps({"status": RAISED, "rows": rows}))
        verdict = self.judge(*objects, seed=seed)
        if graded:
            rows = {name: text[:MOST_TEXT] for name, text in verdict.rows.items()}
            Path(graded).write_text(
                json.dumps({"status": verdict.status, "rows": rows})
            )
        else:
            progress.record(verdict)
        verdict.show()

    def judge(self, *objects, seed=None):
        """The Verdict on these answers. seed: of the check's random choices; a failing
        verdict shows it.
        """
        if seed is None:
            seed = int(os.environ.get(SEED, secrets.randbelow(10**6)))
        answer = None
        try:
            answer = Answer(objects)
            with one_thread():
                picture = self.body(answer, random.Random(seed))
            return Verdict(self.title, PASSED, {}, picture=picture)
        except Wrong as wrong:
            status, rows = FAILED, wrong.rows
        except RankTimeout as late:
            status, rows = TIMED_OUT, {"where": _where_they_were(str(late))}
            rows["likely cause"] = _cause_of_waiting(rows["where"])
        except RankError as error:
            if (
                error.message.split("\n")[0] == "NotImplementedError"
            ):  # torch raises it, too, with a better message
                return Verdict(self.title, NOT_ATTEMPTED, {}, self.hints)
            status, rows = RAISED, {"where": _without_our_frames(str(error))}
            for text, cause in KNOWN_ERRORS.items():
                if text in error.message:
                    rows["likely cause"] = cause
        except CannotBeSent as error:
            status, rows = RAISED, {"where": str(error)}
        except Exception:
            status = GRADER_ERROR
            rows = {
                "where": traceback.format_exc(),
                "likely cause": "a mistake in the course, not yours",
            }
        if answer and answer.printed and status != GRADER_ERROR:
            rows["printed"] = "\n".join(
                line[:200] for line in answer.printed.splitlines()[-5:]
            )
        rows["to repeat"] = (
            f"checks.ex{self.lesson}.check_{self.name}(..., seed={seed})"
        )
        return Verdict(
            self.title, status, rows, () if status == GRADER_ERROR else self.hints
        )


@contextmanager
def one_thread():
    """Let torch compute with one thread here: with so little work, more threads only
    wait.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without_our_frames(story):
    """A rank's traceback without the lines that load an answer or watch its
    communication.
    """
    ours = re.compile(
        r"ddp_course/(school/(judge|cells)\.py, line|\S+\.py, line \d+, in __torch_dispatch__)"
    )
    return "\n".join(line for line in story.splitlines() if not ours.search(line))


def _where_they_were(story):
    """Where each rank was at a timeout. The barrier of our own observers is described in
    words.
    """
    return re.sub(
        r"was in torch/distributed/\S+, line \d+, in barrier: .*", FINISHED, story
    )


FINISHED = "had done its part, and waited for the others"


def _cause_of_waiting(where):
    """The likely cause of a timeout, from where each rank was."""
    places = re.findall(r"(?m)^\s*rank \d+ (.*)", where)
    if places and all(re.search(r"\bsend\(", place) for place in places):
        return "all ranks send, and nobody receives: isend only begins to send; receive, and then wait for it"
    if places and all(re.search(r"\brecv\(", place) for place in places):
        return (
            "all ranks wait for a message that does not come: does somebody send first? "
            + FORGOTTEN
        )
    if places and all(place == FINISHED for place in places):
        return (
            "all calls have returned, but an operation that they started has not ended. "
            + FORGOTTEN
        )
    cause = "some rank waits for another that does not come, or a loop does not end"
    if len(places) == 1 and not re.search(r"torch/distributed", where):
        return "a loop does not end, or each round of it takes too long"
    return f"{cause}. {FORGOTTEN}" if re.search(r"\b(send|recv)\(", where) else cause


FORGOTTEN = "After isend or irecv, keep the work that it returns and call its wait(): without that, nothing may come"


KNOWN_ERRORS = {
    "cannot register a hook on a tensor that doesn't require gradient": "a frozen parameter cannot have a hook: "
    "check requires_grad first",
    "but got <class 'NoneType'> instead": "parameter.grad is None without a gradient, as for a frozen parameter: skip "
    "it. (In a hook: register_hook runs before the gradient is stored, register_post_accumulate_grad_hook after.)",
    "File too large": "more than 64 MB were printed, or written to a file: does it print without end?",
    "SIGABRT": "two ranks brought tensors of different sizes to a collective or a message: gloo then aborts",
    **dict.fromkeys(
        SYMPTOMS,
        "another rank has left, or is in another call, while this one waited for it: do all ranks call the same "
        "collectives?",
    ),
    "iter() returned non-iterator": "__iter__ must return an iterator: for a list, return iter(the_list)",
    "can require gradients": "a weight that is packed into integers cannot have a gradient: check "
    "value.is_floating_point()",
    "trying to initialize the default process group twice": "the check has already joined the process group: do not "
    "call init_process_group",
}


def question(*hints):
    """Make `check_x(answer, draw)` a Question. hints: of rising strength; the last
    nearly gives it away.

    answer: an Answer. draw: a random.Random, for shapes, seeds and numbers of ranks.
    The body raises Wrong, or returns: None, or a picture of what the answer did, for
    Verdict.
    """
    return lambda body: Question(body, hints)


class NotPassed(Exception):
    """Fails the check's cell where nobody reads it: under nbval, papermill, nbconvert."""

    def _render_traceback_(self):
        """IPython's hook: the verdict is above, and our frames explain nothing."""
        return [f"NotPassed: {self}"]


class CannotBeSent(Exception):
    """An answer that cannot be sent to the ranks, such as one with an open file."""


class Answer:
    """The learner's objects, packed for the ranks. This process never calls or unpacks
    them.
    """

    def __init__(self, objects):
        self.printed = ""
        for thing in objects:
            if isinstance(thing, Source):
                thing.remember_lines()
        try:
            self.payload = cloudpickle.dumps(objects)
        except Exception as error:
            raise CannotBeSent(
                f"your code cannot be sent to the ranks: {error}"
            ) from None

    def on_ranks(self, observe, *args, nproc=1, timeout=6):
        """Call `observe(*learner's objects, *args)` on ranks; return what each
        returned, plain values in rank order.

        observe: a function of the check's module, which runs the answer and returns
        what it observed.
        """
        call = (_on_a_rank, self.payload, by_value((observe, args)), shown())
        return self._launch(*call, nproc=nproc, timeout=timeout)

    def without(self, work, *args, nproc=1, timeout=6):
        """Call `work(*args)` on ranks without the learner's objects; return what each
        returned. What an answer predicts is measured where it has never been.
        """
        call = (_apart, by_value((work, args)))
        return self._launch(*call, nproc=nproc, timeout=timeout)

    def apart(self, work, *args, timeout=20):
        """The same in one rank; return its value.

        It is in the sandbox, where there is one. This process opens no file that an
        answer could have made or replaced by a link: it has such work done apart.
        """
        return self.without(work, *args, timeout=timeout)[0]

    @contextmanager
    def folder(self):
        """An empty folder for the files of several calls, a Path, for the ranks only."""
        path = self.apart(tempfile.mkdtemp)
        try:
            yield Path(path)
        finally:
            with suppress(RankError):  # the answer has ended all that was there
                self.apart(remove, path)

    def files(self, folder):
        """What is in a folder of the ranks, {name: bytes}; links are followed."""
        return self.apart(sizes_in, str(folder))

    def _launch(self, *call, nproc, timeout):
        timeout *= float(os.environ.get(PATIENCE, 1))
        if sandbox.settings():
            try:
                results, printed = sandbox.launch_inside(
                    *call, nproc=nproc, timeout=timeout
                )
            except sandbox.Printed as failed:
                self.printed += failed.printed
                raise failed.error from None
            self.printed += printed
            return results
        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(output):
                return launch_untrusted(*call, nproc=nproc, timeout=timeout)
        finally:
            self.printed += output.getvalue()


@contextmanager
def trying(case):
    """For an observer that tests an answer on several cases: an error inside the block
    names its case.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {case})")
        raise


CHECKS = "ddp_course.checks"  # the package; school imports nothing of it


def by_value(work):
    """A pickle that brings the checks' functions and classes along, with what they refer
    to. A rank imports nothing of the checks: it has what observes, not what judges.
    """
    checks = sys.modules[CHECKS]
    cloudpickle.register_pickle_by_value(checks)
    try:
        return cloudpickle.dumps(work)
    finally:
        cloudpickle.unregister_pickle_by_value(checks)


def shown():
    """What exercises show of their checks besides questions and functions, such as the
    words for an answer: {module: {name: value}}.
    """
    found = {}
    for own_name, module in list(sys.modules.items()):
        if own_name.startswith(f"{CHECKS}.ex"):
            values = {
                name: getattr(module, name) for name in vars(module).get("__all__", ())
            }
            data = (str, int, float, tuple, list, dict)
            found[own_name] = {
                name: value for name, value in values.items() if isinstance(value, data)
            }
    return found


class NoChecks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in a rank for all modules of the checks: nothing is in them that an answer
    could return as its own. The course's own cells import them, so there are some.
    """

    quiet = False  # whether the course's own cells run, which may show something

    def __init__(self, data):
        self.data = data

    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(f"{CHECKS}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module):
        def nothing(name):
            if name.startswith("__"):
                raise AttributeError(name)

            def refuse(*_, **__):
                if NoChecks.quiet:
                    return None
                where = f"{module.__name__}.{name} is not here"
                raise ImportError(f"{where}: an answer runs without the checks")

            return refuse

        vars(module).update(self.data.get(module.__name__, {}))
        module.__getattr__ = nothing


def _on_a_rank(payload, observation, data):
    torch.set_num_threads(1)  # with so little work, more threads only wait
    observe, args = cloudpickle.loads(observation)
    as_plain = plain  # what an answer puts in the place of our function changes nothing
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{CHECKS}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, NoChecks(data))
    objects = cloudpickle.loads(payload)
    objects = [
        thing.load() if isinstance(thing, Source) else thing for thing in objects
    ]
    return as_plain(observe(*objects, *args))


def _apart(pickled):
    torch.set_num_threads(1)
    work, args = cloudpickle.loads(pickled)
    return plain(work(*args))


def sizes_in(folder):
    """The files of a folder and what else is in it, {name: bytes}, by name."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    return {entry.name: size_of(entry) for entry in entries}


def size_of(entry):
    """The bytes of a directory entry; of a link that leads nowhere, those of the link."""
    try:
        return entry.stat().st_size
    except OSError:
        return entry.stat(follow_symlinks=False).st_size


def plain(value):
    """A copy of a value that consists of tensors, numbers, texts, lists, tuples and
    dicts, without any code.
    """

    def copy(value):  # it calls itself: a module's name could be given another meaning
        if value is None or type(value) is bool:
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, np.generic):  # np.int64(3), which is no int
            return copy(value.item())
        if isinstance(value, torch.Tensor):
            detached = torch.Tensor.clone(torch.Tensor.detach(value))
            return detached.as_subclass(torch.Tensor)
        if isinstance(value, list | tuple):
            return [copy(item) for item in value]
        if isinstance(value, dict):
            return {copy(name): copy(item) for name, item in value.items()}
        return f"a {type(value).__name__}"

    return copy(value)


@dataclass(frozen=True)
class Source:
    """An answer as text, which only the ranks run. Submissions are graded in this form.

    preamble: the cells that the course gave before it, imports for one; cell: the
    learner's; name: what it defines; before, after: the learner's other cells, before
    this one, and between it and the check.
    """

    name: str
    preamble: str
    cell: str
    before: tuple = ()
    after: tuple = ()

    @property
    def file(self):
        return f"<answer {self.name}>"

    def remember_lines(self):
        """Let tracebacks show the lines of the answer."""
        linecache.cache[self.file] = (
            len(self.cell),
            None,
            self.cell.splitlines(keepends=True),
            self.file,
        )

    def load(self):
        """What the cell defines under the name, as a notebook would send it to the
        ranks.
        """
        namespace = {"__name__": "__main__"}
        with redirect_stdout(io.StringIO()):  # what the learner printed counts
            NoChecks.quiet = True
            run_everything(self.preamble, "<the exercise>", namespace)
            NoChecks.quiet = False
        around = (self.before, self.after)
        run_what_defines(self.name, self.cell, self.file, namespace, *around)
        if self.name not in namespace:
            raise NameError(f"the cell defines no {self.name}")
        return namespace[self.name]


def _short(value):
    """A value as a text of a few lines; of a tensor, its shape and first numbers."""
    if isinstance(value, torch.Tensor):
        numbers = ", ".join(f"{number:.4g}" for number in value.flatten()[:6].tolist())
        more = ", ..." if value.numel() > 6 else ""
        return (
            f"{numbers}{more} (shape {tuple(value.shape)})"
            if value.dim()
            else f"{numbers} (a tensor)"
        )
    return (
        textwrap.shorten(str(value), 400, placeholder=" ...")
        if "\n" not in str(value)
        else str(value)
    )


def _told_apart(expected, got):
    """The rows of two values that print alike: with all digits, from the first place
    where they differ; or else with their types.
    """
    tensors = isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)
    if tensors and expected.shape == got.shape and expected.numel():
        apart = (expected != got) & ~(expected.isnan() & got.isnan())
        different = apart.flatten().nonzero().flatten().tolist()
        if different:
            place = different[0]
            texts = [
                f"{tensor.flatten()[place].item()!r} at place {place} of the flattened "
                f"tensor, and {len(different)} of {tensor.numel()} numbers differ"
                for tensor in (expected, got)
            ]
            return dict(zip(("expected", "got"), texts))
    kinds = [
        str(getattr(value, "dtype", type(value).__name__)) for value in (expected, got)
    ]
    texts = [str(expected), str(got)]
    if texts[0] != texts[1]:
        place = len(os.path.commonprefix(texts))
        begin = max(0, place - 60)
        texts = [f"{'... ' * bool(begin)}{text[begin : place + 100]}" for text in texts]
    elif kinds[0] != kinds[1]:
        texts = [f"{_short(text)} ({kind})" for text, kind in zip(texts, kinds)]
    else:
        return {"expected": _short(expected), "got": "something that prints alike"}
    return dict(zip(("expected", "got"), texts))
