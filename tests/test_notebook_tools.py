"""What notebook cells call: show, compare, table, fails, and the %%ranks magic, in a
real IPython shell.
"""

import html
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import papermill
import pytest
from conftest import COURSE, descendants, wait_until
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import start_new_kernel

from ddp_course import lesson01, lesson03, lesson04, notebook
from ddp_course.models import convnets
from ddp_course.notebook import fresh_kernel, sources
from ddp_course.ranks.launch import RankError, RankTimeout, launch


@pytest.fixture
def displayed(monkeypatch):
    """What is displayed: of code its bundle, of a table its Markdown."""
    shown = []
    monkeypatch.setattr(
        sources,
        "display",
        lambda thing, raw=False: shown.append(thing if raw else thing.data),
    )
    return shown


def text_of(page):
    """What a person reads of HTML."""
    page = re.sub(r"(?s)<style>.*</style>\n", "", page)
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_show_displays_functions_classes_methods_and_modules(displayed):
    notebook.show(
        lesson03.average_gradients, convnets.MLP, convnets.ConvNet.forward, lesson01
    )
    function, class_, method, module = [bundle["text/plain"] for bundle in displayed]
    assert function.startswith(
        "# ddp_course/lesson03.py\ndef average_gradients(module):\n"
    )
    assert "class MLP(nn.Sequential):" in class_
    assert class_.endswith("nn.LogSoftmax(dim=1))")
    assert "\n    def forward(self, images):\n" in method and "__init__" not in method
    assert "MNIST on one device" in module and module.endswith("runs.start(main)")


def test_shown_code_is_highlighted_and_loses_nothing(displayed):
    notebook.show(lesson01, sources)
    for bundle in displayed:
        page = bundle["text/html"]
        assert text_of(page) == bundle["text/plain"]
        assert "<b>def</b>" in page and "<i># ddp_course" in page
        assert '<span class="s">"""' in page


def test_show_includes_decorators(displayed):
    notebook.show(lesson01.evaluate)
    assert "\n@torch.no_grad()\ndef evaluate(" in displayed[0]["text/plain"]


def test_show_reads_what_is_on_the_disk_now(displayed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "shown_lesson.py"
    module.write_text("def first():\n    return 1\n")
    import shown_lesson

    module.write_text(
        "import os\n\n\ndef zeroth():\n    return 0\n\n\n"
        "def first():\n    return 'edited'\n"
    )
    notebook.show(shown_lesson.first)
    expected = "# shown_lesson.py\ndef first():\n    return 'edited'"
    assert displayed[0]["text/plain"] == expected


def test_compare_marks_what_goes_and_what_comes(displayed):
    notebook.compare(lesson01.train_one_epoch, lesson03.train_one_epoch)
    text, page = displayed[0]["text/plain"], displayed[0]["text/html"]
    assert text.startswith("  ddp_course/lesson01.py -> ddp_course/lesson03.py")
    assert "\n-def train_one_epoch(model, loader, optimizer, device):\n" in text
    assert "\n+        finish()\n" in text
    for sign, color in (("+", sources.IN), ("-", sources.OUT)):
        runs = re.findall(
            rf'(?s)<div style="background: {re.escape(color)}">(.*?)</div>', page
        )
        assert text_of("".join(runs)).splitlines() == [
            line for line in text.splitlines() if line.startswith(sign)
        ]


def test_compare_keeps_each_line_whole_with_its_sign(displayed):
    notebook.compare(lesson01, lesson04)
    page = displayed[0]["text/html"]
    assert text_of(page) == displayed[0]["text/plain"] + "\n"
    assert "white-space: pre;" in page and "overflow-x: auto" in page


def test_each_side_of_a_comparison_is_highlighted_as_it_is_in_its_file(
    displayed, tmp_path, monkeypatch
):
    """In one text, the quotes of both would pair with each other."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quotes.py").write_text(
        'def one():\n    """Old\n\n    text.\n    """\n    return 1\n\n\n'
        'def two():\n    """New\n\n    text.\n    """\n    return 2\n'
    )
    import quotes

    notebook.compare(quotes.one, quotes.two)
    page = displayed[0]["text/html"]
    assert '-    <span class="s">"""Old</span>\n' in page
    assert "-    <b>return</b> 1\n" in page and "+    <b>return</b> 2\n" in page


def test_show_and_compare_take_the_path_of_a_file(displayed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    before, after = Path("scripts/one.py"), Path("scripts/two.py")
    before.write_text("model = 1\nprint(model)\n")
    after.write_text("model = 2\nprint(model)\n")
    notebook.show(before)
    notebook.compare(before, after)
    shown, compared = [bundle["text/plain"] for bundle in displayed]
    assert shown == "# scripts/one.py\nmodel = 1\nprint(model)"
    assert compared.splitlines() == [
        "  scripts/one.py -> scripts/two.py",
        "  ...",
        "-model = 1",
        "+model = 2",
        " print(model)",
    ]


def test_compare_says_when_nothing_changes(displayed):
    notebook.compare(lesson01.evaluate, lesson01.evaluate)
    assert "no difference" in displayed[0]["text/plain"]


def test_table_is_markdown(displayed):
    notebook.table([{"rank": 0, "loss": 0.123456789}, {"rank": 1, "loss": 2.0}])
    assert displayed == ["| rank | loss |\n| --- | --- |\n| 0 | 0.1235 |\n| 1 | 2 |"]


def test_fails_shows_the_error_that_was_expected(capsys):
    with notebook.fails("ZeroDivision", "rank 0 of 1"):
        launch(lambda: 1 // 0, nproc=1)
    assert (
        "ZeroDivisionError: integer division or modulo by zero"
        in capsys.readouterr().out
    )


def test_of_a_line_that_fills_pages_fails_shows_the_beginning(capsys):
    with notebook.fails("last word"):
        raise ValueError(f"short\n{'long ' * 400}last word")
    short, long = capsys.readouterr().out.splitlines()
    assert short == "ValueError: short"
    assert len(long) < 400 and long.endswith(" … (2,009 characters)")


def test_fails_complains_where_nothing_fails_or_something_else_does():
    with (
        pytest.raises(AssertionError, match="this was to fail, but it worked"),
        notebook.fails(),
    ):
        pass
    with (
        pytest.raises(
            AssertionError,
            match="this was to fail with .'ValueError'., but failed with",
        ),
        notebook.fails("ValueError"),
    ):
        raise KeyError("another")


def test_fails_lets_an_interrupt_through():
    with pytest.raises(KeyboardInterrupt), notebook.fails():
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "ddp_course.notebook")
    yield shell
    InteractiveShell.clear_instance()


def run(shell, text):
    result = shell.run_cell(textwrap.dedent(text).strip(), store_history=True)
    result.raise_error()
    return result


def test_ranks_runs_a_cell_in_a_process_group(shell, capsys):
    run(
        shell,
        "%%ranks 3\nt = torch.tensor([rank])\ndist.all_reduce(t)\nprint('of', world_size)\nt",
    )
    assert capsys.readouterr().out.splitlines() == [
        line
        for r in range(3)
        for line in (f"[rank{r}]: of 3", f"[rank{r}]: tensor([3])")
    ]


def test_ranks_sees_the_notebooks_variables_and_functions(shell, capsys):
    run(shell, "base = 100\nhow_many = 2\ndef add(x):\n    return base + x")
    run(shell, "%%ranks {how_many}\nadd(rank)")
    assert capsys.readouterr().out == "[rank0]: 100\n[rank1]: 101\n"


def test_ranks_without_a_last_value_prints_nothing(shell, capsys):
    run(shell, "%%ranks\nx = rank")
    assert capsys.readouterr().out == ""


def test_ranks_names_the_cell_and_the_line_that_failed(shell):
    number = shell.execution_count
    place = rf"cell In\[{number}\], line 4, in <module>: 1 / \(rank - 1\)"
    with pytest.raises(RankError, match=f"{place}\nZeroDivisionError"):
        run(shell, "%%ranks 2\nx = 1\n\n1 / (rank - 1)")
    place = rf"cell In\[{number + 1}\], line 2, in <module>: rank / 0"
    with pytest.raises(RankError, match=place):
        run(shell, "%%ranks 2\nrank / 0")


def test_ranks_stops_a_cell_that_hangs_and_names_it(shell):
    place = rf"cell In\[{shell.execution_count}\], line 3, in <module>"
    with pytest.raises(RankTimeout, match=rf"(?s)within 2 s.*{place}: dist.barrier"):
        run(
            shell,
            """
            %%ranks 2 --timeout 2
            if rank == 0:
                dist.barrier()
            else:
                import time; time.sleep(60)
            """,
        )


def error_shown(shell, capsys, text):
    """What a reader sees of a cell that fails, its plain text."""
    capsys.readouterr()
    result = shell.run_cell(text, store_history=True)
    assert not result.success
    told = capsys.readouterr()
    return re.sub(r"\x1b\[[0-9;]*m", "", told.out + told.err)


@pytest.mark.parametrize(
    "line, told",
    [
        ("{nprocs}", "no variable is called nprocs here; there is nproc"),
        ("{2 * zzz}", "no variable is called zzz here"),
        ("{nproc} --timeout {zzz}", "no variable is called zzz here"),
        ("{1 / 0}", "there is no value for {1 / 0}"),
        ("0", "%%ranks takes a number of ranks, 1 or more, not 0"),
        ("-1", "%%ranks takes a number of ranks, 1 or more, not -1"),
        ("two", "argument nproc: invalid int value: 'two'"),
        ("--ranks 2", "unrecognized arguments: --ranks"),
        ("--timeout 0", "--timeout takes seconds, above 0 and at most a day, not 0"),
        (
            "--timeout nan",
            "--timeout takes seconds, above 0 and at most a day, not nan",
        ),
        ('"', '%%ranks ": No closing quotation'),
    ],
)
def test_wrong_arguments_of_ranks_are_told_in_one_line(shell, capsys, line, told):
    run(shell, "nproc = 2")
    shown = error_shown(shell, capsys, f"%%ranks {line}\nrank")
    assert shown == f"UsageError: {told}\n"


@pytest.mark.parametrize(
    "cell, number, code, caret, message",
    [
        ("x = = 1", 2, "x = = 1", 4, "invalid syntax"),
        ("if True:\n    x = (1,\n    y", 3, "x = (1,", 4, "'(' was never closed"),
        ("\nreturn 3", 3, "return 3", 0, "'return' outside function"),
    ],
)
def test_a_syntax_error_on_ranks_is_three_lines(
    shell, capsys, cell, number, code, caret, message
):
    place = f"line {number} of cell In[{shell.execution_count}]"
    shown = error_shown(shell, capsys, f"%%ranks\n{cell}")
    lines = [f"SyntaxError in {place}:", f"    {code}", f"    {' ' * caret}^ {message}"]
    assert shown.splitlines() == lines


@pytest.mark.parametrize(
    "command", ["!ls", "%time 3", "print?", "files = !ls", "%%time", "cd .."]
)
def test_cells_on_ranks_are_plain_python_and_say_so(shell, capsys, command):
    place = f"line 3 of cell In[{shell.execution_count}]"
    shown = error_shown(shell, capsys, f"%%ranks\nx = 1\n{command}")
    assert shown == (
        "UsageError: cells on ranks are plain Python, without IPython's commands: "
        f"{place}, {command}\n"
    )


def test_a_name_that_was_assigned_on_the_ranks_is_told_apart(shell, capsys):
    cell = f"cell In[{shell.execution_count}]"
    run(shell, "%%ranks 2\nthe_sum = rank")
    note = f"the_sum was assigned on the ranks, in {cell}."
    for later in ("the_sum + 1", "%%ranks 2\nprint(the_sum)"):
        shown = error_shown(shell, capsys, later)
        assert "NameError: name 'the_sum' is not defined" in shown
        assert note in shown and "values = launch(function, nproc=2)" in shown
    shown = error_shown(shell, capsys, "never_assigned")
    assert shown.endswith("NameError: name 'never_assigned' is not defined\n")


def test_a_mistyped_name_gets_pythons_suggestion_on_ranks_too(shell, capsys):
    for mistyped, meant in {
        "import torch.distributed as dist; dist.all_reduec": "all_reduce",
        "number = 1; print(numbr)": "number",
        "prnt(1)": "print",
    }.items():
        told = error_shown(shell, capsys, f"%%ranks 1\n{mistyped}")
        assert told.count(f"Did you mean: {meant!r}?") == 1, told
    told = error_shown(shell, capsys, "%%ranks 1\nraise AttributeError('no flower')")
    assert "no flower" in told and "mean" not in told


def test_a_check_whose_answer_is_not_there_says_which_cell_to_run(shell, capsys):
    run(shell, "import ddp_course.checks.ex04; from ddp_course import checks")
    told = error_shown(shell, capsys, "checks.ex04.check_epoch_plan(epoch_plan)")
    assert told.endswith(
        "This check asks for epoch_plan: run the cell that defines it, then this one.\n"
    )


def test_errors_are_rendered_short_in_a_notebook(shell, capsys):
    shell.run_cell(
        "from ddp_course.ranks.launch import launch\nlaunch(lambda: [].pop(), nproc=1)"
    )
    shown = capsys.readouterr().out
    assert shown.startswith("RankError: rank 0 of 1 raised\n")
    assert (
        "IndexError: pop from empty list" in shown
        and "start_processes" not in shown
        and "_Run" not in shown
    )


@pytest.mark.parametrize(
    "call, told",
    [
        ("launch(3)", "launch takes a function and then its arguments, .* but got 3"),
        ("launch(print, nproc=0)", "nproc is a number of ranks, 1 or more, but is 0"),
        ("launch(print, env={'X': 1})", "env holds texts, .*, but 'X' is 1"),
    ],
)
def test_a_wrong_call_of_launch_is_told_in_one_line(shell, capsys, call, told):
    run(shell, "from ddp_course.ranks.launch import launch")
    shown = error_shown(shell, capsys, call)
    assert re.fullmatch(f"CannotLaunch: {told}\n", shown)


def test_a_lesson_edited_on_disk_is_reloaded_before_the_next_cell(shell, tmp_path):
    (tmp_path / "edited_in_lab.py").write_text("def answer():\n    return 1\n")
    sys.path.insert(0, str(tmp_path))
    run(shell, "import edited_in_lab\nfirst = edited_in_lab.answer()")
    (tmp_path / "edited_in_lab.py").write_text("def answer():\n    return 'two'\n")
    run(shell, "second = edited_in_lab.answer()")
    assert (shell.user_ns["first"], shell.user_ns["second"]) == (1, "two")


# ---- cells in a kernel of their own ----


def test_a_fresh_kernel_prints_what_its_cells_print_and_knows_no_other(capsys):
    fresh_kernel(
        "import sys; x = 1",
        "print(x, 'IPython' in sys.modules); print('to stderr', file=sys.stderr)",
    )
    assert capsys.readouterr() == ("1 True\n", "")
    with pytest.raises(RuntimeError, match="NameError: name 'x' is not defined"):
        fresh_kernel("x")


def test_a_fresh_kernel_that_hangs_is_stopped_with_all_that_it_has_started():
    before = descendants()
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(
        TimeoutError, match="did not end within 1.5 s, and its kernel was stopped"
    ):
        fresh_kernel(child, "while True: pass", timeout=1.5)
    assert wait_until(lambda: set(descendants()) <= set(before))


def test_a_kernel_that_is_shut_down_takes_its_temporary_folders_along(tmp_path):
    """Jupyter kills a kernel that does not leave, and what is killed leaves its folders
    behind. It waits 2.5 s, here 10: on a busy machine, a kernel needs some of them. One
    whose children ignore SIGTERM needs more than 14.
    """
    manager, client = start_new_kernel()
    manager.shutdown_wait_time = 20
    try:
        for cell in (
            f"import sys; sys.path[:0] = {sys.path!r}",
            "%load_ext ddp_course.notebook",
        ):
            assert client.execute_interactive(cell)["content"]["status"] == "ok"
        client.execute_interactive(
            f"import tempfile; folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})"
        )
        assert list(tmp_path.iterdir())
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert not list(tmp_path.iterdir())


LAUNCHES = """
import signal
from accelerate import notebook_launcher

def nothing():
    pass

before = signal.getsignal(signal.SIGTERM)
notebook_launcher(nothing, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
"""


@pytest.mark.parametrize(
    "extension, kept", [("%load_ext ddp_course.notebook", True), ("", False)]
)
def test_a_kernel_answers_signals_as_before_after_notebook_launcher(
    extension, kept, capsys
):
    path = f"import sys; sys.path[:0] = {sys.path!r}"
    as_before = "print(signal.getsignal(signal.SIGTERM) == before)"
    fresh_kernel(path, extension, LAUNCHES, as_before, timeout=600)
    assert capsys.readouterr().out.splitlines()[-1] == str(kept)


# ---- a kernel that has been restarted ----

STARTUP = COURSE / "ddp_course" / "cli" / "jupyterlab" / "startup.py"


def errors_of(client, cell):
    """What a cell writes to stderr."""
    told = []
    client.execute_interactive(
        cell,
        output_hook=lambda message: told.append(message["content"].get("text", "")),
    )
    return "".join(told)


def traceback_of(client, cell):
    """The error that a cell ends with, as a page shows it, without its colours."""
    told = []
    client.execute_interactive(
        cell,
        output_hook=lambda message: (
            told.extend(message["content"]["traceback"])
            if message["msg_type"] == "error"
            else None
        ),
    )
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(told)).strip()


def test_a_new_kernel_says_to_run_the_first_cell_again():
    """As `ddp-course lab` starts it: with PYTHONSTARTUP."""
    manager, client = start_new_kernel(env=os.environ | {"PYTHONSTARTUP": str(STARTUP)})
    try:
        told = errors_of(client, "%%ranks 2\nrank")
        assert told.startswith(
            "UsageError: the kernel is new: run the first cell again"
        )
        told = traceback_of(client, "checks.ex04.check_epoch_plan(epoch_plan)")
        assert "NameError: name 'checks' is not defined" in told
        assert told.endswith("run the notebook's first cell, then this one.")
        loaded = "import sys; print({'torch', 'ddp_course'} & set(sys.modules))"
        assert errors_of(client, loaded) == "set()\n"
        errors_of(client, f"sys.path[:0] = {sys.path!r}")
        errors_of(client, "%load_ext ddp_course.notebook")
        assert errors_of(client, "%%ranks 2\nrank") == "[rank0]: 0\n[rank1]: 1\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_startup_file_does_nothing_in_a_plain_python():
    command = [sys.executable, "-q", "-i"]
    environment = os.environ | {"PYTHONSTARTUP": str(STARTUP)}
    names = "print([name for name in dir() if not name.startswith('__')])\n"
    options = {"capture_output": True, "text": True, "input": names}
    ran = subprocess.run(command, env=environment, **options)
    assert ran.stdout == "[]\n" and "Error" not in ran.stderr


# ---- long cells ----


@pytest.fixture(scope="module")
def lab():
    """A kernel with the course's extension, in which a cell is long after one second,
    and a client that stands for a person.
    """
    manager, client = start_new_kernel()
    client.execute_interactive(f"import sys; sys.path[:0] = {sys.path!r}")
    client.execute_interactive("%load_ext ddp_course.notebook\nimport time")
    client.execute_interactive("from ddp_course.notebook import alive")
    client.execute_interactive("alive.PATIENCE = 1")
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def page_of(messages):
    """The outputs that a page has at the end, and the lines that came and went."""
    outputs, lines = [], []
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind in ("stream", "display_data", "execute_result", "error"):
            outputs.append(dict(content))
        elif kind == "update_display_data":
            for output in outputs:
                if output.get("transient") == content["transient"]:
                    output["data"] = content["data"]
        lines += re.findall("running for [0-9]+ s", str(content.get("data")))
    texts = []
    for output in outputs:
        data = output.get("data") or {}
        text = output.get("text", output.get("ename", data.get("text/plain", "")))
        texts.append(text)
    return texts, lines


def run_in(lab, cell, reader=True, **options):
    messages = []
    lab.execute_interactive(
        cell, allow_stdin=reader, output_hook=messages.append, timeout=600, **options
    )
    return page_of(messages)


@pytest.mark.parametrize(
    "end, shown",
    [
        ("", []),
        ("print('a')", ["a\n"]),
        ("7", ["7"]),
        ("1 / 0", ["ZeroDivisionError"]),
    ],
)
def test_a_long_cell_counts_its_seconds_in_a_line_that_ends_empty(lab, end, shown):
    outputs, lines = run_in(lab, f"time.sleep(2.6)\n{end}")
    assert outputs == ["", *shown]
    assert lines[:2] == ["running for 1 s", "running for 2 s"]


def test_no_line_where_nobody_reads_and_in_short_cells(lab):
    assert run_in(lab, "time.sleep(2)", reader=False) == ([], [])
    assert run_in(lab, "time.sleep(0.2)\n'done'") == (["'done'"], [])


def test_the_line_does_not_disturb_notebook_launchers_forks(lab):
    forks = LAUNCHES.replace("pass", "import time; time.sleep(2); print('ran')")
    texts, lines = run_in(lab, forks)
    assert "".join(texts).count("ran") == 2 and lines


def test_papermill_shows_no_line(tmp_path):
    cells = [f"import sys; sys.path[:0] = {sys.path!r}"]
    cells += ["%load_ext ddp_course.notebook"]
    cells += ["from ddp_course.notebook import alive; alive.PATIENCE = 1"]
    cells += ["import time; time.sleep(2)"]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, tmp_path / "long.ipynb")
    done = papermill.execute_notebook(
        tmp_path / "long.ipynb",
        tmp_path / "done.ipynb",
        kernel_name="python3",
        progress_bar=False,
    )
    assert not any(cell.outputs for cell in done.cells)
