"""Hints: finding the question that a person means, its next hint, and the magic
`%hint`.
"""

import html
import importlib
import pkgutil
import re

from ddp_course import UsageError
from ddp_course.folders import PACKAGE
from ddp_course.judge import boxes, progress

COLOR = "56, 139, 253"


def next_hint(number, wanted=""):
    """The next stronger hint on a question of an exercise, as (title, text).

    wanted: the question, as `find_question` takes it; without it, the first question
    that has not passed. Raises UsageError if there is no such question.
    """
    number = number.zfill(2)
    found = questions(number)
    name = find_question(number, wanted, found) if wanted else first_open(number, found)
    question = found[name]
    before = progress.load().get(question.title, {}).get("hints", 0)
    most = len(question.hints)
    given = progress.count_hint(question.title, most)
    title = f"{question.title}, hint {given} of {most}"
    if before >= most:
        title += " again (there are no more)"
    elif given == most:
        title += " (the last one)"
    return title, question.hints[given - 1]


def questions(number):
    """The Questions of an exercise, {name: Question}, in the order of its notebook.
    Raises UsageError if there is no such exercise.
    """
    from ddp_course.judge.question import Question

    names = [module.name for module in pkgutil.iter_modules([PACKAGE / "checks"])]
    numbers = [name[2:] for name in names if re.fullmatch(r"ex\d\d", name)]
    if number not in numbers:
        raise UsageError(
            f"there is no exercise {number}: choose one of {', '.join(numbers)}"
        )
    module = importlib.import_module(f"ddp_course.checks.ex{number}")
    defined = [
        getattr(module, name) for name in getattr(module, "__all__", vars(module))
    ]
    return {thing.name: thing for thing in defined if isinstance(thing, Question)}


def find_question(number, wanted, names):
    """The name that a person means by its place, counted from 1, its first letters, or
    any part of it. Case, spaces and `-` do not matter. Raises UsageError.
    """
    names, short = list(names), _plain(wanted)
    if short.isdecimal() and 1 <= int(short) <= len(names):
        return names[int(short) - 1]
    for fits in (str.__eq__, str.startswith, str.__contains__):
        matching = [name for name in names if short and fits(_plain(name), short)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise UsageError(
                f"exercise {number} has several questions that match {wanted}: "
                f"choose one of {', '.join(matching)}"
            )
    raise UsageError(
        f"exercise {number} has no question {wanted}: choose one of "
        f"{', '.join(names)}, or 1 to {len(names)}"
    )


def _plain(name):
    """A name in lower case, with letters and digits only."""
    return re.sub(r"[\W_]+", "", name).casefold()


def first_open(number, names):
    """The first of an exercise's questions that has not passed. Raises UsageError if
    all have passed.
    """
    done = progress.load()
    for name in names:
        if not done.get(f"{number} {name}", {}).get("passed"):
            return name
    raise UsageError(
        f"all questions of exercise {number} have passed: for a hint, choose one of "
        f"{', '.join(names)}"
    )


def register():
    """Give a notebook the line magic `%hint`."""
    if boxes.shell():
        boxes.shell().register_magic_function(hint)


def hint(line):
    """The next hint on a question, a stronger one each time.

    %hint               on the first question here that has not passed
    %hint ring          on a question of this notebook's exercise; %hint 3: on its third
    %hint 02 ring       on a question of exercise 2; %hint 02: on its first open one
    """
    from ddp_course.judge.question import Question

    number, words = Question.latest, line.split()
    if words and words[0].isdecimal() and (len(words) > 1 or len(words[0]) == 2):
        number = words.pop(0)
    try:
        title, text = next_hint(number or "", " ".join(words))
    except (
        UsageError
    ) as error:  # not an exception, because "Run All" should not stop here
        print(error)
        return
    body = f"<div>{html.escape(text)}</div>"
    boxes.show(f"{title}: {text}", boxes.box(title, body, COLOR))
