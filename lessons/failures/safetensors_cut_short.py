"""A safetensors file that was cut short

Run:    python lessons/failures/safetensors_cut_short.py
Text:   safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer
Text:   SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered
Text:   SafetensorError: Error while deserializing header: HeaderTooLarge
Cause:  The header says how long the file has to be, and it is shorter: a download or a save was
        interrupted, the disk was full, or another rank was still writing when this one read. With
        `HeaderTooLarge` the file is something else, often git-lfs's pointer of 130 bytes.
Which:  `ls -l` beside the size on the hub. All files right, and it happens now and then: ranks that
        read too early.
Fix:    Delete the file and get it again (`hf download NAME --force-download`, `git lfs pull`). In your
        own program save on rank 0 to another name, `os.replace(temporary, path)`, and a barrier before
        the others load.
Lesson: 9
Source: https://github.com/QwenLM/Qwen/issues/462
Source: https://github.com/Comfy-Org/ComfyUI/issues/6744
Source: https://github.com/codefuse-ai/MFTCoder/issues/20
"""

import os
import tempfile

import torch
from safetensors.torch import load_file, save_file

path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
save_file({"weight": torch.ones(100)}, path)
os.truncate(path, os.path.getsize(path) // 2)  # what a full disk leaves
load_file(path)
