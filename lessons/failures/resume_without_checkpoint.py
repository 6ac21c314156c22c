"""Nothing to resume from

Run:    python lessons/failures/resume_without_checkpoint.py
Text:   ValueError: Can't find a valid checkpoint at runs/checkpoint-500
Text:   ValueError: No valid checkpoint found in output directory (./outputs/)
Cause:  `trainer.train(resume_from_checkpoint=...)` needs a folder `checkpoint-N` with the weights
        and `trainer_state.json`. Here the path does not exist on this machine, it is the final
        model rather than a checkpoint, it holds adapters only, or the save was interrupted. `True`
        looks for the newest `checkpoint-N` in `output_dir` and finds none.
Which:  `ls` the folder on every machine: without a shared disk only the first one has it. Without
        `trainer_state.json` it is a model: load it with `from_pretrained` and start a new run.
Fix:    Pass the folder's full path, on a disk that all machines share. For a first start,
        `resume_from_checkpoint=get_last_checkpoint(output_dir)`, which is None if there is none.
        Keep more than one with `save_total_limit=2`.
Lesson: 8
Source: https://github.com/hiyouga/LlamaFactory/issues/7614
Source: https://github.com/huggingface/transformers/issues/15341
"""

from torch import nn
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("runs", use_cpu=True)
trainer = Trainer(nn.Linear(2, 2), arguments, train_dataset=[{"x": 1}])
trainer.train(resume_from_checkpoint="runs/checkpoint-500")
