"""ZeRO 1 or 2 for a model that is not trained

Run:    not here: the engine takes too long to start for a small program
Text:   AssertionError: zero stage 2 requires an optimizer
Text:   AssertionError: zero stage 1 requires an optimizer
Cause:  Stages 1 and 2 divide the optimizer's state and the gradients, so `deepspeed.initialize` needs an
        optimizer: from you, or from `"optimizer"` in the configuration. There is none: the model is only
        evaluated, or it is the reference or reward model of DPO or PPO, prepared with the
        configuration of the trained one.
Fix:    For a model that is not trained: stage 0, or no DeepSpeed at all; stage 3 if it does not fit on
        one GPU, as it divides the weights and works without an optimizer. For one that is trained:
        pass `optimizer=`, or add an `"optimizer"` section; with accelerate, prepare the model and the
        optimizer in one call.
Lesson: 13
Source: https://github.com/hiyouga/LlamaFactory/issues/1243
Source: https://github.com/EleutherAI/gpt-neox/issues/987
Source: https://github.com/KyanChen/RSPrompter/issues/110
"""
