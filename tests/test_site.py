"""The site: every page is there and nothing on it is broken, the error messages are the
notebooks' own, and a search for one of them finds it.
"""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from conftest import COURSE, python
from filelock import FileLock

for needed in ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton"):
    pytest.importorskip(needed, reason=f"the site needs {needed}: pip install .[site]")
sys.path.append(str(COURSE / "site"))

import failure_pages  # noqa: E402
import front  # noqa: E402
import inspection  # noqa: E402
import notebook_pages  # noqa: E402
from course import Course  # noqa: E402
from links import relinked  # noqa: E402
from mathml import mathml  # noqa: E402

from ddp_course.cli.diagnosis import from_lessons, from_programs  # noqa: E402

LESSONS = sorted((COURSE / "lessons").glob("[0-9][0-9]_*.ipynb"))
HOME = "https://github.com/NAME/COURSE"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, made once for all workers of a test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "site.lock"):
        if not (folder / "site" / "html" / "index.html").exists():
            made = python(COURSE / "site" / "make.py", folder / "site", timeout=600)
            (folder / "site" / "printed.txt").write_text(made.stdout + made.stderr)
            (folder / "site" / "code.txt").write_text(str(made.returncode))
    return folder / "site"


def text_of(page):
    """The text of a page, without tags."""
    import html

    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


# ---- it is whole ----


def test_the_site_is_made_without_a_warning_or_a_problem(site):
    assert (site / "code.txt").read_text() == "0", (site / "printed.txt").read_text()
    assert "WARNING" not in (site / "printed.txt").read_text()


def test_each_lesson_exercise_and_program_has_a_page_and_no_solution_has(site):
    course = Course()
    wanted = [
        *course.notebooks("lessons").values(),
        *course.notebooks("exercises").values(),
    ]
    pages = [path.relative_to(COURSE).with_suffix(".html") for path in wanted]
    pages += [
        Path("programs", f"{path.stem}.html") for path in course.programs().values()
    ]
    names = ("index", "start", "choose", "failures", "glossary", "reference", "search")
    pages += [Path(f"{name}.html") for name in names]
    for page in pages:
        assert (site / "html" / page).exists(), page
    for path in (site / "html").rglob("*"):
        assert "solution" not in path.name, path
        if path.suffix in (".html", ".ipynb"):
            assert "BEGIN SOLUTION" not in path.read_text(), path


def test_a_notebook_can_be_downloaded_as_it_is(site):
    offered = {path.name: path for path in (site / "html/_downloads").rglob("*.ipynb")}
    for path in LESSONS:
        assert offered[path.name].read_bytes() == path.read_bytes()


def test_formulas_are_drawn_by_the_browser_alone(site):
    assert "<mfrac>" in mathml(r"\frac{x}{\sqrt{2}}", "block")
    assert mathml(r"\text{batch\_size}", "inline").count("batch_size") == 1
    pages = [inspection.Page(path) for path in inspection.pages_in(site / "html")]
    fetched = {address for page in pages for address in page.fetched}
    assert not [
        address for address in fetched if re.search("(?i)mathjax|katex", address)
    ]
    assert "<math" in (site / "html/lessons/05_sync_batchnorm.html").read_text()


def test_controls_have_the_names_that_are_written_on_them(site):
    for path in inspection.pages_in(site / "html"):
        page = path.read_text()
        assert not re.search('<summary><span class="toctree-toggle"', page), path
        assert "Toggle hidden content" not in page, path
        for button in re.findall(r"<button[^>]*search-button-field[^>]*>", page):
            assert "aria-label" not in button, path
        for box in re.findall(r'<div class="ddp-code"[^>]*>', page):
            assert 'tabindex="0"' in box, path


def test_a_page_says_what_it_is_about_and_no_title_repeats_itself(site):
    for path in inspection.pages_in(site / "html"):
        page, name = path.read_text(), path.relative_to(site / "html").as_posix()
        title = re.search("<title>(.*?)</title>", page)[1].split(" &#8212; ")
        assert len(title) == len({*title}), title
        if name not in ("search.html", "genindex.html"):
            about = re.search(r'<meta content="([^"]+)" name="description"', page)
            assert about and len(about[1]) > 20, name


def test_tables_in_outputs_are_tables(site):
    for page in (site / "html" / "lessons").glob("*.html"):
        assert "| --- |" not in page.read_text(), page.name
    page = (site / "html/lessons/03_averaging_gradients.html").read_text()
    assert re.search(r"(?s)cell_output.*?<table.*?all-reduces per step", page)


GOOD = """<html><body id="top"><h1 id="here">x</h1><img src="a.png" alt="a picture">
<a href="#here">x</a><a href="https://pytorch.org">x</a><script src="a.js"></script></body></html>"""


@pytest.mark.parametrize(
    "old, planted, problem",
    [
        ('href="#here"', 'href="gone.html"', "a link leads nowhere: gone.html"),
        ('href="#here"', 'href="#gone"', "a link leads nowhere: #gone"),
        ('alt="a picture"', "", "no alternative text: a.png"),
        ('alt="a picture"', 'alt=" "', "no alternative text: a.png"),
        (
            'src="a.js"',
            'src="https://cdn.example/a.js"',
            "fetches https://cdn.example/a.js",
        ),
        ('src="a.png"', 'src="//cdn.example/a.png"', "fetches //cdn.example/a.png"),
        ('src="a.js"', 'src="b.js"', "there is no b.js"),
        (
            "<h1",
            "<style>@import 'https://a.example/b.css';</style><h1",
            "fetches https://a.example/b.css",
        ),
        (
            "<h1",
            '<p style="background: url(//a.example/b.png)"><h1',
            "fetches //a.example/b.png",
        ),
    ],
)
def test_what_is_wrong_with_a_page_is_found(old, planted, problem, tmp_path):
    for name in ("a.png", "a.js"):
        (tmp_path / name).touch()
    page = tmp_path / "page.html"
    page.write_text(GOOD)
    assert inspection.problems(tmp_path) == []
    assert old in GOOD
    page.write_text(GOOD.replace(old, planted, 1))
    assert inspection.problems(tmp_path) == [f"page.html: {problem}"]


def test_a_style_sheet_that_fetches_from_another_host_is_found(tmp_path):
    (tmp_path / "a.css").write_text(
        "@font-face {src: url('https://a.example/b.woff2')}"
    )
    assert inspection.problems(tmp_path) == ["a.css: fetches https://a.example/b.woff2"]


# ---- links ----


def test_a_link_leads_to_the_page_of_what_it_names():
    origin, page = COURSE / "lessons", Path("failures/page.md")
    course = Course()
    link = "[x](../ddp_course/lesson04.py), [y](04_ddp.ipynb#break-it)"
    moved = "[x](../programs/lesson04.md), [y](../lessons/04_ddp.ipynb#break-it)"
    assert relinked(link, course, origin, page) == moved
    for text in ("[x](https://pytorch.org)", "`[x](04_ddp.ipynb)`", "[x](#here)"):
        assert relinked(text, course, origin, page) == text


def test_a_file_that_is_not_on_the_site_is_linked_in_the_repository_if_that_is_known():
    text, origin, page = "[x](../Makefile)", COURSE / "lessons", Path("lessons/x.md")
    assert relinked(text, Course(), origin, page) == "x"
    known = Course(repository=f"{HOME}.git")
    assert relinked(text, known, origin, page) == f"[x]({HOME}/blob/main/Makefile)"


def test_a_lesson_that_is_not_written_yet_is_plain_text_and_a_wrong_name_stays():
    origin, page = COURSE / "lessons", Path("lessons/x.md")
    text = "[99 · Later](99_later.ipynb)"
    assert relinked(text, Course(), origin, page) == "99 · Later"
    for wrong in ("[x](04_dpd.ipynb)", "[x](../ddp_course/lesson4.py)"):
        assert relinked(wrong, Course(), origin, page) == wrong


@pytest.mark.parametrize("wrong", ["", "[x](04_dpd.ipynb)", "[x](a.md#gone)"])
def test_a_wrong_link_in_a_lesson_stops_the_site(wrong, tmp_path):
    """Planted in a site of one page, made with the site's own configuration."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.md").write_text(f"---\norphan: true\n---\n# A\n\n## Here\n\n{wrong}\n")
    (source / "index.md").write_text("# Index\n\n[A](a.md#here)\n")
    options = ["-q", "-W", "-c", COURSE / "site", "-d", tmp_path / "trees"]
    made = python("-m", "sphinx", *options, source, tmp_path / "html", timeout=600)
    assert (made.returncode == 0) == (not wrong), made.stderr
    assert not wrong or "not found" in made.stderr


@pytest.mark.parametrize("repository", ["", HOME, "https://gitlab.com/NAME/COURSE"])
def test_buttons_open_a_notebook_where_the_repository_is_known(repository):
    course = Course(repository=repository)
    row = notebook_pages.links_below_title(LESSONS[3], course)
    assert "[The program](../programs/lesson04.md)" in row
    assert "[The exercise](../exercises/04_exercise_ddp.ipynb)" in row
    assert "{download}`Download the notebook </files/lessons/04_ddp.ipynb>`" in row
    addresses = re.findall(r"\((https://[^)]+)\)", row)
    first = notebook_pages.page_of_notebook(LESSONS[3], course).cells[0].source
    told = "On Colab and Kaggle, run [one cell](../start.md#on-colab-and-kaggle) first"
    assert (told in first) == (repository == HOME)
    if repository != HOME:  # Colab, Kaggle and Codespaces take notebooks from GitHub
        assert addresses == []
        return
    blob = "NAME/COURSE/blob/main/lessons/04_ddp.ipynb"
    assert addresses == [
        f"https://colab.research.google.com/github/{blob}",
        f"https://kaggle.com/kernels/welcome?src=https://github.com/{blob}",
        "https://codespaces.new/NAME/COURSE/tree/main",
    ]


def test_the_cell_for_colab_has_the_repositorys_address_if_that_is_known():
    readme = (COURSE / "README.md").read_text()
    unknown = front.pieces(Course(), readme)["first steps"]
    assert "%pip install --quiet COURSE" in unknown and "Replace `COURSE`" in unknown
    known = front.pieces(Course(repository=HOME), readme)["first steps"]
    assert f"%pip install --quiet git+{HOME}" in known and "COURSE`" not in known


# ---- the error messages ----


def expected_failures():
    """What the notebooks' cells with `fails(...)` have printed, (lesson, text); without
    those that are marked as having no page.
    """
    for path in LESSONS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.metadata.get("failure") is False or cell.cell_type != "code":
                continue
            if "fails(" in cell.source and cell.outputs:
                text = "".join(output.get("text", "") for output in cell.outputs)
                yield path.name[:2], text.strip("\n")


def shown_by_lessons(html):
    """The pages of the failures that the lessons show: their names begin with a number."""
    return list((html / "failures").glob("[0-9]*.html"))


def missing_failures(html):
    """The notebooks' failures that have no page of their own, or are not in the index."""
    index = (html / "failures.html").read_text()
    pages = {page: text_of(page) for page in shown_by_lessons(html)}
    for lesson, text in expected_failures():
        own = [
            page for page in pages if page.name[:2] == lesson and text in pages[page]
        ]
        if not any(f'href="failures/{page.name}"' in index for page in own):
            yield lesson, text


def test_every_failure_of_the_notebooks_is_in_the_index_with_its_own_text(
    site, tmp_path
):
    html = site / "html"
    assert list(missing_failures(html)) == []
    known = list(expected_failures())
    assert len(known) >= 40
    assert len(shown_by_lessons(html)) == len(known)
    # planted: an index without one of them
    (tmp_path / "failures").mkdir()
    for page in shown_by_lessons(html):
        (tmp_path / "failures" / page.name).write_text(page.read_text())
    [gone] = (html / "failures").glob("04-parameters-that-are-not-used.html")
    index = (
        (html / "failures.html").read_text().replace(f'"failures/{gone.name}"', '""')
    )
    (tmp_path / "failures.html").write_text(index)
    [(lesson, text)] = missing_failures(tmp_path)
    assert lesson == "04" and "Expected to have finished reduction" in text


def test_each_failure_says_how_and_why_and_its_title_is_its_error():
    for path in LESSONS:
        for failure in from_lessons.failures_of(path):
            assert failure.how and failure.why, failure.title
            words = re.findall(r"\w{4,}", failure.title)
            assert words and all(word in failure.error for word in words), failure.title


def twice(names):
    return {name for name in names if names.count(name) > 1}


def test_no_two_failures_have_the_same_title_or_page():
    found = from_lessons.failures_in(COURSE / "lessons")
    assert not twice([failure_pages.heading_of(failure) for failure in found])
    assert not twice([failure.slug for failure in found])
    assert twice([failure.slug for failure in [*found, found[3]]]) == {found[3].slug}


def cell_of(text, mark=None, printed=""):
    """A cell of a text, or of code if something is printed, with a mark."""
    cell = nbformat.v4.new_markdown_cell(text)
    if printed:
        output = nbformat.v4.new_output("stream", text=printed)
        cell = nbformat.v4.new_code_cell(text, outputs=[output])
    cell.metadata = {"failure": mark} if mark else {}
    return cell


def test_a_failure_is_made_of_the_cells_that_are_marked(tmp_path):
    cells = [
        cell_of("# 99 · Lesson"),
        cell_of("**1. A.** x", "how"),
        cell_of("> **Predict.** y?"),
        cell_of("f()", "A", "KeyError: a"),
        cell_of("**The fix:** b.", "fix"),
        cell_of("Because.", "cause"),
        cell_of("**Try it.** c"),
        cell_of("It:", "how"),
        cell_of("g()", "B", "KeyError: d"),
        cell_of("**The fix:** e.", "fix"),
        cell_of("h()", "C"),
        cell_of("i()", None, "KeyError: f"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "99_x.ipynb")
    first, second = from_lessons.failures_of(tmp_path / "99_x.ipynb")
    assert (first.name, first.slug, first.title) == ("A", "99-a", "KeyError: a")
    assert first.how == "**A.** x" and first.why == "Because.\n\n**The fix:** b."
    assert (second.name, second.how, second.why) == ("B", "It:", "**The fix:** e.")


@pytest.mark.parametrize(
    "error, title",
    [
        ("E: no <f at 0x7ff4faa8f6a0>: x", "E: no <f at 0x…>: x"),
        ("E: failed. port: 43499, code: -98", "E: failed. port: …, code: -98"),
        (
            "E: Read error [127.0.0.1]:48806: reset",
            "E: Read error [127.0.0.1]:…: reset",
        ),
        ("E: [/a/b.cc:545] [enforce fail at /c.cc:1] x 2", "E: x 2"),
        (f"E: {'word ' * 30}", f"E: {'word ' * 19}…"),
    ],
)
def test_a_failures_title_has_no_address_and_no_port(error, title):
    assert from_lessons.title_in(error, ["E: "]) == title


PARTS = ["What it looks like", "Why, and what to do", "The lesson's cell"]
GOOD_FAILURE = """<nav>x</nav><article><h1>E: <code>x</code></h1>
<h2>What it looks like<a>#</a></h2><pre>E: `x`</pre>
<h2>Why, and what to do<a>#</a></h2><p>Why.</p><p><strong>The fix:</strong> do it.</p>
<h2>The lesson's cell<a>#</a></h2><p>The <code>frame</code>.</p><pre>x</pre></article>"""


def faults_of_failure(page):
    """What is wrong with the page of a failure, HTML."""
    article = page.partition("<article")[2].partition("</article>")[0]
    prose = re.sub(r"(?s)<(script|style|pre|code)\b.*?</\1>", "", page)
    parts = re.split(r"<h2>(.*?)<", article)
    if parts[1::2] != PARTS:
        yield f"its parts are {parts[1::2]}"
    elif "<p><strong>The fix:</strong> " not in parts[4]:
        yield "no fix"
    if "`" in re.sub(r"<[^>]+>", "", prose):
        yield "a raw backtick"
    for words in ("see the lesson", "Predict.", "Answer", "Try it."):
        if words in re.sub(r"(?s)<pre\b.*?</pre>", "", article):
            yield words


@pytest.mark.parametrize(
    "old, planted, fault",
    [
        ("<nav>x", "<nav>`x`", "a raw backtick"),
        ("<code>x</code>", "`x`", "a raw backtick"),
        ("Why.", "Why: see the lesson.", "see the lesson"),
        ("Why.", "<strong>Predict.</strong> What?", "Predict."),
        ("The <code>", "<summary>Answer</summary><code>", "Answer"),
        ("The <code>", "<strong>Try it.</strong><code>", "Try it."),
        ("<p><strong>The fix:</strong>", "<p>The fix:", "no fix"),
        (
            "Why, and",
            "Why and",
            f"its parts are {[PARTS[0], 'Why and what to do', PARTS[2]]}",
        ),
    ],
)
def test_what_is_wrong_with_the_page_of_a_failure_is_found(old, planted, fault):
    assert list(faults_of_failure(GOOD_FAILURE)) == []
    assert old in GOOD_FAILURE
    page = GOOD_FAILURE.replace(old, planted, 1)
    assert list(faults_of_failure(page)) == [fault]


def test_no_page_of_a_failure_has_a_fault(site):
    pages = shown_by_lessons(site / "html")
    faults = {page.name: list(faults_of_failure(page.read_text())) for page in pages}
    assert len(pages) >= 40
    assert not {name: found for name, found in faults.items() if found}


def without_tags(page):
    """The text of a page, HTML, with <h> for each heading of a section."""
    import html

    page = re.sub(r"<h[1-3]\b", "\0<h", page)
    return html.unescape(re.sub(r"<[^>]+>", "", page)).replace("\0", "<h>")


def test_pages_of_failures_are_listed_on_one_page_only_and_lead_back_to_it(site):
    html = site / "html"
    slugs = {path.name for path in (html / "failures").glob("*.html")}
    link = r'href="(?:\.\./)?failures/([^"#]+)"'
    assert {*re.findall(link, (html / "failures.html").read_text())} == slugs
    assert not re.search(link, (html / "index.html").read_text())
    for name in slugs:
        page = (html / "failures" / name).read_text()
        assert 'href="../failures.html">All error messages' in re.sub(
            "<span[^>]*>", "", page
        )
        assert len(re.findall('class="toctree-l1', page)) > 20, name  # the lessons are


def test_each_failure_leads_to_its_section_of_the_lesson(site):
    for failure in from_lessons.failures_in(COURSE / "lessons"):
        slug = failure.slug
        page = (site / "html/failures" / f"{slug}.html").read_text()
        [(lesson, anchor, link)] = re.findall(
            r'section <a [^>]*href="\.\./(lessons/\w+\.html)#([^"]+)">(.+?)</a>', page
        )
        lesson = (site / "html" / lesson).read_text()
        section = lesson.partition(f'<section id="{anchor}">')[2]
        assert section, (slug, anchor)
        heading = re.search(r"<h\d>(.+?)<a ", section)[1]
        assert re.sub("</?span.*?>", "", link) == re.sub("</?span.*?>", "", heading)
        above, found, _ = without_tags(section).partition(failure.code)
        assert found and above.count("<h>") == 1, (slug, anchor)


def test_the_page_of_a_failure_shows_the_program_that_the_cell_treats(site):
    known = {path.stem: path for path in (COURSE / "lessons/clinic").glob("*.py")}
    shown = set()
    for failure in from_lessons.failures_in(COURSE / "lessons"):
        slug = failure.slug
        text = text_of(site / "html/failures" / f"{slug}.html")
        words = re.findall(r'"(\w+)"', failure.code)
        names = [word for word in words if word in known]
        if not re.search(r"\btreat\b", failure.code):
            assert "lessons/clinic/" not in text, slug
            continue
        assert names, slug
        for name in names:
            assert f"lessons/clinic/{name}.py on each rank" in text, slug
            assert known[name].read_text().strip() in text, slug
        shown |= {*names}
    assert len(shown) >= 10


def test_the_page_of_a_failure_says_what_the_course_adds(site):
    for failure in from_lessons.failures_in(COURSE / "lessons"):
        slug = failure.slug
        page = (site / "html/failures" / f"{slug}.html").read_text()
        told = page.partition("<h2>The lesson's cell<")[2].partition("</p>")[0]
        assert "names that earlier cells of the lesson define" in told
        assert 'href="../reference.html#fails"' in told
        launched = 'href="../reference.html#launch"' in told
        assert launched == bool(re.search(r"\blaunch\(", failure.code)), slug
        told = " ".join(without_tags(told).split())
        assert ("before the error" in told) == (" raised\n" in failure.error), slug
        for line in re.findall(r"rank \d+ of \d+ raised", told):
            assert line in failure.error, slug
        killed = "was killed by SIG" in failure.error
        assert ("torchrun's table has exitcode : -" in told) == killed, slug
        ends = not killed and "TimeoutError" not in failure.error
        assert ("only the error itself appears" in told) == ends, slug


@pytest.mark.parametrize(
    "error, told",
    [
        ("rank 1 of 3 raised\n\nE: x", "prints `rank 1 of 3 raised` before the error"),
        ("rank 1 of 2 was killed by SIGABRT", "has `exitcode : -6` for SIGABRT."),
        ("rank 0 of 2 was killed by SIGKILL", "has `exitcode : -9` for SIGKILL."),
        ("rank 0 of 2 was killed by SIGSEGV", "has `exitcode : -11` for SIGSEGV."),
        ("TimeoutError: x", "there is no time limit, and the cell does not end."),
    ],
)
def test_what_a_job_shows_depends_on_how_it_ends(error, told):
    code = "fresh_kernel(x)" if "Timeout" in error else "launch(f)"
    failure = from_lessons.Failure("01", "x", "x", error, "", "", code, 0)
    assert told in failure_pages.about_the_frame(failure)


def test_the_page_of_a_failure_leads_to_the_other_causes_of_its_error(site):
    waits = [
        "02-a-collective-that-only-rank-calls",
        "02-everybody-sends-first",  # which of them waits to send is chance
        "15-a-rank-that-is-out-of-batches",
    ]
    ports = ["02-a-port-that-is-taken", "14-two-jobs-on-one-port"]
    for causes in (waits, ports):
        for slug in causes:
            page = (site / "html/failures" / f"{slug}.html").read_text()
            told = re.search(r"<p>Other causes of this error: .*?</p>", page, re.DOTALL)
            linked = re.findall(r'href="([^"]+)\.html"', told[0])
            assert {*causes} - {slug} <= {*linked} and slug not in linked, slug
    alone = site / "html/failures/11-marked-ready-twice.html"
    assert "Other causes" not in alone.read_text()


def found_by_search(html, query):
    """The pages that have each word of the query, as Sphinx's searchtools.js looks them up
    in searchindex.js. Where there is none, search.js goes on: tests/browser/ tries it.
    """
    from sphinx.search.en import SearchEnglish

    text = (html / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    language, pages = SearchEnglish({}), set(range(len(index["docnames"])))
    for word in re.findall(r"\w+", query):
        if word.isdigit() or word.lower() in language.stopwords:
            continue
        stem, having = language.stem(word.lower()), set()
        for terms in (index["terms"], index["titleterms"]):
            place = terms.get(stem, [])
            having |= {place} if isinstance(place, int) else set(place)
        pages &= having
    return [index["docnames"][page] for page in pages]


@pytest.mark.parametrize(
    "line, lesson",
    [
        ("Expected to have finished reduction in the prior iteration", "04"),
        ("Expected to mark a variable ready only once", "11"),
        ("Detected mismatch between collectives on ranks", "02"),
        (
            "element 0 of tensors does not require grad and does not have a grad_fn",
            "11",
        ),
        ("The server socket has failed to listen on any local network address", "02"),
        ("Can't pickle <function <lambda> at : attribute lookup <lambda>", "01"),
    ],
)
def test_searching_for_a_line_of_an_error_finds_it(line, lesson, site):
    found = found_by_search(site / "html", line)
    assert any(page.startswith(f"failures/{lesson}-") for page in found), found
    assert any(page.startswith(f"lessons/{lesson}_") for page in found), found
    assert found_by_search(site / "html", f"{line} zzyzx") == []


# ---- what is written for the site ----


@pytest.mark.parametrize("term", front.terms(), ids=lambda term: term["term"])
def test_a_term_of_the_glossary_is_in_its_lesson_and_has_names_in_three_languages(term):
    [path] = [path for path in LESSONS if path.name.startswith(term["lesson"])]
    cells = nbformat.read(path, as_version=4).cells
    word = re.escape(term["term"]).replace(r"\-", "[-_ ]")
    assert re.search(rf"(?i)\b{word}", "\n".join(cell.source for cell in cells))
    assert re.search(r"[\u4e00-\u9fff]|^[\w-]+$", term["zh"])
    assert re.search(r"[а-яё]|^[\w-]+$", term["ru"])
    assert term["es"] and term["text"][-1] in ".?)"


def test_the_glossary_names_the_first_lesson_that_prints_a_term_in_bold():
    for term in front.terms():
        bold = re.compile(rf"(?i)\*\*{re.escape(term['term'])}s?\*\*")
        for path in LESSONS:
            cells = nbformat.read(path, as_version=4).cells
            if any(bold.search(cell.source) for cell in cells):
                assert path.name[:2] >= term["lesson"], (term["term"], path.name)
                break


def commands_on(page):
    """The commands with a lesson's program in a page of prose: (number, flags)."""
    for code in re.findall(r"`((?:torchrun|python) [^`]*ddp_course/[^`]*)`", page):
        before, _, flags = code.partition(".py")
        yield before[-2:], shlex.split(flags)


def test_the_commands_that_lead_to_a_lesson_are_ones_that_its_program_takes():
    from ddp_course import UsageError

    commands = list(commands_on((COURSE / "site/pages/choose.md").read_text()))
    assert len(commands) > 10
    for number, flags in commands:
        importlib.import_module(f"ddp_course.lesson{number}").arguments(flags)
    planted = list(commands_on("`torchrun ddp_course/lesson04.py --shard 3`"))
    with pytest.raises(UsageError):
        importlib.import_module("ddp_course.lesson04").arguments(planted[0][1])


def test_a_command_of_a_program_is_followed_by_a_link_to_its_page(site):
    page = (site / "html/choose.html").read_text()
    pages = [
        number for number, _ in commands_on((site / "source/choose.md").read_text())
    ]
    linked = re.findall(r'</code> \(<a [^>]*href="programs/lesson(\d\d).html">', page)
    assert linked == pages and {"15", "16"} <= {*linked}


def test_the_reference_has_every_command_and_every_flag(site):
    import typer

    from ddp_course.cli.command import app

    text = text_of(site / "html" / "reference.html")
    for name, command in typer.main.get_command(app).commands.items():
        assert f"ddp-course {name}" in text
        for parameter in command.params:
            assert (parameter.help or "") in " ".join(text.split()), (
                name,
                parameter.name,
            )
    for path in Course().programs().values():
        page = (site / "html" / "programs" / f"{path.stem}.html").read_text()
        told = page.partition('id="flags"')[2].partition("</section>")[0]
        flags = re.findall(
            r'\bflag\("(--[\w-]+)"|add_argument\(\s*"(--[\w-]+)"', path.read_text()
        )
        for flag in filter(None, sum(flags, ())):
            assert flag in told, (path.name, flag)


def test_the_front_page_has_three_sentences_a_film_the_commands_and_all_lessons(site):
    page = (site / "html" / "index.html").read_text()
    assert 'class="ddp-course-film"' in page and "make lab" in page
    readme = (COURSE / "README.md").read_text()
    sentences = front.pieces(Course(), readme)["three sentences"]
    assert len(re.findall(r"\.(?:\s|$)", sentences)) == 3
    for name in re.findall(r"\]\(lessons/(\d\d_\w+)\.ipynb\)", readme):
        assert f'href="lessons/{name}.html"' in page


def test_the_front_page_says_where_the_course_is_if_that_is_known(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    front.write(Course(repository=f"{HOME}.git"), source)
    for path in source.glob("[!i]*.md"):  # one page of the site, without the others
        path.unlink()
    options = ["-Q", "-c", COURSE / "site", "-d", tmp_path / "trees"]
    env = {"DDP_COURSE_REPOSITORY": HOME}
    made = python("-m", "sphinx", *options, source, tmp_path / "html", env=env)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "html/index.html").read_text()
    assert f"git clone {HOME}\ncd COURSE\nmake lab" in page
    assert re.search(rf'<a href="{HOME}"[^>]*title="Source repository"', page)
    assert f'href="{HOME}/tree/main/lessons/standalone"' in page


def test_without_an_address_no_page_says_where_the_course_is(site):
    for name in ("index", "start"):
        page = (site / f"html/{name}.html").read_text()
        assert "git clone" not in page and "make lab" in page


def faults_of_program(page, failure):
    """What the page of a failure that no lesson shows lacks, HTML."""
    import html

    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())
    lesson = f"../lessons/{failure.lesson}_"
    plain = lambda markdown: " ".join(markdown.replace("`", "").split())
    for part in ("name", "cause", "which", "fix"):
        if plain(getattr(failure, part))[:60] not in text:
            yield part
    if ("Not run here" in text) == failure.runs:
        yield "whether it is run"
    if failure.runs and plain(failure.code.splitlines()[-1]) not in text:
        yield "the program"
    if lesson not in page or not all(source in page for source in failure.sources):
        yield "a link"
    if "The fix: " not in text:
        yield "the words The fix"


def test_each_failure_that_no_lesson_shows_has_its_page(site):
    index = (site / "html" / "failures.html").read_text()
    found = from_programs.failures_in(COURSE / "lessons" / "failures")
    assert len(found) >= 60
    for failure in found:
        page = (site / "html" / "failures" / f"{failure.slug}.html").read_text()
        assert not list(faults_of_program(page, failure)), failure.slug
        assert f'href="failures/{failure.slug}.html"' in index
    planted = page.replace("The fix:", "The end:").replace(failure.name, "x")
    assert {"name", "the words The fix"} <= {*faults_of_program(planted, failure)}


# ---- how it is made and published ----


def test_make_and_the_workflow_make_the_same_site():
    assert (
        "site: setup\n\t@$(BIN)/python site/make.py\n"
        in (COURSE / "Makefile").read_text()
    )
    workflow = yaml.safe_load((COURSE / ".github/workflows/site.yml").read_text())
    steps = workflow["jobs"]["make"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make site"]
    assert steps[-1]["with"]["path"] == "site/_build/html"
    ignored = ["git", "check-ignore", "-q", "site/_build/html/index.html"]
    assert subprocess.run(ignored, cwd=COURSE).returncode == 0


def test_codespaces_set_the_course_up_and_open_its_first_lesson():
    container = json.loads((COURSE / ".devcontainer/devcontainer.json").read_text())
    assert container["postCreateCommand"] == "make setup"
    for name in container["customizations"]["codespaces"]["openFiles"]:
        assert (COURSE / name).exists()


def test_the_sites_modules_say_what_they_do():
    for path in (COURSE / "site").glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path.name
