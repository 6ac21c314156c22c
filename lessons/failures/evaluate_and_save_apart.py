"""The best model, with evaluations and saves at other times

Run:    python lessons/failures/evaluate_and_save_apart.py
Text:   ValueError: --load_best_model_at_end requires the save and eval strategy to match, except when
        --save_strategy="best", but found - Evaluation strategy: IntervalStrategy.EPOCH - Save
        strategy: SaveStrategy.STEPS
Text:   ValueError: --load_best_model_at_end requires the saving steps to be a round multiple of the
        evaluation steps, but found 500, which is not a round multiple of 200.
Cause:  Trainer can load the best model only if each evaluation has a checkpoint of the same step.
Fix:    Set `eval_strategy` and `save_strategy` alike, and `save_steps` to `eval_steps` or a multiple
        of it. If you do not need the best one, `load_best_model_at_end=False`.
Lesson: 8
Source: https://github.com/zjunlp/DeepKE/issues/394
Source: https://github.com/hiyouga/LlamaFactory/issues/8133
"""

from transformers import TrainingArguments

times = {"eval_strategy": "epoch", "save_strategy": "steps"}
TrainingArguments("out", load_best_model_at_end=True, use_cpu=True, **times)
