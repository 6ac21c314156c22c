"""The order of the samples, and the randomness of what reads them, when a run resumes
in the middle of an epoch.
"""

import hashlib
import itertools

from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that leaves out this rank's first `start` samples."""

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


def seed_workers(generator, seed, epoch, rank):
    """Seed a DataLoader's generator, from which the loader seeds its workers.

    Each rank and each epoch gets its own seed, and a resumed epoch gets the same again.
    """
    digest = hashlib.sha256(f"{seed} {epoch} {rank}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little"))
