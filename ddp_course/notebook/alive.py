"""A line beneath a cell that runs for long, "running for 12 s", until it shows something.

The saved notebook is to keep no trace of it, but a front end drops one output only
together with all others of its cell. So a cell that has shown nothing yet gets the line
and the request to clear it before the next output. A cell that has shown something, and
then nothing for longer, gets a line that leaves an empty output behind.

What a cell shows comes from threads, libraries and forked processes, too. So it is read
where the front end reads it: from the kernel's IOPub socket.
"""

import sys
import threading
import time
from uuid import uuid4

from ipykernel.connect import get_connection_file
from jupyter_client import BlockingKernelClient

from ddp_course.notebook.reader import reader_is_there

SILENCE = 3.0  # seconds after which a cell that has shown nothing gets the line
LONG_SILENCE = 10.0  # and one that has shown something
OUTPUTS = ("stream", "display_data", "execute_result", "error", "clear_output")


def watch_cells(shell):
    """Show the line from the next cell on, where a person is reading."""
    running = [thread.name for thread in threading.enumerate()]
    if reader_is_there() and Watcher.__name__ not in running:
        watcher = Watcher(shell.kernel)
        shell.events.register("pre_run_cell", watcher.begin)
        shell.events.register("post_run_cell", watcher.end)
        watcher.start()


class Watcher(threading.Thread):
    """Follows what the kernel sends, and has the running cell's line count."""

    def __init__(self, kernel):
        super().__init__(name=type(self).__name__, daemon=True)
        self.kernel = kernel
        self.line = None  # of the running cell, where a person waits for it
        self.cell = None  # that was seen to begin, by its request's id

    def begin(self, info):
        """Called by IPython before each cell."""
        if reader_is_there():
            self.line = Line(self.kernel, self.kernel.get_parent("shell"))

    def end(self, result):
        """Called by IPython after each cell."""
        if self.line:
            self.line.remove()
        self.line = None

    def run(self):
        client = BlockingKernelClient(connection_file=get_connection_file())
        client.load_connection_file()
        socket = client.connect_iopub()
        while True:
            if socket.poll(250):  # milliseconds
                self._follow(socket.recv_multipart())
            line = self.line
            if line and line.cell == self.cell:
                line.count()

    def _follow(self, frames):
        header, parent, *content = frames[frames.index(b"<IDS|MSG>") + 2 :]
        header = self.kernel.session.unpack(header)
        cell = self.kernel.session.unpack(parent).get("msg_id")
        if header["msg_type"] == "execute_input":
            self.cell = cell
        line = self.line
        if line and line.cell == cell:
            line.follow(header["msg_type"], header["msg_id"], content)


class Line:
    """The line beneath one cell, and what is known of the cell's outputs.

    `remove` is called in the main thread, all else in the Watcher's.
    """

    def __init__(self, kernel, request):
        self.kernel, self.request = kernel, request
        self.cell = request["header"]["msg_id"]
        self.begun = self.latest = time.monotonic()
        self.shown = False  # whether the cell has shown anything
        self.display_id, self.text = None, ""  # of the line, while it is there
        self.own = set()  # the messages sent here, by their ids
        self.clearing, self.overtaken = None, []
        self.last, self.last_seen = None, threading.Event()
        self.turn, self.ended = threading.Lock(), False

    def count(self):
        """Show the line when it is time to, and then the seconds."""
        with self.turn:
            now = time.monotonic()
            if _asks_for_input():  # the front end keeps the answer among the outputs
                self.shown, self.latest = True, now
            silence = LONG_SILENCE if self.shown else SILENCE
            text = f"running for {int(now - self.begun)} s"
            if self.ended:
                return
            if self.display_id is None and now - self.latest > silence:
                self._appear(text)
            elif self.display_id and text != self.text:
                self._send(self._message("update_display_data", self._display(text)))
            self.text = text

    def _appear(self, text):
        self.display_id = uuid4().hex
        self._send(self._message("display_data", self._display(text)))
        if not self.shown:
            clear = self._message("clear_output", {"wait": True})
            self.clearing = clear["msg_id"]
            self._send(clear)

    def follow(self, kind, number, content):
        """Take note of a message about this cell, on its way to the front end."""
        if number == self.last:
            self.last_seen.set()
        if number == self.clearing:
            self._show_overtaken()
        if number in self.own or kind == "status":
            return
        self.latest = time.monotonic()
        if kind in OUTPUTS:
            if not self.shown:
                self.display_id = None  # the line has been cleared for this output
            self.shown = True
            if self.clearing:
                self.overtaken.append((kind, content))

    def remove(self):
        """Take the line away: without a trace, where the cell has shown nothing."""
        with self.turn:
            self.ended = True
        if self.display_id:
            sys.stdout.flush()
            sys.stderr.flush()
            empty = self._message("update_display_data", self._display())
            self.last = empty["msg_id"]
            self._send(empty)
            # once this has come by, so has all that the cell has shown
            if self.last_seen.wait(1) and not self.shown:
                self._send(self._message("clear_output", {"wait": False}))

    def _show_overtaken(self):
        """Show again what was on its way when the line was shown: with the line, it
        would be cleared before the next output.
        """
        self.clearing, unpack = None, self.kernel.session.unpack
        for kind, (metadata, content, *buffers) in self.overtaken:
            copy = self._message(kind, unpack(content), unpack(metadata))
            self._send(copy, buffers)

    def _display(self, text=None):
        data = {"text/plain": text} if text else {}
        transient = {"display_id": self.display_id}
        return {"data": data, "metadata": {}, "transient": transient}

    def _message(self, kind, content, metadata=None):
        session = self.kernel.session
        message = session.msg(kind, content, parent=self.request, metadata=metadata)
        self.own.add(message["msg_id"])
        return message

    def _send(self, message, buffers=None):
        """Send a message to the front end, as one of this cell's."""
        topic = message["msg_type"].encode()
        socket = self.kernel.iopub_socket
        self.kernel.session.send(socket, message, ident=topic, buffers=buffers)


def _asks_for_input():
    """Whether the main thread waits for an answer of the reader's."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        if frame.f_code.co_name == "_input_request":
            return True
        frame = frame.f_back
    return False
