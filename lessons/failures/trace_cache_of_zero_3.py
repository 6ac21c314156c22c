"""ZeRO-3's note that its trace does not fit

Run:    not here: DeepSpeed's ZeRO-3 fetches ahead on GPUs only
Text:   Invalidate trace cache @ step 0: expected module 0, but got module 6
Text:   Invalidate trace cache @ step 10: expected module 11, but got module 19
Text:   Invalidate trace cache @ step 0 and module 740: cache has only 0 modules
Cause:  ZeRO-3 records in which order the modules run, to fetch their weights ahead. This step ran others:
        evaluation or generation between training steps, a second model, experts, a branch that depends on
        the data. DeepSpeed records anew, so results are right; it only fetches later.
Which:  It is an error only if the job hangs afterwards: then the ranks ran different modules, and each
        waits in a gather that the others never join. The next step's loss is printed: no error.
Fix:    If nothing hangs, ignore it, or use ZeRO-2 where the model fits. If it hangs, let all ranks run
        the same modules in each step, and name modules with such branches (experts) to
        `deepspeed.utils.set_z3_leaf_modules`. For generation, pass `synced_gpus=True`.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/6870
Source: https://github.com/deepspeedai/DeepSpeed/issues/5006
Source: https://github.com/deepspeedai/DeepSpeed/issues/5662
Source: https://github.com/huggingface/open-r1/issues/387
"""
