"""To be imported before transformers' Trainer, which then comes without bitsandbytes: that takes seconds.

Trainer imports peft, and peft imports bitsandbytes wherever that is installed. Whoever packs a model into 4 bits
imports it in time, as lesson 11 does; all others need not wait for it.
"""

import logging
import sys

import ddp_course.quick_accelerate  # noqa: F401

hide = "bitsandbytes" not in sys.modules
if hide:
    sys.modules["bitsandbytes"] = None  # an import of it raises ImportError, for which peft is prepared
try:
    import transformers.trainer  # noqa: F401
finally:
    if hide:
        del sys.modules["bitsandbytes"]

# on some CPUs it says for each process that imports it that it looked for another library; it needs none
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
