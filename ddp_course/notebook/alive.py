"""A line below a slow cell, "running for 12 s", until the cell ends."""

import threading
import time
from uuid import uuid4

from ddp_course.notebook.reader import reader_is_there

PATIENCE = 3  # seconds that a cell may run without the line


def watch_cells(shell):
    """Show the line below each cell, starting with the next one, if a person is
    reading.
    """
    lines = []

    def begin(info):
        if reader_is_there():
            lines.append(Line(shell.kernel))
            lines[-1].start()

    def end(result):
        while lines:
            lines.pop().remove()

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)


class Line(threading.Thread):
    """Counts the seconds of the running cell, on the page only.

    In the saved notebook, an output without content remains.
    """

    def __init__(self, kernel):
        super().__init__(daemon=True)
        self.kernel, self.cell = kernel, kernel.get_parent("shell")
        self.display_id, self.is_shown = uuid4().hex, False
        self.turn, self.ended = threading.Lock(), threading.Event()

    def run(self):
        begin = time.monotonic()
        while not self.ended.wait(1):
            seconds = int(time.monotonic() - begin)
            with self.turn:
                if seconds >= PATIENCE and not self.ended.is_set():
                    self._show(f"running for {seconds} s")

    def remove(self):
        with self.turn:
            self.ended.set()
            if self.is_shown:
                self._show("")

    def _show(self, text):
        """Send the front end the line, as an output of the cell, or its new text."""
        kind = "update_display_data" if self.is_shown else "display_data"
        self.is_shown = True
        content = {
            "data": {"text/plain": text} if text else {},
            "metadata": {},
            "transient": {"display_id": self.display_id},
        }
        message = self.kernel.session.msg(kind, content, parent=self.cell)
        socket = self.kernel.iopub_socket
        self.kernel.session.send(socket, message, ident=kind.encode())
