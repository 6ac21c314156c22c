"""A second Accelerator with another precision, or after a reset

Run:    python lessons/failures/accelerator_of_another_precision.py
Text:   ValueError: AcceleratorState has already been initialized and cannot be changed, restart your
        runtime completely and pass `mixed_precision='bf16'` to `Accelerator()`.
Text:   ValueError: AcceleratorState has already been initialized and cannot be changed, restart your
        runtime completely and pass `cpu=True` to `Accelerator()`.
Text:   AttributeError: `AcceleratorState` object has no attribute `distributed_type`. This happens if
        `AcceleratorState._reset_state()` was called and an `Accelerator` or `PartialState` was not
        reinitialized.
Text:   AttributeError: `PartialState` object has no attribute `_cpu`. This happens if
        `PartialState._reset_state()` was called and an `Accelerator` or `PartialState` was not
        reinitialized.
Cause:  All Accelerators of a process share one state: the process group, the device, the precision. The
        first one decides. It may have been created by Trainer, by TrainingArguments, or in a notebook
        by a cell that you ran before.
Which:  "Cannot be changed": a later Accelerator asks for something else. "Has no attribute": the state
        was thrown away, and an old Accelerator is still in use.
Fix:    Create one Accelerator, with all its arguments, and pass it on. In a notebook, restart the kernel,
        or call `AcceleratorState._reset_state(reset_partial_state=True)` and create everything anew, the
        prepared model included. With Trainer, set the precision in TrainingArguments only.
Lesson: 7
Source: https://github.com/huggingface/accelerate/pull/1431
"""

from accelerate import Accelerator

Accelerator(cpu=True)  # as a cell did that ran before
Accelerator(cpu=True, mixed_precision="bf16")
