"""To be imported with Accelerate, which then leaves DeepSpeed alone: that takes a second.

Whenever Accelerate unwraps a model, it imports DeepSpeed, where that is installed, to see whether the model is one of its
engines. It can be one only where DeepSpeed has been imported already.
"""

import sys

import accelerate.utils.other

accelerate.utils.other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
