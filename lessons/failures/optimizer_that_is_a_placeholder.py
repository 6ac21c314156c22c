"""DeepSpeed's placeholder in place of an optimizer

Run:    not here: it needs a launcher that sets DeepSpeed up
Text:   AttributeError: 'DummyOptim' object has no attribute 'step'
Text:   AttributeError: 'DummyScheduler' object has no attribute 'step'
Cause:  With an `"optimizer"` in DeepSpeed's configuration, Trainer and Accelerate hold a `DummyOptim`
        until `accelerator.prepare` lets DeepSpeed make the real one. Here nobody has replaced it:
        DeepSpeed was not set up in this run, or the optimizer was not prepared in the same call as the
        model.
Which:  One GPU, started with `python`: there Trainer may step without DeepSpeed. Your own loop: is
        `optimizer` what `prepare` has returned? A scheduler that was made from the placeholder also
        keeps it.
Fix:    Start with `accelerate launch`, `deepspeed` or torchrun, also for one GPU. Prepare all in one
        call: `model, optimizer, loader, scheduler = accelerator.prepare(...)`. Or take `"optimizer"` and
        `"scheduler"` out of the configuration and make them in the program.
Lesson: 13
Source: https://github.com/huggingface/transformers/issues/24640
Source: https://github.com/huggingface/transformers/issues/26148
Source: https://github.com/modelscope/ms-swift/issues/1775
"""
