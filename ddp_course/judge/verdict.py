"""A verdict on an answer, in words: what was tried, on which rank, what came of it, and the
likely cause.
"""

import os
import textwrap
from dataclasses import dataclass

import torch

from ddp_course.judge import boxes

PASSED, FAILED, NOT_ATTEMPTED = "passed", "failed", "not attempted"
RAISED, TIMED_OUT, GRADER_ERROR = (
    "your code raised",
    "timed out",
    "the grader's own error",
)
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


class NotPassed(Exception):
    """Fails the check's cell where nobody reads it: under nbval, papermill, nbconvert."""

    def _render_traceback_(self):
        """IPython's hook: the verdict is above, and our frames explain nothing."""
        return [f"NotPassed: {self}"]


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
