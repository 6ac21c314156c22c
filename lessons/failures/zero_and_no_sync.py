"""no_sync under ZeRO 2 and 3

Run:    not here: the engine takes too long to start for a small program
Text:   AssertionError: no_sync context manager is incompatible with gradient partitioning logic of
        ZeRO stage 3
Text:   AssertionError: no_sync context manager is incompatible with gradientpartitioning logic of
        ZeRo stage 2
Text:   AssertionError: It is illegal to call Engine.step() inside no_sync context manager
Cause:  `no_sync` postpones the reduction of gradients. From stage 2 on each rank keeps only its
        part of the gradients, so it must reduce them in each backward. DeepSpeed 0.16.0 raises
        here, and 0.15.4 did not. Trainer and Accelerate called it for accumulation.
Fix:    Update transformers and accelerate, which leave `no_sync` out under ZeRO. In a loop of your
        own, call `engine.backward` and `engine.step` for each micro-batch, and let
        `gradient_accumulation_steps` of the configuration count. Or use ZeRO 1.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/6793
Source: https://github.com/huggingface/transformers/pull/35157
"""
