"""A distributed checkpoint without one of the keys

Run:    python lessons/failures/key_missing_in_dcp.py
Text:   RuntimeError: Missing key in checkpoint state_dict: head.weight.
Text:   torch.distributed.checkpoint.api.CheckpointException: CheckpointException
        ranks:dict_keys([0])
Text:   FileNotFoundError: [Errno 2] No such file or directory: 'checkpoint/.metadata'
Cause:  `torch.distributed.checkpoint.load` fills the state dict that you give it, and the
        checkpoint lacks one of its keys: the model has a new layer, the names differ (`module.`,
        `_orig_mod.`, a level such as `"model"`), or the optimizer's state was not saved.
        `.metadata` is written last, by rank 0: without it the save did not end, or each machine
        wrote to its own disk.
Which:  `FileSystemReader(path).read_metadata().state_dict_metadata.keys()` lists what is there.
Fix:    Build the dict in the same way for both, with `get_model_state_dict`. Ask only for what is
        there, or pass `DefaultLoadPlanner(allow_partial_load=True)`. Save to a disk that all
        machines share.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/148252
Source: https://github.com/pytorch/pytorch/issues/99976
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp

folder = tempfile.mkdtemp()
dcp.save({"body.weight": torch.ones(2)}, checkpoint_id=folder)
state = {"body.weight": torch.zeros(2), "head.weight": torch.zeros(2)}
dcp.load(state, checkpoint_id=folder)
