"""The failures that no lesson shows: a program each in lessons/failures/.

A program's docstring has a fixed form. The first line is what was done wrong; then come
fields, each a word with a colon, whose text may go on in the next lines:

    Run      the command that shows the error, or `not here` and the reason
    Text     the error's line, … for what is different in each run; more lines of the
             same failure, as other versions or other ranks print it, in more fields
    Cause    why it happens
    Which    how to see that it is this cause, where other failures have the same text
    Fix      what to do
    Lesson   the number of the lesson that explains it
    Source   where people have met it

The output of the program is stored beside it, in NAME.txt.
"""

import ast
import re
from typing import NamedTuple

FIELD = re.compile(r"(Run|Text|Cause|Which|Fix|Lesson|Source): +")


class Program(NamedTuple):
    """A failure, and the program that shows it."""

    stem: str  # the file's name
    name: str  # what was done wrong
    run: str
    texts: list
    cause: str
    which: str
    fix: str
    lesson: str  # "04"
    sources: list
    code: str  # "" if it is not run here
    output: str

    @property
    def slug(self):
        """The name of its page."""
        return self.stem.replace("_", "-")

    @property
    def title(self):
        return self.texts[0]

    @property
    def runs(self):
        """Whether the program shows the error on a machine without a GPU."""
        return not self.run.startswith("not here")


def failures_in(folder):
    """The failures of lessons/failures/, in the order of their lessons."""
    found = [program_of(path) for path in sorted(folder.glob("*.py"))]
    return sorted(found, key=lambda failure: failure.lesson)


def program_of(path):
    """The failure that a program shows. Raises ValueError if a field is missing."""
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    name, fields = fields_of(docstring)
    missing = {"Run", "Text", "Cause", "Fix", "Lesson", "Source"} - fields.keys()
    if missing or not name:
        raise ValueError(f"{path.name}: no {', '.join(sorted(missing)) or 'name'}")
    output = path.with_suffix(".txt")
    return Program(
        path.stem,
        name,
        fields["Run"][0],
        fields["Text"],
        fields["Cause"][0],
        fields.get("Which", [""])[0],
        fields["Fix"][0],
        fields["Lesson"][0].zfill(2),
        fields["Source"],
        text.partition('"""')[2].partition('"""')[2].strip(),
        output.read_text(encoding="utf-8") if output.exists() else "",
    )


def fields_of(docstring):
    """The first line of a docstring, and its fields, {field: texts}."""
    name, _, rest = docstring.partition("\n")
    fields, last = {}, None
    for line in rest.splitlines():
        if field := FIELD.match(line):
            last = fields.setdefault(field[1], [])
            last.append(line[field.end() :].strip())
        elif last and line.strip():
            last[-1] = f"{last[-1]} {line.strip()}"
    return name.strip(), fields
