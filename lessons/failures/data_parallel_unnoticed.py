"""DataParallel without noticing

Run:    not here: it needs two GPUs
Text:   UserWarning: Was asked to gather along dimension 0, but all input tensors were scalars; will
        instead unsqueeze and return a vector.
Text:   RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0])
        but found one of them on device: cpu
Text:   RuntimeError: Caught RuntimeError in replica 0 on device 0.
Text:   StopIteration: Caught StopIteration in replica 0 on device 0.
Text:   RuntimeError: Gather got an input of invalid size: got [2, 30, 768], but expected [2, 28, 768]
Text:   RuntimeError: Output 0 of BroadcastBackward is a view and is being modified inplace.
Cause:  One process uses several GPUs with `nn.DataParallel`. Trainer does so whenever it sees more
        than one GPU and was not started by a launcher, as in a notebook with two GPUs. It is slower
        than DDP, and the batch is larger than you set.
Which:  `StopIteration`: the model asks `next(self.parameters())`, and DataParallel's copies have no
        parameters. `module must have its parameters ... on device cuda:0`: the model is on another
        GPU than the first of `device_ids`, or was divided by `device_map="auto"`.
Fix:    Start with `torchrun --nproc_per_node 2 train.py` or `accelerate launch`, and each process
        has one GPU. Or use one GPU: `CUDA_VISIBLE_DEVICES=0`, set before torch is imported. To keep
        DataParallel: `nn.DataParallel(model.cuda(0), device_ids=[0, 1])`.
Lesson: 8
Source: https://github.com/huggingface/transformers/issues/14128
Source: https://github.com/huggingface/trl/issues/7018
Source: https://github.com/pytorch/pytorch/issues/40457
Source: https://github.com/Morizeyao/GPT2-Chinese/issues/165
"""
