"""Since which step of its optimizer a rank's parameters have been NaN, for a note.

A loss that is NaN raises no error: the loop goes on, and the numbers that come home are
NaN as well. After one step with such a gradient, all parameters that it reaches are NaN.
"""

import ctypes
from pathlib import Path

FORMS = {"float32": ctypes.c_float, "float64": ctypes.c_double}


def note_first_nan(path):
    """Write the number of the first such step to a file, as soon as there is one. It
    looks at the last number of the last parameter, where it lies in memory: an operation
    of torch's would be seen by what counts operations.
    """
    from torch import Tensor, nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = [0]

    def after_step(optimizer, *_):
        steps[0] += 1
        for group in optimizer.param_groups:
            if not group["params"]:
                continue
            last = group["params"][-1]
            form = FORMS.get(str(last.dtype).removeprefix("torch."))
            plain = type(last) in (Tensor, nn.Parameter) and last.device.type == "cpu"
            if form and plain and last.numel() and not Path(path).exists():
                reach = sum((n - 1) * s for n, s in zip(last.shape, last.stride()))
                place = last.data_ptr() + reach * ctypes.sizeof(form)
                value = form.from_address(place).value
                if value != value:
                    Path(path).write_text(str(steps[0]))

    register_optimizer_step_post_hook(after_step)


def note(folder, ranks):
    """A line on what the ranks have written to a folder, rank 0 to "0.nan"; "" if none of
    them has.
    """
    first = {}
    for rank in range(ranks):
        path = Path(folder, f"{rank}.nan")
        if path.exists():
            first.setdefault(int(path.read_text()), []).append(f"rank {rank}")
    if not first:
        return ""
    step = min(first)
    return f"note: after step {step}, parameters are NaN on {', '.join(first[step])}"
