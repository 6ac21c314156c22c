"""A checkpoint with other things than tensors

Run:    python lessons/failures/weights_only_load_failed.py
Text:   _pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so
        you have two options, do those steps only if you trust the source of the checkpoint.
Text:   WeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed
        global by default. Please use `torch.serialization.add_safe_globals([argparse.Namespace])`
        to allowlist this global if you trust this class/function.
Text:   WeightsUnpickler error: Unsupported global: GLOBAL numpy.core.multiarray._reconstruct was
        not an allowed global by default.
Cause:  Since torch 2.6, `torch.load` reads tensors and plain values only, because a pickle can run
        any code. The checkpoint holds something else: parsed arguments (`argparse.Namespace`),
        numpy's random state or a numpy number, a configuration object, a whole model.
Which:  The line `Unsupported global: GLOBAL ...` names the class. If you do not know why your
        checkpoint should hold it, somebody else's file may do more than load: lesson 9 shows one.
Fix:    Save plain values: `vars(args)`, `float(best)`, lists. For files that exist already and that
        you wrote yourself, allow the named classes with
        `torch.serialization.add_safe_globals([...])`, or pass `weights_only=False` once and save
        them again.
Lesson: 9
Source: https://github.com/huggingface/transformers/issues/34631
Source: https://github.com/huggingface/trl/issues/3247
"""

import argparse
import io

import torch

file = io.BytesIO()
torch.save({"step": 3, "args": argparse.Namespace(lr=1e-3)}, file)
file.seek(0)
torch.load(file)
