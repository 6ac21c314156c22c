"""The links of the pretend network, as numbers: how long a message takes, and between
which ranks. Imports no torch, because `launch` reads it before there are ranks.
"""

import math
from typing import NamedTuple

FORM = "two numbers, seconds and bytes per second, or four, those inside a machine and "
FORM += "those between machines, and then maybe the ranks per machine"


class Link(NamedTuple):
    """A link between two ranks: a message of b bytes takes latency + b / bandwidth."""

    latency: float  # seconds per message
    bandwidth: float  # bytes per second

    def message(self, size):
        """The seconds that a message of this many bytes takes."""
        return self.latency + size / self.bandwidth

    def ring(self, size, ranks, rounds=1):
        """The seconds of a ring collective on a tensor of this many bytes.

        In a round, each piece of size / ranks bytes is sent on ranks - 1 times. An
        all-reduce is two rounds, a reduce-scatter or an all-gather is one.
        """
        return rounds * (ranks - 1) * self.message(size / ranks)


class Network(NamedTuple):
    """Two links: one between ranks of a machine, one between machines."""

    inside: Link
    between: Link
    ranks_per_machine: int | None = None  # None: as many as torchrun or launch started


def as_text(network):
    """A network as the environment variable has it: its numbers, with spaces.

    network: (latency, bandwidth), or a Network.
    """
    numbers = []
    for part in network:
        numbers += part if isinstance(part, tuple | list) else [part]
    return " ".join(str(number) for number in numbers if number is not None)


def from_text(text):
    """The Network of an environment variable. Raises ValueError for any other text."""
    numbers = [float(word) for word in text.split()]
    if len(numbers) not in (2, 4, 5):
        raise ValueError(f"{len(numbers)} numbers")
    links = [Link(*numbers[:2]), Link(*(numbers[2:4] or numbers))]
    if not all(0 <= link.latency < math.inf and link.bandwidth > 0 for link in links):
        raise ValueError("a latency below 0, or a bandwidth that is not above 0")
    ranks = [int(word) for word in text.split()[4:]]
    if any(number < 1 for number in ranks):
        raise ValueError("fewer ranks per machine than 1")
    return Network(*links, *ranks)
