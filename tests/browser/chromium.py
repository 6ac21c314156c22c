"""A real browser for the tests in this folder, and JupyterLab in it, as a person uses it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
from conftest import COURSE
from playwright.sync_api import Error, sync_playwright

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]
FLAGS = ["--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
SCREENSHOTS = COURSE / "runs" / "browser"  # of tests that have failed
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
PATIENCE = 120_000  # ms, for what takes a second on a quiet machine

# a run that is terminated ends its servers, too, as at Ctrl-C
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="module")  # each file imports it, and only one may run
def browser():
    """Debian's or Ubuntu's Chromium or Chrome; else the one that Playwright has
    installed.
    """
    if os.getuid() == 0:
        FLAGS.append("--no-sandbox")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        except Error as error:
            fix = "apt-get install chromium, or .venv/bin/playwright install chromium"
            pytest.fail(f"no browser: {fix}\n{error}", pytrace=False)
        yield found
        found.close()


@pytest.fixture
def context(browser, request):
    """A browser that remembers nothing. If its test fails, its pages are photographed
    into runs/browser.
    """
    failed = request.session.testsfailed
    found = browser.new_context(viewport={"width": 1400, "height": 900})
    found.set_default_timeout(PATIENCE)
    yield found
    if request.session.testsfailed > failed:
        for number, page in enumerate(found.pages):
            photograph(page, f"{request.node.name} {number}")
    found.close()


def photograph(page, name):
    """Keep a picture of a page in runs/browser."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    file = re.sub(r"\W+", "-", name).strip("-")
    page.screenshot(path=SCREENSHOTS / f"{file}.png")


# ---- JupyterLab ----


class Notebook:
    """A notebook that is open in JupyterLab.

    context: the browser's. server: a Server of test_lab. file: the notebook on the disk.
    folder: the one that the server serves.
    """

    def __init__(self, context, server, file, folder):
        self.file = file
        place = file.relative_to(folder)
        self.page = context.new_page()
        # in a workspace of its own, so that no other tab is opened again
        workspace = f"/lab/workspaces/{file.stem}/tree/{place}"
        address = f"http://127.0.0.1:{server.port}{workspace}?token={server.token}"
        self.page.goto(address)
        # what is run before that can be lost
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()

    def menu(self, name, entry):
        """Choose an entry of a menu of JupyterLab's."""
        self.page.locator(".lm-MenuBar-item", has_text=name).first.click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(rf"^{entry}")).click()

    def button(self, command):
        """Click a button above the notebook."""
        self.page.locator(f'.jp-Toolbar [data-command="{command}"]:visible').click()

    def accept(self):
        """Say yes in a dialog."""
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def run_all(self):
        """Clear all outputs, and run all cells; return when the last one has run, or one
        has failed: the code cells, as they are saved then.
        """
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")
        deadline = time.monotonic() + 1500
        while True:
            self.page.wait_for_timeout(1000)
            self.page.wait_for_selector(IDLE, timeout=1_500_000)
            cells = self.saved()
            if errors_in(cells) or all(cell["execution_count"] for cell in cells):
                return cells
            assert time.monotonic() < deadline, "not all cells have run"

    def saved(self):
        """Save the notebook; return its code cells as they are on the disk."""
        before = self.file.stat().st_mtime_ns
        self.button("docmanager:save")
        notebook, deadline = None, time.monotonic() + 60
        while notebook is None:
            assert time.monotonic() < deadline, "the notebook was not saved"
            self.page.wait_for_timeout(100)
            if self.file.stat().st_mtime_ns != before:
                with suppress(json.JSONDecodeError):  # it is being written
                    notebook = json.loads(self.file.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [cell for cell in code if "".join(cell["source"]).strip()]

    def cell(self, text):
        """The code cell that has a text in its source."""
        source = self.page.locator(".jp-InputArea", has_text=text)
        return self.page.locator(".jp-CodeCell").filter(has=source).first

    def type_into(self, cell, source):
        """Replace what is in a cell by typing, and run it."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")

    def run(self, cell):
        """Run a cell again."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def wait_for_text(self, cell, text):
        """Wait until a cell's output has a text; return the output's place."""
        output = cell.locator(".jp-OutputArea", has_text=text).first
        output.wait_for()
        return output


def errors_in(cells):
    """The errors among the outputs of cells, as texts."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    errors = [output for output in outputs if output["output_type"] == "error"]
    return [f"{error['ename']}: {error['evalue']}" for error in errors]


def course_folder(folder):
    """A new course folder, as `ddp-course start` makes it."""
    command = [sys.executable, "-m", "ddp_course.cli.command", "start", str(folder)]
    env = os.environ | {"PYTHONPATH": str(COURSE)}
    subprocess.run(command, check=True, env=env, capture_output=True, cwd=COURSE)
    return folder


@contextmanager
def nothing_left(mark):
    """All processes that have the mark in their environment have ended at the end."""
    yield
    gone = time.monotonic() + 30
    while left := [process for process in psutil.process_iter() if has(process, mark)]:
        if time.monotonic() > gone:
            lines = [" ".join(process.cmdline()) for process in left]
            raise AssertionError("these processes are left:\n" + "\n".join(lines))
        time.sleep(0.2)


def has(process, mark):
    """Whether a process that is not a zombie has a text in its environment."""
    try:
        living = process.status() != psutil.STATUS_ZOMBIE
        return living and mark in process.environ().values()
    except psutil.Error:
        return False
