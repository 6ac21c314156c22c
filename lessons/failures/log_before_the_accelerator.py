"""Accelerate's logger before there is an Accelerator

Run:    python lessons/failures/log_before_the_accelerator.py
Text:   RuntimeError: You must initialize the accelerate state by calling either `PartialState()` or
        `Accelerator()` before using the logging utility.
Text:   ValueError: Please make sure to properly initialize your accelerator via `accelerator =
        Accelerator()` before using any functionality from the `accelerate` library.
Cause:  `accelerate.logging.get_logger` prints on the main process only, so it has to know which process
        this is. It asks the state that `Accelerator()` creates, and there is none yet.
Which:  The traceback's last line of your own program is a call of the logger, often in a function that
        runs while modules are imported or arguments are read.
Fix:    Create the Accelerator, or `accelerate.PartialState()`, before the first message. For messages
        before that, use Python's own `logging.getLogger`.
Lesson: 7
Source: https://github.com/huggingface/accelerate/issues/835
"""

from accelerate.logging import get_logger

log = get_logger("train")
log.warning("training begins")
