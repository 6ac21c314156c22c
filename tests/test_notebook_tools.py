"""What notebook cells call: show, compare, table, fails, and the %%ranks magic, in a
real IPython shell.
"""

import html
import re
import sys
import textwrap

import pytest
from conftest import descendants, wait_until
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import start_new_kernel

from ddp_course import lesson01, lesson03, lesson04, notebook
from ddp_course.notebook import fresh_kernel, sources
from ddp_course.ranks.launch import RankError, launch
from ddp_course.scenery import models


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
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_show_displays_functions_classes_methods_and_modules(displayed):
    notebook.show(
        lesson03.average_gradients, models.MLP, models.ConvNet.forward, lesson01
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
        assert "keyword-color" in page and "string-color" in page
        assert "comment-color" in page


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
    assert "\n+        finish()\n" in text
    assert "\n-    return torch.stack(losses).tolist()" in text
    for sign, color in (("+", sources.IN), ("-", sources.OUT)):
        marked = [line for line in page.splitlines() if f"background: {color}" in line]
        assert [text_of(line) for line in marked] == [
            line for line in text.splitlines() if line.startswith(sign)
        ]


def test_compare_keeps_each_line_whole_with_its_sign(displayed):
    notebook.compare(lesson01, lesson04)
    assert text_of(displayed[0]["text/html"]) == displayed[0]["text/plain"]
    assert "white-space: pre;" in displayed[0]["text/html"]


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
    result = shell.run_cell(textwrap.dedent(text).strip())
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


def test_ranks_quotes_the_line_of_the_cell_that_failed(shell):
    with pytest.raises(
        RankError, match=r"line 4, in <module>: 1 / \(rank - 1\)\nZeroDivisionError"
    ):
        run(shell, "%%ranks 2\nx = 1\n\n1 / (rank - 1)")


def test_ranks_stops_a_cell_that_hangs(shell):
    with pytest.raises(
        RankError,
        match=r"(?s)did not finish within 2 s.*rank 0 stood in .*line 3, in <module>: dist.barrier\(\)",
    ):
        run(
            shell,
            "%%ranks 2 --timeout 2\nif rank == 0:\n    dist.barrier()\nelse:\n    import time; time.sleep(60)",
        )


def test_a_syntax_error_is_found_before_any_rank_starts(shell):
    with pytest.raises(SyntaxError):
        run(shell, "%%ranks\nx = = 1")


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
    """Jupyter kills a kernel that takes more than 2.5 s to leave, and what is killed
    leaves its folders behind.
    """
    manager, client = start_new_kernel()
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
    fresh_kernel(
        path, extension, LAUNCHES, "print(signal.getsignal(signal.SIGTERM) == before)"
    )
    assert capsys.readouterr().out.splitlines()[-1] == str(kept)
