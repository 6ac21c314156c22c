"""An address that torch tries in vain

Run:    not here: it needs Windows, or a machine without IPv6
Text:   [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not
        supported by protocol).
Text:   [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 -
        Address family not supported by protocol).
Text:   [c10d] The client socket has failed to connect to [kubernetes.docker.internal]:29500 (system
        error: 10049 - The requested address is not valid in its context.).
Text:   [c10d] The client socket has failed to connect to [DESKTOP-4QK1]:29500 (system error: 10049 -
        unknown error).
Cause:  A warning, and harmless if the program goes on. torch tries an IPv6 address first: `errno: 97`
        is a machine or a container without IPv6, and torch takes IPv4 next. `10049` is Windows, where
        the name leads to an address that nobody can connect to; then torch takes the next one.
Which:  Does a step, a loss or another error come after it? Then that is what counts. If the program
        stops here, another line says so: `Address already in use` is the port, and a timeout is an
        address that no process listens on.
Fix:    Nothing, if it goes on. If it hangs: an IPv4 address in place of a name, `MASTER_ADDR=127.0.0.1`
        or `--master_addr 127.0.0.1` on one machine, and the first machine's own address on several.
        torch for Windows has gloo only, no nccl.
Lesson: 14
Source: https://github.com/helmholtz-analytics/heat/issues/1003
Source: https://github.com/ray-project/ray/issues/42831
"""
