"""The optimizer's state is of other parameters

Run:    python lessons/failures/optimizer_of_other_parameters.py
Text:   ValueError: loaded state dict contains a parameter group that doesn't match the size of
        optimizer's group
Text:   ValueError: loaded state dict has a different number of parameter groups
Cause:  The checkpoint was saved by an optimizer with other parameters than today's: layers were
        frozen and are not any more, a layer was added, a parameter group for weight decay was split
        off, or the model is another one.
Fix:    Build the model and the optimizer as they were at the time of saving, load, and only then
        unfreeze and add a parameter group with `optimizer.add_param_group`. Or do not load the
        optimizer's state: the next steps then start with new moments, which a short warm-up
        softens.
Lesson: 9
Source: https://github.com/STVIR/pysot/issues/92
Source: https://github.com/kohya-ss/sd-scripts/issues/378
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
saved = torch.optim.AdamW(model[1].parameters()).state_dict()  # the head only
torch.optim.AdamW(model.parameters()).load_state_dict(saved)
