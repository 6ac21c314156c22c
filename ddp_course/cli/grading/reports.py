"""What comes of a grading: lines and tables, a CSV file, a page for each person."""

import csv
import io
import textwrap

from ddp_course.judge.verdict import PASSED


def score(points, most):
    """A submission's total in words."""
    return f"{points:g} of {most:g}" if most else "nothing handed in"


def results_of(report, submission):
    """Yield (number, question, result) for each question of a submission."""
    for number, results in report["submissions"][submission].items():
        for name, result in results.items():
            yield number, name, result


def reason(result):
    """Why a question has not passed, in one line."""
    details = result["details"]
    why = details.get("likely cause") or details.get("where", "")
    return " ".join(why.split())


def harmless(text):
    """What an answer has said as text that any terminal and file can take: without
    escape sequences, and without halves of characters.
    """
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t"
        else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def in_cell(text):
    """A text as it can stand in a cell of a Markdown table."""
    signs = {letter: f"\\{letter}" for letter in "\\|`["}
    signs |= {"&": "&amp;", "<": "&lt;"}
    return "".join(signs.get(letter, letter) for letter in text[:200])


def markdown(report):
    """The report as Markdown, for a page of CI."""
    return "\n".join(page(report, submission) for submission in report["totals"])


def page(report, submission):
    """The table of one submission, as Markdown."""
    points, most = report["totals"][submission]
    lines = [f"## {in_cell(submission)}: {score(points, most)}", ""]
    if most:
        lines += ["| exercise | question | verdict | points | why |"]
        lines += ["|---|---|---|---|---|"]
    for number, name, result in results_of(report, submission):
        given = score(result["points"], result["of"] or 1)
        why = in_cell(reason(result))
        lines.append(f"| {number} | {name} | {result['status']} | {given} | {why} |")
    return "\n".join([*lines, ""]) if most else "\n".join(lines)


def feedback(report, submission):
    """What one person gets to read: the verdicts, and what the checks say about them.
    No solutions are in it.
    """
    parts = [page(report, submission)]
    for number, name, result in results_of(report, submission):
        if result["status"] == PASSED or not result["details"]:
            continue
        parts.append(f"### {number} {name}: {result['status']}\n")
        for row, text in result["details"].items():
            said = textwrap.indent(text, "    ", lambda line: True)
            parts.append(f"{row.capitalize()}:\n\n{said}\n")
    return "\n".join(parts)


def gradebook(report):
    """The report as CSV: a line for each submission, a column for each question."""
    titles = sorted(
        {
            f"{number} {name}"
            for submission in report["totals"]
            for number, name, _ in results_of(report, submission)
        }
    )
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["submission", "points", "of", *titles])
    for submission, (points, most) in report["totals"].items():
        own = {
            f"{number} {name}": result["points"]
            for number, name, result in results_of(report, submission)
        }
        given = [own.get(title, "") for title in titles]
        table.writerow([as_text(submission), points, most, *given])
    return file.getvalue()


def as_text(name):
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
