"""Whether a person is reading what the running cell shows."""

import sys


def reader_is_there():
    """Whether the cell was sent by a front end that a person sits in front of.

    JupyterLab, Notebook and VS Code allow the cell to ask for input. Papermill, nbval
    and nbconvert do not, because there is no one to answer. False outside of a kernel.
    """
    if "IPython" not in sys.modules:
        return False
    kernel = getattr(sys.modules["IPython"].get_ipython(), "kernel", None)
    if not hasattr(kernel, "get_parent"):
        return False
    request = kernel.get_parent("shell") or {}
    return bool(request.get("content", {}).get("allow_stdin"))
