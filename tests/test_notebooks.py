"""The lessons' notebooks: that they run, with 2 and 3 ranks, on digits and MNIST, and
that what they show is true.
"""

import ast
import importlib
import json
import os
import re
import shutil
import symtable
import tempfile
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from conftest import COURSE, THOROUGH, mnist_folder, python, share_what_is_made_once
from minutes import COLLAPSED, is_hidden, minutes, said, sentence, with_folds

from ddp_course import UsageError, notebook
from ddp_course.cli import execution
from ddp_course.cli.execution import in_one_line, store_outputs
from ddp_course.data.images import load_images
from ddp_course.notebook import sources
from ddp_course.ranks import gpus

NOTEBOOKS = sorted((COURSE / "lessons").glob("[0-9][0-9]_*.ipynb"))
SHORT = [
    "--train-samples",
    "384",
    "--epochs",
    "1",
]  # MNIST and many ranks, but not for long
PATIENCE = 800  # seconds, for three notebooks at once on two cores
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path):
    return "\n".join(
        cell.source for cell in read(path).cells if cell.cell_type == "markdown"
    )


def test_there_is_a_notebook_for_each_lesson_and_a_lesson_for_each_notebook():
    scripts = sorted(
        path.stem.removeprefix("lesson")
        for path in (COURSE / "ddp_course").glob("lesson[0-9][0-9].py")
    )
    assert [path.name[:2] for path in NOTEBOOKS] == scripts and scripts


# ---- they run ----


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the course's folder in which notebooks may write."""
    (tmp_path / "ddp_course").symlink_to(COURSE / "ddp_course")
    (tmp_path / "clusters").symlink_to(COURSE / "clusters")
    shutil.copytree(COURSE / "lessons", tmp_path / "lessons")
    share_what_is_made_once(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(course, path, *options):
    """Run a notebook with `ddp-course execute`; return its cells as they came out."""
    done = python(
        "-m",
        "ddp_course.cli.command",
        "execute",
        path.name[:2],
        *options,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "ran to its end" in done.stdout
    cells = code_cells(course / "runs" / "notebooks" / path.name)
    for cell in cells:  # a failure that is shown must not keep the reader waiting
        assert "fails(" not in cell.source or cell.metadata.papermill.duration < 60, (
            cell.source
        )
    return cells


def quick(path, without="no such words"):
    """Take out of a notebook the cells tagged `slow`, which measure for long, or start
    what a test of its own starts; and those with the words `without`.

    `make lessons` and `make bench` run them.
    """
    notebook = read(path)
    notebook.cells = [
        cell
        for cell in notebook.cells
        if "slow" not in cell.metadata.get("tags", []) and without not in cell.source
    ]
    nbformat.write(notebook, path)


# lesson and ranks; the others take a minute and more each, three at a time
QUICKLY = [("01", 1), ("09", 3)]
RUNS = [
    pytest.param(path, nproc, id=f"{path.stem}-{nproc}")
    for path in NOTEBOOKS
    for nproc in (1, 3, 4)
    if THOROUGH or (path.name[:2], nproc) in QUICKLY
]


@pytest.fixture
def nothing_left(monkeypatch):
    """A folder for temporary files in which nothing may be left but torchrun's folders
    for logs, which it never removes.
    """
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # pytest's own have names too long for a socket
        monkeypatch.setenv("TMPDIR", folder)
        yield
        left = [
            name
            for name in os.listdir(folder)
            if not name.startswith(("torchelastic_", "torchinductor_"))
        ]
        assert not left, left


@pytest.mark.parametrize("path, nproc", RUNS)
def test_it_runs_on_other_ranks_and_data_than_it_is_stored_with(
    path, nproc, course, nothing_left, monkeypatch
):
    """One rank is a number, too: it is what a machine with one GPU suggests. Quickly: the
    first one, and one that kills ranks; `make lessons` runs them all, as they are.
    """
    number = path.name[:2]
    on_mnist = (
        ["01", "02", "03", "04"] if THOROUGH else []
    )  # 10,000 images to test on take their time
    data = "mnist" if mnist_folder() and number in on_mnist else "digits"
    if mnist_folder():
        monkeypatch.setenv("DDP_COURSE_DATA", str(mnist_folder()))
    if not THOROUGH:
        quick(course / "lessons" / path.name)
    [given] = [
        cell.source
        for cell in code_cells(path)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    if on_text := re.search('data = "(python|questions)"', given):
        data = on_text[1]
    execute(course, path, "--nproc", str(nproc), "--data", data, *SHORT)


# failures on `nproc` ranks that one rank alone has, too
ALSO_ALONE = [
    "SyncBatchNorm expected input tensor to be on GPU",
    "Expected more than 1 value per channel",
    "SIGKILL",
    "got mixed torch.Tensor and DTensor",
]


def cells_that_need_two(sources):
    """The parts of cells that fail on one rank: a failure on `nproc` ranks that takes
    two, and results of `nproc` ranks of which more than the first or the last is taken.
    """
    for source in sources:
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*", "", source))):
            code = ast.unparse(node)
            if "nproc=nproc" not in code:
                continue
            if isinstance(node, ast.With) and "fails(" in code:
                if not any(words in code for words in ALSO_ALONE):
                    yield code
            if isinstance(node, ast.Subscript) and is_launch(node.value):
                if ast.unparse(node.slice) not in ("0", "-1"):
                    yield code
            if isinstance(node, ast.Assign) and is_launch(node.value):
                target = node.targets[0]
                if isinstance(target, ast.Tuple | ast.List) and not any(
                    isinstance(part, ast.Starred) for part in target.elts
                ):
                    yield code


def is_launch(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("launch")


def python_cells(path):
    return [
        cell.source for cell in code_cells(path) if not cell.source.startswith("%%")
    ]


@each_notebook
def test_no_cell_needs_more_ranks_than_it_asks_for(path):
    """Quickly: every notebook with 1, 3 and 4 ranks is `make thorough`."""
    assert list(cells_that_need_two(python_cells(path))) == []


@pytest.mark.parametrize(
    "cell",
    [
        'with fails("lesson 04"):\n    launch(lesson01.main, [], nproc=nproc)',
        "first, second = launch(train, nproc=nproc)",
        "second = machines.launch(train, nproc=nproc)[1]",
    ],
)
def test_a_cell_that_needs_two_ranks_would_be_noticed(cell):
    assert list(cells_that_need_two([cell]))
    assert not list(cells_that_need_two([cell.replace("=nproc", "=2")]))


# ---- on a machine with GPUs, which the tests pretend ----


@pytest.mark.skipif(not THOROUGH, reason="runs all notebooks: make thorough")
@each_notebook
def test_no_library_takes_a_gpu_that_the_cell_has_not_named(path, course, monkeypatch):
    """torch says that there is one, the course's own programs find none: so whatever uses
    it was not told where to compute, and would mix devices on a real machine.
    """
    log = course / "asked"
    pretended = COURSE / "tests" / "pretended"
    monkeypatch.setenv("PYTHONPATH", f"{pretended}{os.pathsep}{COURSE}")
    monkeypatch.setenv("DDP_COURSE_PRETENDED_COUNT", "0")
    monkeypatch.setenv("DDP_COURSE_PRETENDED_LOG", str(log))
    for name in gpus.HIDDEN:
        monkeypatch.delenv(name, raising=False)
    if path.name[:2] != "14":  # torchrun on the laboratory's machines takes its time
        monkeypatch.setenv("DDP_COURSE_MACHINES", "pretended")
    # torch's compiler asks for a GPU's random state, and compiles nothing without it
    quick(course / "lessons" / path.name, without="def compiled_graphs")
    execute(course, path)
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["stack"] for row in asked if row["kind"] == "use"] == []
    assert [row["stack"] for row in asked if row["server"]] == []


@pytest.mark.skipif(not THOROUGH, reason="runs all notebooks: make thorough")
@each_notebook
def test_it_runs_without_what_it_folds(path, course):
    """A reader may skip it: what comes later needs nothing that it does."""
    notebook = read(path)
    notebook.cells = [cell for cell, is_folded in with_folds(path) if not is_folded]
    copy = course / "lessons" / path.name
    nbformat.write(notebook, copy)
    quick(copy)
    execute(course, path)


# calls that take a GPU that is there, and what names another place in the same cell
TAKES_A_GPU = {
    "Accelerator": r"cpu=|CUDA_VISIBLE_DEVICES|\*\*options",
    "TrainingArguments": r"use_cpu|CUDA_VISIBLE_DEVICES|\*\*",
    "PeftModel.from_pretrained": "torch_device=",
    "deepspeed.initialize": r"load_deepspeed\(",
    "nn.DataParallel": "CUDA_VISIBLE_DEVICES",
}


def cells_that_take_a_gpu(sources):
    for source in sources:
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*", "", source))):
            if isinstance(node, ast.Call):
                naming = TAKES_A_GPU.get(ast.unparse(node.func))
                if naming and not re.search(naming, source):
                    yield source


@each_notebook
def test_a_cell_says_where_a_library_computes(path):
    """Quickly, by its words."""
    assert list(cells_that_take_a_gpu(python_cells(path))) == []


@pytest.mark.parametrize(
    "cell",
    [
        "accelerator = Accelerator()",
        "PeftModel.from_pretrained(model, adapter)",
        "nn.DataParallel(network)(images)",
    ],
)
def test_a_cell_that_lets_a_library_choose_would_be_noticed(cell):
    assert list(cells_that_take_a_gpu([cell]))


@each_notebook
def test_its_programs_meet_at_a_free_port(path):
    """With torch 2.11, torchrun without --standalone takes port 29500."""
    for source in python_cells(path):
        for words in ("torch.distributed.run", "torch.distributed.launch"):
            if words in source:
                assert "--standalone" in source or "rdzv" in source, source


@each_notebook
def test_it_says_what_has_been_seen_on_a_gpu_and_what_not(path):
    section = prose(path).split("On a GPU, on a cluster\n")[-1].split("\n## ")[0]
    if "**Not seen on a GPU:** " in section:
        return  # nothing of it
    for words in ("**Seen on a GPU:** ", "H200", "2026", "Not seen: "):
        assert words in section
    if path.name[:2] != "02":  # whose program does not train
        assert "--deterministic" in prose(path)


@each_notebook
def test_at_most_one_cell_is_slow(path):
    assert (
        sum("slow" in cell.metadata.get("tags", []) for cell in code_cells(path)) <= 1
    )


if THOROUGH:  # make lessons runs them as they are stored, with papermill

    @each_notebook
    def test_it_runs_under_nbval(path, course):
        """As it is stored: on digits, and on 2 ranks."""
        options = [
            "--nbval-lax",
            "--nbval-current-env",
            "--nbval-cell-timeout=600",
            "-p",
            "no:cacheprovider",
            "-q",
            "-n",
            "0",
        ]
        done = python(
            "-m", "pytest", *options, f"lessons/{path.name}", timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout[-5000:]
        assert f"{len(code_cells(path))} passed" in done.stdout


def test_a_notebook_that_fails_is_found(course):
    path = course / "lessons" / "01_one_device.ipynb"
    broken = read(path)
    broken.cells = [nbformat.v4.new_code_cell("assert 1 + 1 == 3, 'planted'")]
    nbformat.write(broken, path)
    done = python("-m", "ddp_course.cli.command", "execute", "01", timeout=PATIENCE)
    assert done.returncode == 1 and "failed: AssertionError: planted" in done.stdout
    done = python(
        "-m",
        "pytest",
        "--nbval-lax",
        "--nbval-current-env",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "lessons/01_one_device.ipynb",
    )
    assert done.returncode == 1 and "1 failed" in done.stdout


# ---- what they show is today's ----


def names_for(path):
    """What `show` and `compare` may name in a notebook: its imports from the course,
    the training set, and the paths of files.
    """
    names = {"train_set": load_images("digits")[0], "Path": Path}
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*", "", cell.source))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(
                "ddp_course"
            ):
                for alias in node.names:
                    module = importlib.import_module(node.module)
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    names[alias.asname or alias.name] = getattr(module, alias.name)
    return names


def missing_from_the_course(names, cells):
    """What cells take from the course's modules that is not there, `lesson12.ddp`.

    names: those of names_for. `make thorough` runs the cells; this finds at once what a
    function's new name or place has left behind.
    """
    for cell in cells:
        for node in ast.walk(ast.parse(without_magics(cell))):
            if not (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            ):
                continue
            thing = names.get(node.value.id)
            if isinstance(thing, ModuleType) and not hasattr(thing, node.attr):
                yield ast.unparse(node)


@each_notebook
def test_what_it_takes_from_the_course_is_there(path):
    cells = [cell.source for cell in code_cells(path)]
    assert list(missing_from_the_course(names_for(path), cells)) == []
    names = {"lesson12": importlib.import_module("ddp_course.lesson12")}
    planted = ["%%ranks 2\nlesson12.ddp(1)", "lesson12.main()"]
    assert list(missing_from_the_course(names, planted)) == ["lesson12.ddp"]


def calls(path, function):
    """The cells that are one call of this function, and its arguments."""
    names = names_for(path)
    for cell in code_cells(path):
        if re.match(rf"{function}\(", cell.source):
            arguments = ast.parse(cell.source).body[0].value.args
            yield cell, [eval(ast.unparse(argument), names) for argument in arguments]


@pytest.fixture
def displayed(monkeypatch):
    """What `show` and `compare` display, bundles."""
    shown = []
    monkeypatch.setattr(sources, "display", lambda bundle, raw: shown.append(bundle))
    return shown


@each_notebook
@pytest.mark.parametrize("function", [notebook.show, notebook.compare])
def test_shown_source_is_todays(path, function, displayed, monkeypatch):
    monkeypatch.chdir(path.parent)  # as in a kernel
    for cell, things in calls(path, function.__name__):
        displayed.clear()
        function(*things)
        assert [dict(output.data) for output in cell.outputs] == displayed, cell.source
    assert function is notebook.compare or displayed


def test_an_edited_lesson_would_be_noticed(monkeypatch, displayed):
    today = sources.source
    monkeypatch.setattr(
        sources, "source", lambda thing: today(thing).replace("backward", "forward")
    )
    with pytest.raises(AssertionError):
        test_shown_source_is_todays(NOTEBOOKS[0], notebook.show, displayed, monkeypatch)


@each_notebook
def test_what_is_shown_fits_into_88_columns(path):
    """As wide as a cell is on a laptop; what is wider has to be scrolled."""
    for cell in code_cells(path):
        shown = [cell.source]
        if re.match(r"(show|compare)\(", cell.source):
            shown += [output.data["text/plain"] for output in cell.outputs]
        for line in "\n".join(shown).splitlines():
            sign = cell.source.startswith("compare(")  # takes a column of its own
            assert len(line) <= 88 + sign, line


def definitions(tree):
    """All functions and classes, by what they do: their code without names and
    docstrings.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, "\n".join(ast.unparse(statement) for statement in body)


def copies(text, package):
    return [
        name
        for name, body in definitions(ast.parse(text))
        if len(body.splitlines()) > 1 and body in package.values()
    ]


@each_notebook
def test_no_definition_is_in_a_notebook_and_in_the_package(path):
    package = {}
    for module in (COURSE / "ddp_course").glob("*.py"):
        package |= dict(definitions(ast.parse(module.read_text())))
    text = "\n".join(
        re.sub(r"(?m)^%.*", "", cell.source)
        for cell in code_cells(path)
        if not cell.source.startswith("%%")
    )
    assert not copies(text, package)
    planted = "def mine(module):\n" + "\n".join(
        f"    {line}" for line in package["average_gradients"].splitlines()
    )
    assert copies(text + "\n" + planted, package) == ["mine"]


# ---- they are made as agreed ----

PARTS = [
    "The idea",
    "Prove it",
    "Measure it",
    "Break it",
    "On a GPU, on a cluster",
    "Exercises",
    "Sources",
]


@each_notebook
def test_it_has_all_parts_in_order(path):
    text = prose(path)
    assert text.startswith(f"# {int(path.name[:2])} · ")
    for words in ("**You will be able to**", "**Time**", "**You need**"):
        assert words in text.split("## The idea")[0]
    places = [re.search(rf"(?m)^##+ {part}", text) for part in PARTS]
    assert all(places), dict(zip(PARTS, places))
    assert [place.start() for place in places] == sorted(
        place.start() for place in places
    )
    assert (
        text.count("> **Predict.**")
        == text.count("<details><summary>Answer</summary>")
        >= 2
    )
    breaks = text[places[3].start() : places[4].start()]
    assert len(re.findall(r"(?m)^\*\*\d\. ", breaks)) >= 2


def markdown_in_html(text):
    """The folded answers that have Markdown, which nobody renders there: HTML goes on to
    the next empty line.
    """
    folded = re.findall(r"(?s)<details>(?:(?!\n\n|</details>).)*", text)
    inner = [re.sub(r"<[^>]+>", "", html) for html in folded]
    return [found for found in inner if re.search(r"\*\*|`|\]\(|\$", found)]


def test_markdown_in_a_folded_answer_would_be_noticed():
    [found] = markdown_in_html("> <details><summary>Answer</summary>`x`</details>")
    assert found == "Answer`x`"


@each_notebook
def test_a_folded_answer_has_no_markdown(path):
    assert markdown_in_html(prose(path)) == []


@each_notebook
def test_it_has_one_cell_of_parameters(path):
    [cell] = [
        cell
        for cell in code_cells(path)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    names = [
        target.id for node in ast.parse(cell.source).body for target in node.targets
    ]
    assert names == ["nproc", "data", "train_samples", "epochs"]


@each_notebook
def test_its_cells_are_short_and_have_prose_between_them(path):
    cells = read(path).cells
    for cell in cells:
        if cell.cell_type == "code" and not is_hidden(cell):
            assert len(cell.source.splitlines()) <= 36, cell.source
    runs_of_code = "".join(
        "c" if cell.cell_type == "code" else "m" for cell in cells
    ).split("m")
    assert max(map(len, runs_of_code)) <= 3


@each_notebook
def test_its_outputs_are_of_a_whole_real_run(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source


@each_notebook
def test_its_outputs_are_small_and_of_no_machine(path):
    assert path.stat().st_size < 1_000_000
    for cell in code_cells(path):
        for output in cell.outputs:
            png = output.get("data", {}).get("image/png", "")
            assert len(png) * 3 / 4 < 100_000, cell.source
            text = str(
                {
                    kind: data
                    for kind, data in output.get("data", {}).items()
                    if kind != "image/png"
                }
            ) + output.get("text", "")
            assert not re.search(r"/(home|root|work|tmp|Users)/", text), text
            assert "Warning" not in text and not re.search(r"\dit/s", text), text


@each_notebook
def test_its_file_is_clean(path):
    stored = read(path)
    nbformat.validate(stored)
    ids = [cell.id for cell in stored.cells]
    assert len(set(ids)) == len(ids)
    assert (
        set(stored.metadata) == {"kernelspec", "language_info"}
        and stored.metadata.kernelspec.name == "python3"
    )
    written = {"tags", "failure", "jupyter", COLLAPSED}
    assert all(set(cell.metadata) <= written for cell in stored.cells)


@each_notebook
def test_its_imports_are_hidden_and_nothing_else(path):
    """They are there, one click away: what a lesson begins with is its idea."""
    hidden = [cell for cell in read(path).cells if is_hidden(cell)]
    [first, *_] = code_cells(path)
    assert hidden == [first] and "import" in first.source


@each_notebook
def test_it_says_how_long_it_takes_which_is_75_minutes_at_most(path):
    assert minutes(path) <= 75
    assert said(path) == sentence(path)


@each_notebook
def test_it_breaks_at_most_five_things_and_folds_the_others(path):
    text = "\n".join(
        cell.source for cell, is_folded in with_folds(path) if not is_folded
    )
    [section] = re.findall(r"(?ms)^## Break it\n(.*?)^## ", text)
    assert len(re.findall(r"(?m)^\*\*\d+\. ", section)) <= 5


@each_notebook
def test_what_it_folds_is_a_section_for_a_second_reading_and_says_so(path):
    for cell in read(path).cells:
        heading = re.fullmatch(
            r"#{2,4} .+\n\n\*For a second reading: .+[.?]\*", cell.source
        )
        assert bool(cell.metadata.get(COLLAPSED)) == bool(heading), cell.source
        assert bool(heading) == ("second reading" in cell.source), cell.source
    for cell, is_folded in with_folds(path):
        if is_folded and cell.cell_type == "markdown":
            assert "\n## " not in cell.source  # it would be folded, too


@each_notebook
def test_who_skips_what_it_folds_misses_no_name(path):
    assert not names_missed(with_folds(path))


def names_missed(cells):
    """The names that a cell uses and only a folded cell above it has made.

    cells: pairs of a cell and whether it is folded.
    """
    made, folded, missed = set(), set(), set()
    for cell, is_folded in cells:
        if cell.cell_type == "code":
            new, used = names_in(without_magics(cell.source))
            missed |= set() if is_folded else (used & folded) - made - new
            (folded if is_folded else made).update(new)
    return missed


def without_magics(source):
    """A cell's Python: lines that begin with % or ! go, and the first one with %%."""
    return re.sub(r"(?m)^(\s*)[%!].*", r"\1pass", source)


def names_in(source):
    """The names that a cell makes at its top level, and those that it reads there or in
    its functions.
    """
    top = symtable.symtable(source, "cell", "exec")
    made = {
        name.get_name()
        for name in top.get_symbols()
        if name.is_assigned() or name.is_imported()
    }
    used = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
    inner = list(top.get_children())
    for table in inner:
        inner += table.get_children()
        names = table.get_symbols()
        used |= {name.get_name() for name in names if name.is_global()}
    return made, used


def test_a_name_that_only_a_folded_cell_makes_would_be_noticed():
    new = nbformat.v4.new_code_cell
    cells = [(new("a = 1"), False), (new("def f(): pass\na = b = 2"), True)]
    assert not names_missed([*cells, (new("a, [b for b in (1, 2)]"), False)])
    assert names_missed([*cells, (new("def g(x): return f(x) + b"), False)]) == {
        "f",
        "b",
    }
    assert not names_missed([*cells, (new("print(b)"), True)])


@each_notebook
def test_its_links_lead_somewhere(path):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", prose(path)):
        if os.path.basename(link)[:2] <= NOTEBOOKS[-1].name[:2]:
            assert (path.parent / link).exists(), link


# ---- its failures are marked, and the site finds them: README, "To change a lesson" ----

AN_ERROR = re.compile(
    r"(?m)^(\[\S+\]:)?\s*([\w.]+(Error|Exception)\b|rank \d+ of \d+ (raised|was killed))"
)


def shows_an_error(cell):
    """Whether a cell expects an error, or has printed one."""
    if cell.cell_type != "code":
        return False
    printed = "".join(output.get("text", "") for output in cell.outputs)
    return "fails(" in cell.source or bool(AN_ERROR.search(printed))


def faults_of_mark(cell):
    """What is wrong with the mark of one cell, or that it lacks."""
    mark = cell.metadata.get("failure")
    if cell.cell_type == "code":
        if shows_an_error(cell) and mark is None:
            yield (
                'shows an error: write what the failure is called, {"failure": "A port '
                'that is taken"}, or {"failure": false} if it has no page on the site'
            )
        elif mark not in (None, False) and not is_named(cell):
            yield 'is code: its "failure" is a name, or false'
    elif mark not in (None, False, "how", "cause", "fix"):
        yield 'is text: its "failure" is "how", "cause" or "fix", or false'
    elif mark and (mark == "fix") != cell.source.startswith("**The fix:** "):
        yield f'is marked "{mark}": one marked "fix" begins with **The fix:**, no other'
    elif mark and "\n**The fix:**" in cell.source:
        yield 'has a fix: put it into a cell of its own, and write {"failure": "fix"}'


def is_named(cell):
    mark = cell.metadata.get("failure")
    return cell.cell_type == "code" and isinstance(mark, str) and mark != ""


def called_in(text):
    """The bold words that a text begins with, without their number; "" if it has none."""
    bold = re.match(r"\*\*(?:\d+\. )?(.+?)\*\*", text)
    return bold[1].replace("`", "").rstrip(".") if bold else ""


def faults_between(above, texts, below):
    """What is wrong with the texts between two cells that show failures, (cell, fault).

    above, below: those cells, or None at an end of the notebook.
    """
    parts = [text.metadata.get("failure") for text in texts]
    unmarked = [text for text, part in zip(texts, parts) if part is None]
    if above and "fix" not in parts:
        fixes = [text for text in unmarked if text.source.startswith("**The fix:**")]
        where = [*fixes, *unmarked, above][0]
        yield where, f'is below a failure, {above.id}: write {{"failure": "fix"}}'
    if below and "how" not in parts:
        tells = [text for text in unmarked if not text.source.startswith("> **Predict")]
        where = [below, *tells][-1]
        yield where, f'is above a failure, {below.id}: write {{"failure": "how"}}'
    for number, (text, part) in enumerate(zip(texts, parts)):
        if part in ("cause", "fix") and (not above or "how" in parts[:number]):
            yield text, f'is marked "{part}", and no failure is shown above it'
        if part == "how" and not below:
            yield text, 'is marked "how", and no failure is shown below it'
        if above and part is None and "fix" in parts[number:]:
            yield (
                text,
                'is above a fix: write {"failure": "cause"}, or {"failure": false}',
            )


def faults_of_name(texts, below):
    """Where a failure has another name than in the text above it, (cell, fault)."""
    for text in texts:
        called = called_in(text.source)
        if text.metadata.get("failure") == "how" and called:
            if below.metadata["failure"] != called:
                yield (
                    below,
                    f'is called otherwise above: write {{"failure": "{called}"}}',
                )


def faults_of_marks(notebook):
    """What is wrong with the marks of a notebook's failures, or lacks, sentences. Those
    between failures come when each mark by itself is right.
    """
    cells = notebook.cells
    found = [(cell, fault) for cell in cells for fault in faults_of_mark(cell)]
    if found:
        return [f"{cell.id} {fault}" for cell, fault in found]
    named = [number for number, cell in enumerate(cells) if is_named(cell)]
    for begin, end in zip([None, *named], [*named, None]):
        above, below = (None if at is None else cells[at] for at in (begin, end))
        texts = [cell for cell in cells[begin:end] if cell.cell_type == "markdown"]
        found += faults_between(above, texts, below)
        found += faults_of_name(texts, below) if below else []
    return [f"{cell.id} {fault}" for cell, fault in found]


@each_notebook
def test_its_failures_are_marked(path):
    faults = faults_of_marks(read(path))
    assert not faults, "\n".join(
        [f"in the metadata of the cells of {path.name}:", *faults]
    )


def marked_cell(text, mark, printed=""):
    """A cell of a text, or of code if something is printed, with a mark."""
    cell = nbformat.v4.new_markdown_cell(text)
    if printed:
        output = nbformat.v4.new_output("stream", text=printed)
        cell = nbformat.v4.new_code_cell(text, outputs=[output])
    cell.metadata = {} if mark is None else {"failure": mark}
    return cell


def marked_notebook():
    """A notebook with two failures, both marked, whose cells are called c0 to c7."""
    cells = [
        marked_cell("**1. A `b`.** It:", "how"),
        marked_cell("with fails('x'):\n    launch(f)", "A b", "TypeError: x"),
        marked_cell("Because.", "cause"),
        marked_cell("**The fix:** do it.", "fix"),
        marked_cell("It is", "how"),
        marked_cell("launch(f)", "C d", "rank 1 of 2 was killed by SIGKILL"),
        marked_cell("**The fix:** do it.", "fix"),
        marked_cell("launch(f)", False, "[rank1]: ValueError: y"),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"c{number}"
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize(
    "number, mark, wanted",
    [
        (0, None, 'c0 is above a failure, c1: write {"failure": "how"}'),
        (0, "hwo", 'c0 is text: its "failure" is "how", "cause" or "fix", or false'),
        (0, "fix", 'c0 is marked "fix": one marked "fix" begins with **The fix:**'),
        (0, "cause", 'c0 is marked "cause", and no failure is shown above it'),
        (1, None, 'c1 shows an error: write what the failure is called, {"failure": "'),
        (1, "A c", 'c1 is called otherwise above: write {"failure": "A b"}'),
        (1, True, 'c1 is code: its "failure" is a name, or false'),
        (2, None, 'c2 is above a fix: write {"failure": "cause"}, or {"failure": fal'),
        (2, "how", 'c3 is marked "fix", and no failure is shown above it'),
        (3, None, 'c3 is below a failure, c1: write {"failure": "fix"}'),
        (3, "cause", 'c3 is marked "cause": one marked "fix" begins with'),
        (4, None, 'c4 is above a failure, c5: write {"failure": "how"}'),
        (5, False, 'c4 is marked "how", and no failure is shown below it'),
        (5, None, "c5 shows an error: write what the failure is called"),
        (7, None, "c7 shows an error: write what the failure is called"),
    ],
)
def test_a_mark_that_lacks_or_is_wrong_is_named(number, mark, wanted):
    notebook = marked_notebook()
    assert faults_of_marks(notebook) == []
    cell = notebook.cells[number]
    cell.metadata = {} if mark is None else {"failure": mark}
    assert any(fault.startswith(wanted) for fault in faults_of_marks(notebook))


def test_a_fix_below_a_cause_in_one_cell_is_named():
    notebook = marked_notebook()
    notebook.cells[2].source += "\n\n**The fix:** do it."
    [fault] = faults_of_marks(notebook)
    assert fault.startswith("c2 has a fix: put it into a cell of its own")


def test_marks_stay_in_the_text_form_and_when_the_outputs_are_stored(tmp_path):
    jupytext = pytest.importorskip("jupytext")
    for path in NOTEBOOKS:
        stored = read(path)
        marks = [cell.metadata for cell in stored.cells]
        text = jupytext.writes(stored, "py:percent")
        again = jupytext.reads(text, "py:percent")
        assert [cell.metadata for cell in again.cells] == marks
        for cell in stored.cells:
            cell.metadata = {"tags": [], "papermill": {"duration": 1}} | cell.metadata
        nbformat.write(stored, tmp_path / "executed.ipynb")
        store_outputs(tmp_path / "executed.ipynb", tmp_path / "stored.ipynb")
        kept = read(tmp_path / "stored.ipynb")
        assert [cell.metadata for cell in kept.cells] == marks


def test_outputs_are_stored_on_a_quiet_machine_only(monkeypatch):
    monkeypatch.setattr("psutil.getloadavg", lambda: (9.0 * os.cpu_count(), 0, 0))
    with pytest.raises(
        UsageError, match="this machine is busy .*: --store needs a quiet"
    ):
        execution.execute([], {}, store=True)
    assert execution.execute([], {}, store=False) == 0
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.1, 9, 9))
    assert execution.execute([], {}, store=True) == 0


def test_two_lessons_have_similar_times_for_the_same_step():
    """A training step of 64 images on one rank: a busy machine would have doubled one."""
    third, fourth = ("\n".join(texts_of(read(path))) for path in NOTEBOOKS[2:4])
    alone = float(re.search(r"ConvNet, .* alone: ([\d.]+);", third)[1])
    one_rank = float(re.search(r"ms per step .*\n.*\n\| 1 \| ([\d.]+) \|", fourth)[1])
    assert 1 / 1.5 < alone / one_rank < 1.5


def texts_of(notebook):
    """The texts of all outputs of a notebook."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            yield (
                data.get("text/markdown")
                or data.get("text/plain")
                or output.get("text", "")
            )


def test_a_notebook_that_failed_is_told_by_the_first_ranks_own_words():
    story = """RankError: rank 1 of 2 raised

  cell In[3], line 4, in train: raise ValueError("a word")
  ValueError: a word

meanwhile rank 0 was in train.py, line 7, in step: dist.all_reduce(loss)"""
    assert in_one_line(RuntimeError(story)) == "  ValueError: a word".strip()
    assert in_one_line(RuntimeError("one line")) == "one line"
    assert in_one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
