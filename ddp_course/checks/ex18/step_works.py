"""Records what an answer does with the messages that it has started."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_course.checks.works import NotedWork


class NotedMessage(NotedWork):
    """The work of an isend or irecv.

    changed: whether the tensor of an isend was changed before it was waited for. arrived:
    where an irecv receives. Its own tensor gets the numbers when it is waited for, as late
    as can be, and is NaN until then.
    """

    def __init__(self, work, tensor, arrived=None):
        super().__init__(work)
        self.tensor, self.copy, self.arrived = tensor.detach(), tensor.detach().clone(), arrived
        self.changed = False

    def wait(self, *arguments):
        if self.waited > 0:  # gloo would wait for another message
            return True
        self.look()
        done = super().wait(*arguments)
        if self.arrived is not None:
            self.tensor.data.copy_(self.arrived)  # .data: gloo does not tell autograd, either
        return done

    def is_completed(self):
        done = self.work.is_completed()
        if done:
            self.wait()
        return done

    def get_future(self):
        self.wait()
        return super().get_future()

    def look(self):
        if self.waited == 0 and self.arrived is None:
            same = (self.tensor == self.copy) | (self.tensor.isnan() & self.copy.isnan())
            self.changed = not same.all()


@contextmanager
def noting_messages():
    """A list of the NotedMessages of each `isend` and `irecv` started in the block."""
    places, noted = (dist, dist.distributed_c10d), []
    isend, irecv = dist.isend, dist.irecv

    def noting_isend(tensor, *arguments, **options):
        work = isend(tensor, *arguments, **options)
        noted.append(NotedMessage(work, tensor))
        return noted[-1]

    def noting_irecv(tensor, *arguments, **options):
        arrived = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
        work = irecv(arrived, *arguments, **options)
        tensor.data.fill_(torch.nan)
        noted.append(NotedMessage(work, tensor, arrived))
        return noted[-1]

    for place in places:  # batch_isend_irecv looks at the second
        place.isend, place.irecv = noting_isend, noting_irecv
    try:
        yield noted
    finally:
        for place in places:
            place.isend, place.irecv = isend, irecv
        for message in noted:
            message.look()
