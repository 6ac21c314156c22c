"""Cells that expect a failure, and cells that run in their own kernel."""

import io
import re
import subprocess
from contextlib import contextmanager, redirect_stderr

from ddp_course.ranks.launch import RankError


@contextmanager
def fails(*patterns):
    """Expect the block to fail, with a match for each pattern in its error: show the
    error and go on.

    Raises AssertionError if the block works, or fails with another error. The ranks'
    stderr, such as torch's log lines, is not shown.
    """
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except (Exception, SystemExit) as error:
        text = (
            str(error)
            if isinstance(error, RankError)
            else f"{type(error).__name__}: {error}"
        )
        missing = [pattern for pattern in patterns if not re.search(pattern, text)]
        if missing:
            raise AssertionError(
                f"this was to fail with {missing}, but failed with\n{text}"
            ) from None
        print("\n".join(map(readable, text.splitlines())))
        return
    raise AssertionError("this was to fail, but it worked")


def readable(line):
    """A line of an error; of one that fills pages, its beginning."""
    return line if len(line) < 1000 else f"{line[:300]} … ({len(line):,} characters)"


def fresh_kernel(*cells, timeout=60):
    """Run cells, texts, in a kernel of their own, as after "Restart Kernel"; print what
    they print.

    Raises RuntimeError where a cell raises, with its error, and TimeoutError where the
    last one takes longer than `timeout` seconds; those before it, which import, have a
    minute at least. Either way no process of it is left.
    """
    from jupyter_client.manager import KernelManager

    def show_output(message):
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            print(message["content"]["text"], end="")

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=300)  # a busy machine's
        for number, cell in enumerate(cells, 1):
            limit = timeout if number == len(cells) else max(timeout, 60)
            try:
                reply = client.execute_interactive(
                    cell, allow_stdin=False, timeout=limit, output_hook=show_output
                )["content"]
            except TimeoutError:
                raise TimeoutError(
                    f"the cell did not end within {limit:g} s, and its kernel was stopped"
                ) from None
            if reply["status"] == "error":
                raise RuntimeError(f"{reply['ename']}: {reply['evalue']}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)  # with all processes that it has started
