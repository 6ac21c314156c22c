"""torchrun does not reach the first machine

Run:    not here: the time limit is a minute, and lesson 14 shows it between its machines
Text:   torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the
        C10d store has failed. See inner exception for details.
Text:   torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError
Text:   [E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect
        to (192.0.0.1, 1234).
Text:   The node 'node2_3140_0' has failed to shutdown the rendezvous '3045' due to an error of type
        RendezvousConnectionError.
Text:   torch.distributed.DistNetworkError: Connection refused
Text:   torch.distributed.DistStoreError: Socket Timeout
Text:   RuntimeError: Socket Timeout
Text:   torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 2/4 clients
        joined.
Cause:  The torchrun commands of the machines meet in a store on the machine that `--rdzv_endpoint`
        names, and this one did not reach it, or not all machines came in time.
Which:  On all machines but one: a firewall or another interface blocks the port; try `nc -z HOST
        PORT`. On all machines, also that of the endpoint: none of them recognises the address as
        its own; give the address of an interface, not a NAT address or an alias. Only at the end,
        or after another error: the first machine has ended, a consequence. RendezvousTimeoutError:
        fewer machines than `--nnodes` came.
Fix:    The same `--rdzv_id`, `--rdzv_endpoint` and `--nnodes` everywhere, a port above 1024 that
        the firewall lets through, one torchrun per machine. If host names do not lead to the right
        interface, pass `--local_addr`, or use `--master_addr`, `--node_rank` and no `--rdzv_*`.
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/69197
Source: https://github.com/pytorch/pytorch/issues/107021
Source: https://github.com/pytorch/pytorch/issues/121944
"""
