"""What `ddp-course lab` has every new kernel run first, by PYTHONSTARTUP.

A restarted kernel knows neither `%%ranks` nor `checks` until the notebook's first cell
has run. Here it gets a magic, and a note on every name that is not defined, which say
so; `%load_ext ddp_course.notebook` replaces both. In a Python without IPython this does
nothing.
"""


def _point_to_the_first_cell():
    shell = globals().get("get_ipython", lambda: None)()
    if shell is None:
        return
    from IPython.core.error import UsageError

    def ranks(line, cell):
        """Run this cell on ranks, once the notebook's first cell has run."""
        raise UsageError(
            "the kernel is new: run the first cell again (it loads %%ranks), then this one"
        )

    def explain(shell, kind, error, trace, tb_offset=None):
        """Show the error as usual, with a note."""
        error.add_note(
            "The kernel is new, and the course is not loaded: run the notebook's first cell, "
            "then this one."
        )
        shell.showtraceback((kind, error, trace), running_compiled_code=True)

    shell.register_magic_function(ranks, magic_kind="cell")
    shell.set_custom_exc((NameError,), explain)


_point_to_the_first_cell()
del _point_to_the_first_cell
