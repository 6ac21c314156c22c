"""A network switch that delivers each packet a fixed time after it was sent.

It joins the machines of namespaces.py on kernels without netem, tc-netem(8). One packet
socket, packet(7), receives what arrives at the cables' ends, and sends it on through
another cable. `python -m ddp_course.ranks.machines.switch SECONDS` prints a line when it is
ready, and ends when its input is closed.
"""

import collections
import selectors
import socket
import sys
import time
from contextlib import suppress

ALL_PROTOCOLS = 3  # ETH_P_ALL, from <linux/if_ether.h>
SOL_PACKET, PACKET_VNET_HDR = 263, 15  # from <linux/socket.h>, <linux/if_packet.h>
HEADER = 10  # bytes before each packet: how to cut it, and what of its checksum is left
LARGEST = 2**17  # bytes, more than any packet has
BUFFER = 2**24  # bytes of packets that wait to be read


def open_socket():
    """A socket for the packets of all network devices."""
    packets = socket.socket(
        socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)
    )
    packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    packets.setblocking(False)
    return packets


def main(delay):
    packets = open_socket()
    cables, waiting = {}, collections.deque()  # waiting: (when, packet, its cable)
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
    ready.register(packets, selectors.EVENT_READ)
    print("up", flush=True)
    while True:
        patience = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in ready.select(patience):
            if key.fd == sys.stdin.fileno():
                return
            take_packets(packets, cables, waiting, delay)
        while waiting and waiting[0][0] <= time.monotonic():
            _, packet, sender = waiting.popleft()
            deliver(packet, sender, cables, packets)


def take_packets(packets, cables, waiting, delay):
    """Take what has arrived, and remember through which cable each address is reached."""
    with suppress(BlockingIOError):
        while True:
            packet, (cable, _, kind, *_) = packets.recvfrom(LARGEST)
            if kind != socket.PACKET_OUTGOING and cable != "lo":
                cables[packet[HEADER + 6 : HEADER + 12]] = cable
                waiting.append((time.monotonic() + delay, packet, cable))


def deliver(packet, sender, cables, packets):
    """Send a packet to the machine that has its address, or to all other machines."""
    target = cables.get(packet[HEADER : HEADER + 6])
    others = {name for _, name in socket.if_nameindex()} - {sender, "lo"}
    for cable in [target] if target else others:
        with suppress(OSError):  # lost, as in a real switch
            packets.sendto(packet, (cable, 0))


if __name__ == "__main__":
    main(float(sys.argv[1]))
