"""A copy of a model that keeps a result

Run:    python lessons/failures/deepcopy_of_a_result.py
Text:   RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the
        deepcopy protocol at the moment. If you were attempting to deepcopy a module, this may be
        because of a torch.nn.utils.weight_norm usage, see
Cause:  `copy.deepcopy(model)`, for a moving average, a best model or a teacher, meets a tensor that
        belongs to a graph: the module keeps a loss or an activation as an attribute, or
        `weight_norm` computes its weight in each forward.
Fix:    Keep `.detach()`ed results, or none. Copy before the first forward. Replace
        `torch.nn.utils.weight_norm` by `torch.nn.utils.parametrizations.weight_norm`. To keep the
        best model, copy `state_dict()` and not the module.
Lesson: 4
Source: https://github.com/desy-ml/cheetah/issues/225
"""

import copy

import torch
from torch import nn

model = nn.Linear(2, 2)
model.last_output = model(torch.ones(1, 2))
copy.deepcopy(model)
