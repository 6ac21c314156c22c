"""To be imported with Accelerate, which then leaves DeepSpeed and datasets alone: they take seconds.

Whenever Accelerate unwraps a model, it imports DeepSpeed, where that is installed, to see whether the model is one of its
engines; whenever it prepares a DataLoader, it imports datasets, to see whether its data are of theirs. They can be so only
where these libraries have been imported already.
"""

import sys

import accelerate.data_loader
import accelerate.utils.other

accelerate.data_loader.is_datasets_available = lambda: "datasets" in sys.modules
accelerate.utils.other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
