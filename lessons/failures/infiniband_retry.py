"""InfiniBand packets that do not arrive

Run:    not here: it needs InfiniBand
Text:   NCCL WARN NET/IB : Got completion from peer 172.36.134.184<55921> with status=12 opcode=1
        len=0 vendor err 129 (Send) localGid ::ffff:29.87.4.221 remoteGids ::ffff:29.87.88.182
Text:   NCCL WARN NET/IB : Got completion from peer 10.0.35.1<49189> with error 12, opcode 5327, len
        5327, vendor err 129
Text:   NCCL WARN Call to ibv_modify_qp failed with error Connection timed out
Text:   NCCL WARN Call to ibv_reg_mr failed
Text:   NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory
Cause:  Two machines could not exchange data over InfiniBand or RoCE. Status 12 means that no answer
        came after all retries. nccl's maintainers: such errors often are connectivity problems,
        especially right after the start.
Which:  Always the same machine in the lines: its link, cable or port (`ibstat`, `ibdiagnet`). All
        machines at the start: the wrong adapters or GID (`NCCL_IB_HCA`, `NCCL_IB_GID_INDEX`).
        `ibv_reg_mr` or `ibv_create_cq` with "Cannot allocate memory": the limit on locked memory
        (`ulimit -l`). With `NCCL_IB_DISABLE=1` the program runs slowly: it is InfiniBand.
Fix:    Leave the bad machine out and report it. Set `ulimit -l unlimited` also for jobs that the
        scheduler starts. Choose the adapters with `NCCL_IB_HCA`. Test with nccl-tests before the
        program.
Lesson: 14
Source: https://github.com/NVIDIA/nccl/issues/1814
Source: https://github.com/NVIDIA/nccl/issues/1664
"""
