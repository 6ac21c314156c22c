"""A model that returns no loss to Trainer

Run:    python lessons/failures/no_loss_from_the_model.py
Text:   ValueError: The model did not return a loss from the inputs, only the following keys: logits.
        For reference, the inputs it received are x.
Text:   ValueError: The model did not return a loss from the inputs, only the following keys:
        logits,past_key_values. For reference, the inputs it received are input_ids,attention_mask.
Cause:  Trainer takes the loss from the model's output, and the model computes one only if it gets
        labels. The batch has none: the column has another name than `labels` or `label`, the data
        collator does not make them, or Trainer removed the column because `forward` has no such
        argument.
Which:  The message lists what the model received. If `labels` is missing, print
        `next(iter(trainer.get_train_dataloader())).keys()`.
Fix:    Name the column `labels`. For a language model, `DataCollatorForLanguageModeling(tokenizer,
        mlm=False)` copies the inputs as labels. For a model of your own, return `{"loss": ...}` or
        give Trainer a `compute_loss_func`; `remove_unused_columns=False` keeps the other columns.
Lesson: 8
Source: https://github.com/huggingface/transformers/issues/34392
Source: https://github.com/artidoro/qlora/issues/179
"""

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.layer(x)}


samples = [{"x": torch.randn(4)} for _ in range(8)]
arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
Trainer(Model(), arguments, train_dataset=samples).train()
