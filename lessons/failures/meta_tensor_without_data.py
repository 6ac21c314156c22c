"""A model that still has no data

Run:    python lessons/failures/meta_tensor_without_data.py
Text:   NotImplementedError: Cannot copy out of meta tensor; no data! Please use
        torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a
        different device.
Text:   NotImplementedError: Cannot copy out of meta tensor; no data!
Cause:  Some parameters are on the meta device: they have a shape and no values. `from_pretrained`
        with `device_map` leaves there what it offloads to the disk or does not find in the
        checkpoint, and `init_empty_weights` or `torch.device("meta")` everything. Then somebody,
        such as Trainer, calls `.to(device)`.
Which:  `[n for n, p in model.named_parameters() if p.is_meta]` names them. All: nothing was loaded.
        Some: they are missing in the checkpoint, or the GPUs' memory was too small for them and
        they were offloaded.
Fix:    Load without `device_map` for training, or with `device_map={"": local_rank}`. If you build
        on meta on purpose, as FSDP does, shard first, then `model.to_empty(device=device)`, and
        then load or initialize every parameter and buffer.
Lesson: 12
Source: https://github.com/hiyouga/LlamaFactory/issues/3062
Source: https://github.com/tloen/alpaca-lora/issues/368
"""

from torch import nn

nn.Linear(2, 2, device="meta").to("cpu")
