"""Records whether an answer waits for the transfers that it has started."""

from contextlib import contextmanager

import torch.distributed as dist


class NotedWork:
    """The work that all_reduce(async_op=True) returned, and how many times it was
    waited for.
    """

    def __init__(self, work):
        self.work, self.waited = work, 0

    def wait(self, *arguments):
        self.waited += 1
        return self.work.wait(*arguments)

    def get_future(self):
        self.waited += 1
        return self.work.get_future()

    def __getattr__(self, name):
        return getattr(self.work, name)


@contextmanager
def noting_works():
    """A list of the NotedWorks of each `dist.all_reduce` that is started in the block."""
    original, noted = dist.all_reduce, []

    def all_reduce(*arguments, **options):
        work = original(*arguments, **options)
        if work is not None:
            noted.append(NotedWork(work))
        return work and noted[-1]

    dist.all_reduce = all_reduce
    try:
        yield noted
    finally:
        dist.all_reduce = original
