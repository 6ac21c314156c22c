"""A gradient that ZeRO gets twice in a step

Run:    not here: it takes an engine and a checkpointed model
Text:   AssertionError: The parameter 447 has already been reduced. Gradient computed twice for this
        partition. Multiple gradient reduction is currently not supported
Cause:  Under ZeRO 1 and 2, each gradient is reduced once per step, when it is ready, and this one became
        ready twice: a layer is used twice in a step and checkpointed in the reentrant way, there are
        two forward passes before one `backward`, or `backward` was called twice without `step`.
Which:  Without gradient checkpointing it works: then it is the reentrant kind. DDP says `Expected to
        mark a variable ready only once` for the same mistake.
Fix:    `gradient_checkpointing_kwargs={"use_reentrant": False}` in Trainer. For two passes, add the
        losses and call `engine.backward` once.
Lesson: 13
Source: https://github.com/texttron/tevatron/issues/108
"""
