"""A loss scale that cannot become smaller

Run:    not here: it needs float16 on a GPU
Text:   Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
Text:   [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1
Text:   FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.
Cause:  In float16, DeepSpeed halves the loss scale whenever a gradient is infinite or NaN, and skips
        the step. At 1 it gives up. So every recent step had such a gradient: the model was trained in
        bfloat16, whose numbers reach further than 65504; the loss is NaN; or the learning rate is
        too high.
Which:  Some lines with `OVERFLOW` at the beginning are normal, because the scale starts high. If they
        never stop, print the loss before `backward`: NaN there means the model or the data, not the
        scale.
Fix:    Train in bfloat16 (`"bf16": {"enabled": true}`, `bf16=True` in Trainer) where the GPU has it.
        Otherwise load the weights in float32, lower the learning rate, and clip the gradients.
Lesson: 13
Source: https://github.com/ymcui/Chinese-LLaMA-Alpaca/issues/534
Source: https://github.com/modelscope/ms-swift/issues/4374
Source: https://github.com/yangjianxin1/Firefly/issues/68
"""
