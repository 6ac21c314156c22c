"""Judges all answers of an exercise that the tests know, in one process.

python tests/judge_mutants.py 03
python tests/judge_mutants.py 03 bucketed traffic --seed 7
python tests/judge_mutants.py 03 --made

--made: those that a program makes of our own answers, see mutants/made.py; one that passes
is a hole in a check. Exit code 1 if a verdict is not as it should be.
"""

import argparse
import importlib
import re
import sys
import time

import mutants
from mutants import made

from ddp_course.cli import exercises
from ddp_course.judge.answer import Source
from ddp_course.judge.verdict import GRADER_ERROR, PASSED
from ddp_course.ranks.launch import launch, start_server


def known(number, names):
    """(question, name, answers, what must be so) of each answer in mutants/exNN.py."""
    importlib.import_module(f"mutants.ex{number}")
    for candidate in mutants.CANDIDATES:
        if candidate.question in names:
            yield (
                candidate.question,
                candidate.name,
                candidate.answers,
                as_said(candidate),
            )


def as_said(candidate):
    """A function that says whether a verdict on this answer is right."""

    def is_right(verdict):
        if candidate.pattern is None:
            return verdict.status == PASSED
        fits = re.fullmatch(candidate.status, verdict.status)
        return fits and re.search(candidate.pattern, str(verdict))

    return is_right


def changed(number, names):
    """The same of each answer that made.py makes."""
    for task in exercises.questions_of(number):
        if task.name in names:
            own = made.EQUIVALENT.get(f"{number} {task.name}", {})
            ours = exercises.answer_of(task.cell.source)
            for what, text in [*made.with_nan(ours, task.names), *made.changes(ours)]:
                if what not in own:
                    sources = [Source(name, task.preamble, text) for name in task.names]
                    yield task.name, what, sources, fails


def fails(verdict):
    return verdict.status not in (PASSED, GRADER_ERROR)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("number", help="of the exercise, 03")
    parser.add_argument("names", nargs="*", help="of questions (all)")
    parser.add_argument("--seed", type=int, help="of the checks' choices (drawn)")
    parser.add_argument("--made", action="store_true", help="made by a program")
    args = parser.parse_intermixed_args()
    number = args.number.zfill(2)
    module = importlib.import_module(f"ddp_course.checks.ex{number}")
    every = [task.name for task in exercises.questions_of(number)]
    if unknown := set(args.names) - set(every):
        parser.error(f"exercise {number} has no {min(unknown)}: {', '.join(every)}")
    start_server(*exercises.preloads(exercises.notebooks("solutions")[number]))
    launch(int)  # waits until the server has imported that
    wrong, count, begin = [], 0, time.monotonic()
    answers = (changed if args.made else known)(number, args.names or every)
    for question, name, objects, is_right in answers:
        since, count = time.monotonic(), count + 1
        check = getattr(module, f"check_{question}")
        verdict = check.judge(*objects, seed=args.seed)
        told = "ok  " if is_right(verdict) else "HOLE" if args.made else "BAD "
        seconds = time.monotonic() - since
        print(
            f"{told} {seconds:5.1f} s  {question}  {name}  [{verdict.status}]",
            flush=True,
        )
        if not is_right(verdict):
            wrong.append(name)
            if verdict.status != PASSED:
                print(verdict, flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{count} answers, {len(wrong)} not as they should be, {minutes:.1f} minutes")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
