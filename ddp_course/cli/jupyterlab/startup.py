"""What `ddp-course lab` has every new kernel run first, by PYTHONSTARTUP.

A restarted kernel does not know `%%ranks` until the notebook's first cell has run. Here
it gets one that says so; `%load_ext ddp_course.notebook` replaces it. In a Python
without IPython this does nothing.
"""


def _register_ranks():
    shell = globals().get("get_ipython", lambda: None)()
    if shell is None:
        return
    from IPython.core.error import UsageError

    def ranks(line, cell):
        """Run this cell on ranks, once the notebook's first cell has run."""
        raise UsageError(
            "the kernel is new: run the first cell again (it loads %%ranks), then this one"
        )

    shell.register_magic_function(ranks, magic_kind="cell")


_register_ranks()
del _register_ranks
