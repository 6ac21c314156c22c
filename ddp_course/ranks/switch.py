"""A network switch that delivers each packet a fixed time after it was sent.

It joins the machines of namespaces.py, on kernels without netem, tc-netem(8). Each machine
has a TAP device, eth0: what it sends can be read from a file, and what is written to the
file arrives. `python -m ddp_course.ranks.switch SECONDS` reads lines `MACHINE PROCESS` from
its input: that machine's cable leads to the network of that process; 0 unplugs it. It
ends with its input.
"""

import collections
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000  # from <linux/if_tun.h>
LARGEST = 65536  # bytes of a packet
EVERYBODY = b"\xff" * 6  # the address of a broadcast


def open_tap(process):
    """The file of the device eth0 in the network of a process. This process moves there."""
    with open(f"/proc/{process}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI))
    return device


def main(delay):
    taps, owners, waiting = {}, {}, collections.deque()  # of (when, packet, from)
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
    while True:
        patience = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in ready.select(patience):
            if key.fd == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                plug(*map(int, line.split()), taps, ready)
                print("done", flush=True)
            else:
                take_packets(key.fd, owners, waiting, delay)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, packet, sender = waiting.popleft()
            deliver(packet, sender, taps, owners)


def plug(machine, process, taps, ready):
    """Connect a machine's cable to the network of a process, or to none."""
    if machine in taps:
        ready.unregister(taps[machine])
        os.close(taps.pop(machine))
    if process:
        taps[machine] = open_tap(process)
        ready.register(taps[machine], selectors.EVENT_READ)


def take_packets(tap, owners, waiting, delay):
    """Take what a machine has sent, and remember where its address is."""
    with suppress(BlockingIOError):
        while True:
            packet = os.read(tap, LARGEST)
            owners[packet[6:12]] = tap
            waiting.append((time.monotonic() + delay, packet, tap))


def deliver(packet, sender, taps, owners):
    """Hand a packet to the machine that has its address, or to all other machines."""
    target = owners.get(packet[:6])
    for tap in taps.values():
        if tap != sender and tap == (target or tap):
            with suppress(BlockingIOError, OSError):  # lost, as in a real switch
                os.write(tap, packet)


if __name__ == "__main__":
    main(float(sys.argv[1]))
