"""A model with device_map="auto" in a distributed run

Run:    torchrun --nproc_per_node 2 lessons/failures/device_map_auto_in_a_distributed_run.py
Text:   ValueError: You can't train a model that has been loaded with `device_map='auto'` in any
        distributed mode. Please rerun your script specifying `--num_processes=1` or by launching
        with `python {{myscript.py}}`.
Cause:  `device_map="auto"` divides the layers of one model over all GPUs of the machine, for one
        process. A distributed run starts one process per GPU, and each of them would want all GPUs.
Fix:    Load a whole model per rank: `device_map={"": local_rank}`, also with `load_in_4bit`. If one
        GPU cannot hold the model, shard it with FSDP or ZeRO-3 and leave `device_map` out; or start
        one process with `python` instead of torchrun.
Lesson: 11
Source: https://github.com/huggingface/accelerate/issues/1840
Source: https://github.com/huggingface/transformers/issues/31557
"""

from accelerate import Accelerator
from torch import nn

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
model.hf_device_map = {"0": 0, "1": 1}  # as from_pretrained leaves it
Accelerator(cpu=True).prepare(model)
