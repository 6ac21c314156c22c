"""An evaluation that gives no loss

Run:    python lessons/failures/evaluation_without_a_loss.py
Text:   KeyError: "The `metric_for_best_model` training argument is set to 'eval_loss', which is not
        found in the evaluation metrics.
Text:   KeyError: 'eval_loss'
Cause:  `load_best_model_at_end=True` compares the `eval_loss` of the evaluations, and this one has none.
        Trainer computes it only if it sees labels in the batch, and it looks for the names in the
        forward of the outermost model. peft's wrapper, or a model of your own, hides them.
Which:  `print(trainer.evaluate())` shows the names that exist. Several evaluation sets: the names have
        the set in them, as in `eval_NAME_loss`.
Fix:    `TrainingArguments(label_names=["labels"])`. Or choose a metric that exists:
        `metric_for_best_model="eval_accuracy"`, `"eval_NAME_loss"`.
Lesson: 8
Source: https://github.com/huggingface/transformers/issues/33420
Source: https://github.com/huggingface/sentence-transformers/issues/2749
Source: https://github.com/huggingface/transformers/issues/19957
"""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, **batch):  # which names it takes cannot be seen from here
        outputs = self.linear(batch["inputs"])
        return {"loss": (outputs - batch["labels"]).pow(2).mean(), "outputs": outputs}


rows = [{"inputs": torch.ones(2), "labels": torch.ones(1)}] * 8
arguments = TrainingArguments(
    "runs",
    max_steps=1,
    eval_strategy="steps",
    eval_steps=1,
    save_steps=1,
    load_best_model_at_end=True,
    remove_unused_columns=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows).train()
