"""DeepSpeed's configuration against TrainingArguments

Run:    python lessons/failures/deepspeed_config_against_trainer.py
Text:   ValueError: Please correct the following DeepSpeed config values that mismatch
        TrainingArguments values:
Text:   - ds train_micro_batch_size_per_gpu=8 vs hf per_device_train_batch_size=4
Text:   - ds gradient_accumulation_steps=1 vs hf gradient_accumulation_steps=8
Text:   - ds train_batch_size=32 vs hf train_batch_size (calculated)=64
Text:   The easiest method is to set these DeepSpeed config values to 'auto'.
Cause:  The batch size, the accumulation, the learning rate or the precision is in both places, the
        DeepSpeed configuration and `TrainingArguments`, with different values. `train_batch_size`
        is a product, with the number of ranks in it: it differs when you start another number of
        ranks.
Fix:    Write `"auto"` in the DeepSpeed configuration for each value that the message lists, and set
        it in `TrainingArguments` only.
Lesson: 13
Source: https://github.com/huggingface/transformers/issues/29348
Source: https://github.com/hiyouga/LLaMA-Factory/issues/1116
"""

from types import SimpleNamespace

from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

arguments = TrainingArguments("runs", per_device_train_batch_size=4, use_cpu=True)
config = HfTrainerDeepSpeedConfig(
    {"train_micro_batch_size_per_gpu": 8, "train_batch_size": "auto"}
)
config.trainer_config_process(arguments)
model = SimpleNamespace(config=SimpleNamespace(hidden_size=8))
config.trainer_config_finalize(arguments, model, 10)
