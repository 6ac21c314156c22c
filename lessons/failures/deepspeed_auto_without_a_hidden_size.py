"""DeepSpeed's auto for a model that does not tell its width

Run:    python lessons/failures/deepspeed_auto_without_a_hidden_size.py
Text:   ValueError: The model's config file has neither `hidden_size` nor `hidden_sizes` entry, therefore
        it's not possible to automatically fill out the following `auto` entries in the DeepSpeed config
        file
Cause:  Trainer computes `"auto"` for three sizes of ZeRO from `model.config.hidden_size`, and this
        model's configuration has none: a model of image and text, whose parts have one each
        (`text_config`), an encoder-decoder of two models, or a model of your own.
Fix:    Write numbers in place of `"auto"` for the entries that the message lists. With a width of h:
        `reduce_bucket_size` h * h, `stage3_prefetch_bucket_size` 0.9 * h * h and
        `stage3_param_persistence_threshold` 10 * h. Or set `model.config.hidden_size = h` before the
        Trainer, or take a newer transformers, which also looks into `text_config`.
Lesson: 13
Source: https://github.com/hiyouga/LlamaFactory/issues/4754
Source: https://github.com/huggingface/transformers/issues/22176
Source: https://github.com/huggingface/transformers/pull/33829
"""

from types import SimpleNamespace

from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

arguments = TrainingArguments("runs", use_cpu=True)
stage = {"stage": 3, "reduce_bucket_size": "auto"}
config = HfTrainerDeepSpeedConfig({"zero_optimization": stage})
config.trainer_config_process(arguments)
config.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace()), 10)
