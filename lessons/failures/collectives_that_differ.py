"""Collectives that differ between the ranks

Run:    not here: lessons 2 and 15 show it
Text:   RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective:
        CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[2], TensorDtypes=Float,
        TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default),
        requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))), but
        Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=BARRIER).
Text:   Collectives differ in the following aspects: Op type: ALLREDUCEvs BROADCAST Tensor Tensor shapes:
        25vs 1 Tensor Tensor dtypes: Floatvs Long
Cause:  With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, the ranks compare each collective before they start it, and
        these differ.
Which:  The last words say in what. `Op type` or `Sequence number`: the ranks took different branches, one
        has a collective more (a log, an evaluation or a save on rank 0, fewer batches), or the order
        differs (lesson 15). Only `Tensor shapes`: batches, outputs or models of different sizes
        (lesson 2). Only `dtypes`: a count in another type on one rank.
Fix:    Compare the tracebacks of the two ranks: each ends at its own collective. Let all ranks call the
        same ones in the same order, and pad or gather the sizes first where they differ.
Lesson: 15
Source: https://github.com/speechbrain/speechbrain/issues/2401
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/19680
Source: https://github.com/bghira/SimpleTuner/issues/2712
"""
