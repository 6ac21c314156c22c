"""An answer on its way to the ranks, and what they observe of it on its way home.

The learner's code never runs in the judging process. It is sent to the ranks; what they
observe comes back as plain numbers and is compared here. An answer that exits, hangs or
forks affects only its own ranks.
"""

import importlib.abc
import importlib.machinery
import io
import linecache
import os
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch

from ddp_course.judge import sandbox
from ddp_course.judge.cells import run_everything, run_what_defines
from ddp_course.judge.cleaning import remove
from ddp_course.judge.known_errors import some_rank_has_not_begun
from ddp_course.judge.values import plain
from ddp_course.ranks.launch import RankError, RankTimeout, launch_untrusted
from ddp_course.ranks.variables import PATIENCE


class CannotBeSent(Exception):
    """An answer that cannot be sent to the ranks, such as one with an open file."""


class TooBusy(Exception):
    """The machine is: a rank has not begun with the answer, which nobody can judge then."""


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
        """Launch ranks; once more, where some of them did not come so far as to begin."""
        for _ in range(2):
            try:
                return self._once(*call, nproc=nproc, timeout=timeout)
            except RankTimeout as late:
                if not some_rank_has_not_begun(str(late)):
                    raise
        raise TooBusy

    def _once(self, *call, nproc, timeout):
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


CHECKS = "ddp_course.checks"  # the package, which the judge does not import


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


MISSING = "the cell defines no"


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
            raise NameError(f"{MISSING} {self.name}")
        return namespace[self.name]
