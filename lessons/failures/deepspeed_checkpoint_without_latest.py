"""A folder that is no checkpoint of DeepSpeed

Run:    python lessons/failures/deepspeed_checkpoint_without_latest.py
Text:   ValueError: Unable to find 'latest' file at …/latest
Text:   Unable to find latest file at …/latest, if trying to load latest checkpoint please ensure
        this file exists or pass an explicit checkpoint tag when loading a checkpoint.
Text:   FileNotFoundError: Directory '…/global_step100' doesn't exist
Text:   AssertionError: No ZeRO files found in …
Cause:  DeepSpeed writes a checkpoint into `FOLDER/global_stepN/`, and the name of the newest one into
        `FOLDER/latest`. The path given is one level too deep or too high, the save did not end, or it
        is a checkpoint of the model alone (`save_model`), without the parts of the ranks.
Fix:    Give the folder that holds `latest`, or the tag: `load_checkpoint(folder, tag="global_step100")`.
        All ranks must call `save_checkpoint`, not rank 0 alone.
Lesson: 13
Source: https://github.com/huggingface/transformers/issues/12427
Source: https://github.com/deepspeedai/DeepSpeed/issues/6699
"""

import tempfile

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

get_fp32_state_dict_from_zero_checkpoint(tempfile.mkdtemp())
