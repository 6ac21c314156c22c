"""A batch size that DeepSpeed is not told

Run:    not here: it needs a launcher that sets DeepSpeed up
Text:   ValueError: When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of
        training or evaluation dataloaders with `batch_size` attribute returning an integer value or
        alternatively set an integer value in `train_micro_batch_size_per_gpu` in the deepspeed config
        file
Text:   ValueError: At least one of the dataloaders passed to `accelerate.prepare()` has `None` as batch
        size.
Cause:  DeepSpeed wants the batch size when it wraps the model, and Accelerate reads it from the loader
        that is prepared in the same call. The model was prepared alone, or the loader has a batch
        sampler of its own, so its `batch_size` is None.
Fix:    One call for all: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`. Or
        a number before it:
        `accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8`.
        You did not want DeepSpeed? `accelerate config` once chose it: run it again.
Lesson: 13
Source: https://github.com/huggingface/peft/issues/450
Source: https://github.com/huggingface/accelerate/pull/2098
Source: https://github.com/GuHuangAI/ADM-Public/issues/5
"""
