"""What is graded: one answer to one question, of one submission."""

import hashlib
from typing import NamedTuple

from ddp_course import UsageError
from ddp_course.cli import exercises
from ddp_course.cli.grading import handed_in


class Job(NamedTuple):
    """One answer to grade. written: an exercises.Written, or None; damage: why the
    notebook could not be read, a line, or "".
    """

    submission: str
    number: str
    task: exercises.Task
    written: exercises.Written | None
    damage: str

    @property
    def title(self):
        return f"{self.number} {self.task.name}"

    @property
    def digest(self):
        """What tells whether the answer has changed since a grading."""
        text = repr((self.written, self.damage))
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def jobs_in(path):
    """The Jobs of all submissions under a path: {submission: [Job, ...]}."""
    references = exercises.notebooks("solutions")
    if not references:
        raise UsageError(
            "the course's solutions/ are not here: run this in the course's folder"
        )
    jobs = {}
    for submission, notebooks in handed_in.submissions(path).items():
        jobs[submission] = []
        for number, file in notebooks.items():
            tasks, written, damage = exercises.questions_of(number), {}, ""
            try:
                written = exercises.answer_cells(handed_in.read(file), tasks)
            except UsageError as error:
                damage = str(error)
            for task in tasks:
                answer = written.get(task.cell.id)
                jobs[submission].append(Job(submission, number, task, answer, damage))
    return jobs
