"""nccl's watchdog: a rank did not come

Run:    not here: it needs two GPUs
Text:   [rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout:
        WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523,
        Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
Text:   [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an error or timeout) detected by
        watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.
Text:   [Rank 4] Some NCCL operations have failed or timed out. Due to the asynchronous nature of
        CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
Text:   [Rank 4] To avoid data inconsistency, we are taking the entire process down.
Text:   Process group watchdog thread terminated with exception
Text:   ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring
        enqueued collectives. This typically indicates a NCCL/CUDA API hang blocking the watchdog, and
        could be triggered by another thread holding the GIL inside a CUDA api, or other
        deadlock-prone behaviors.
Text:   Heartbeat monitor timed out! Process will be terminated after dumping debug info.
Text:   terminate called after throwing an instance of 'c10::DistBackendError'
Text:   RuntimeError: NCCL communicator was aborted on rank 3. Original reason for failure was:
        Watchdog caught collective operation timeout
Text:   Received a dump signal due to a collective timeout from this local rank and we will try our
        best to dump the debug info.
Text:   failure detected by watchdog at work sequence id: 3 PG status: last enqueued work: 3, last
        completed work: 2
Text:   Stack trace of the failed collective not found, potentially because FlightRecorder is
        disabled.
Cause:  This rank waited for a collective until the time limit (10 minutes by default), because
        another rank did not call it, or called another one. The rank that complains is healthy. The
        others: one failed or ran out of memory earlier in the log; one has a batch more or less;
        one evaluates, saves or downloads alone (`if rank == 0`); the ranks took different branches;
        or a GPU or the network hangs.
Which:  Look for another error first: it is the cause. `NumelIn=1` is a barrier, so rank 0 works
        longer than the limit. The same SeqNum with other sizes or OpTypes on other ranks: they
        called different collectives. At the end of an epoch: uneven batches. At the very first
        collective: the network or peer-to-peer transfers. `TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and
        `TORCH_NCCL_DUMP_ON_TIMEOUT=1` write what each rank was doing; py-spy shows it live (lesson
        15).
Fix:    Fix the rank that does not come. Only if rank 0 really needs that long, prepare the data
        before the ranks start, or raise the limit:
        `init_process_group(timeout=timedelta(hours=2))`, `ddp_timeout` in Trainer.
Lesson: 15
Source: https://github.com/hiyouga/LlamaFactory/issues/7396
Source: https://github.com/modelscope/ms-swift/issues/6578
Source: https://github.com/pytorch/pytorch/issues/118369
Source: https://github.com/NVIDIA/Megatron-LM/issues/1207
"""
