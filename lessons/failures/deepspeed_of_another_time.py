"""A DeepSpeed that is older than torch

Run:    python lessons/failures/deepspeed_of_another_time.py
Text:   ImportError: cannot import name 'log' from 'torch.distributed.elastic.agent.server.api'
Text:   ModuleNotFoundError: No module named 'torch._six'
Cause:  DeepSpeed uses names inside of torch that torch may change. torch 2.4 has `logger` where
        DeepSpeeds from before April 2024 import `log`, and torch 2.0 no longer has `torch._six`. It
        breaks each program that imports DeepSpeed, also trl and older versions of Accelerate, which
        import it when it is there.
Which:  The lines above the error name the package that imports: `torch._six` may also be in old
        versions of apex, timm or Megatron.
Fix:    `pip install -U deepspeed`: 0.14.4 and later have neither. If you do not use it, `pip uninstall
        deepspeed`.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/5337
Source: https://github.com/huggingface/alignment-handbook/issues/180
Source: https://github.com/hiyouga/LlamaFactory/issues/4271
Source: https://github.com/deepspeedai/DeepSpeed/issues/2845
"""

# as deepspeed/elasticity/elastic_agent.py had it
from torch.distributed.elastic.agent.server.api import log

log.info("never printed")
