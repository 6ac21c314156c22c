"""The pages that are made from the README, and the glossary."""

import re
import tomllib
from pathlib import Path

from course import read, title_of
from links import relinked
from markup import described, escaped
from notebook_pages import stoppable

PAGES = Path(__file__).parent / "pages"
START = [
    "How to work",
    "On Colab and Kaggle",
    "Commands",
    "For instructors",
    "The data",
]
PROGRAM = re.compile(r"`[^`\n]+ ddp_course/(lesson\d\d)\.py[^`\n]*`")  # a command
LANGUAGES = {"zh": "Chinese", "ru": "Russian", "es": "Spanish"}


def write(course, folder):
    """Write the front page, the first steps, the glossary, and the pages of prose."""
    readme = (course.root / "README.md").read_text()
    for page in PAGES.glob("*.md"):
        text = filled(page.read_text(), pieces(course, readme))
        text = relinked(text, course, course.root, Path(page.name))
        text = PROGRAM.sub(r"\g<0> ([program](programs/\1.md))", text)
        (folder / page.name).write_text(text)
    (folder / "glossary.md").write_text(glossary(course))


def filled(template, parts):
    """A page whose comments, such as <!-- the lessons -->, are replaced by their parts."""
    return re.sub(r"<!-- ([\w ]+) -->", lambda place: parts[place[1]], template)


def pieces(course, readme):
    """What the pages take from elsewhere, {name: Markdown}."""
    introduction, _, steps = (
        sections(readme)[""].strip().partition("\n\n")[2].partition("```")
    )
    own = course.repository and f"git+{course.repository}"
    colab = sections(readme)["On Colab and Kaggle"]
    if own:
        name = course.repository.rpartition("/")[2]
        steps = f"\ngit clone {course.repository}\ncd {name}{steps}"
        colab = re.sub(r"(?s) Replace `COURSE`.*?`\.", "", colab).replace("COURSE", own)
    colab = colab.replace("```python\n%", "```ipython\n%")
    start = {name: sections(readme)[name] for name in START} | {
        "On Colab and Kaggle": colab
    }
    return {
        "three sentences": " ".join(
            re.findall(r"(?s).+?[.](?:\s|$)", introduction)[:3]
        ),
        "commands": f"```{steps.partition('```')[0]}```",
        "installation": f"```{steps}",
        "the lessons": sections(readme)["The lessons"],
        "first steps": "\n".join(f"## {name}\n{text}" for name, text in start.items()),
        "ring": film(course.notebooks("lessons")["02"], "plots.ring("),
        "planner": planner(),
        "lessons in order": names(course, "lessons"),
        "exercises in order": names(course, "exercises"),
    }


def sections(text):
    """The parts of a README by their headings of level 2; "" is what comes first."""
    parts = re.split(r"(?m)^## (.+)\n", text)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2]))


def names(course, kind):
    """The pages of a kind, a line each, as a toctree wants them."""
    return "\n".join(f"{kind}/{path.stem}" for path in course.notebooks(kind).values())


def film(path, call):
    """The stored output of the cell of a notebook that draws by this call, as HTML."""
    for cell in read(path).cells:
        for output in cell.get("outputs", []) if call in cell.source else []:
            page = output.get("data", {}).get("text/html", "")
            if "<img" in page:
                return f"```{{raw}} html\n{stoppable(page)}\n```"
    raise LookupError(f"no stored output of {call}...) in {path.name}")


def planner():
    """The planner of lesson 21, as HTML: it computes in the page."""
    from ddp_course.notebook.plots import planner_page

    page, _ = planner_page.page_of()
    return f"```{{raw}} html\n{page}\n```"


# ---- the glossary ----


def terms():
    """The terms of the glossary, in order: dicts of term, text, lesson, zh, ru, es."""
    found = tomllib.loads((PAGES / "glossary.toml").read_text())["term"]
    return sorted(found, key=lambda term: term["term"].lower())


def glossary(course):
    """The page of the glossary, Markdown."""
    lessons = course.notebooks("lessons")
    entries = "\n\n".join(entry(term, lessons) for term in terms())
    about = "The terms of distributed training, with their Chinese, Russian and Spanish names."
    return f"""{described(about)}
# Glossary

The field's terms, each with the lesson that introduces it, and with its name in Chinese, Russian and Spanish.
Where people in that language say the English word, the English word is given.

:::{{glossary}}
{entries}
:::
"""


def entry(term, lessons):
    """A term with its explanation, its lesson, and its names."""
    path = lessons[term["lesson"]]
    others = " · ".join(
        f'<span class="language" title="{language}">{code}</span> '
        f'<span lang="{code}">{escaped(term[code])}</span>'
        for code, language in LANGUAGES.items()
    )
    text = " ".join(term["text"].split())
    link = f"[Lesson {title_of(read(path))}](lessons/{path.name})"
    return f"{escaped(term['term'])}\n  {text} {link}.\n\n  {others}"
