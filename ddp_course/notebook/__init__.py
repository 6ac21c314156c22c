"""What a notebook cell calls: `%load_ext ddp_course.notebook`, show, compare, table,
fails, and the course's pictures.
"""

from ddp_course.notebook.expect import fails, fresh_kernel
from ddp_course.notebook.magics import load_ipython_extension
from ddp_course.notebook.sources import compare, show, table

__all__ = [
    "compare",
    "fails",
    "fresh_kernel",
    "load_ipython_extension",
    "show",
    "table",
]
