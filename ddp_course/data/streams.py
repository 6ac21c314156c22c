"""Streams of documents, shared among ranks and workers, that resume where they were.

Each batch carries the state of the reader that made it: where to go on after it. So the
state of a run is that of the batches that it has used, whatever is read ahead.
"""

import random
from collections import deque

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddp_course import UsageError
from ddp_course.data.shards import tokens_between

BEGIN = [0, 0, 0, 0, 0]  # see windows_of


def documents_for(documents, reader, readers, state):
    """Yield (place, document) for one of several readers, again and again.

    documents: see Documents. The reader takes those whose number, divided by the number
    of readers, leaves `reader`; it reads past the others. place: [how many passes over
    the text are complete, file, number of its first document, number of this one].
    """
    passes, file, first, number, _ = state
    while True:
        found = False
        for place, document in documents.after(file, first):
            is_mine = place[-1] % readers == reader
            if is_mine and place[-1] >= number:
                yield [passes, *place], document
            found = found or is_mine
        if not found:
            raise UsageError(f"there are fewer documents than {readers} readers")
        passes, file, first, number = passes + 1, 0, 0, 0


def windows_of(documents, tokenizer, context, reader=0, readers=1, state=BEGIN):
    """Yield (window, state) for one of several readers, without an end.

    A window has context + 1 tokens, an array of integers; its last token is the first
    one of the next window. state: the place of the document in which the next window
    begins, see documents_for, and how many of the document's tokens are used.
    """
    between = tokens_between(tokenizer)
    waiting, tokens_waiting, done = deque(), 0, state[-1]
    for place, document in documents_for(documents, reader, readers, state):
        tokens = np.concatenate([tokenizer.encode(document), between])
        waiting.append((place, tokens))
        tokens_waiting += len(tokens)
        while tokens_waiting - done > context:
            rows = [tokens for _, tokens in waiting]
            rows[0] = rows[0][done : done + context + 1]
            window = np.concatenate(rows)[: context + 1]
            done += context
            while done >= len(waiting[0][1]):
                used = len(waiting.popleft()[1])
                tokens_waiting, done = tokens_waiting - used, done - used
            yield window, [*waiting[0][0], done]


class Mixture(IterableDataset):
    """Windows from several texts, in given proportions, for one rank and its workers.

    texts: a list of Documents. weights: how often each is chosen. Each worker of each
    rank is a reader, and reads its own documents of each text. A sample is (window,
    text, reader, state): the number of its text, the name of its reader, and [windows
    made, a state per text] of the reader after it. start: see Position.
    """

    def __init__(
        self, texts, tokenizer, context, weights=(1,), rank=0, ranks=1, seed=0
    ):
        self.texts, self.tokenizer, self.context = texts, tokenizer, context
        self.weights, self.rank, self.ranks, self.seed = weights, rank, ranks, seed
        self.start = {"batches": 0, "states": {}}
        self.loaded = self.state = None  # for torchdata: of this reader

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        # a loader asks its worker 0 first: that has to be the reader whose turn it is
        turn = (worker + self.start["batches"]) % workers
        number, readers = self.rank * workers + turn, self.ranks * workers
        reader = f"{number} of {readers}"
        check_readers(self.start["states"], readers)
        begin = [0, *(BEGIN for _ in self.texts)]
        made, *states = self.loaded or self.start["states"].get(reader, begin)
        how = self.tokenizer, self.context, number, readers
        windows = [
            windows_of(text, *how, state) for text, state in zip(self.texts, states)
        ]
        while True:
            draw = random.Random(f"{self.seed} {reader} {made}")
            [text] = draw.choices(range(len(self.texts)), self.weights)
            window, states[text] = next(windows[text])
            made += 1
            self.state = [made, *states]
            yield window.astype(np.int64), text, reader, self.state

    def state_dict(self):
        """For torchdata's StatefulDataLoader, which asks each worker for it."""
        return {"state": self.state}

    def load_state_dict(self, found):
        self.loaded = found["state"]


def check_readers(states, readers):
    """Raise UsageError if these are states of another number of readers."""
    others = {int(name.split()[-1]) for name in states} - {readers}
    if others:
        problem = f"the state is one of {others.pop()} readers, not {readers}"
        raise UsageError(f"{problem}: use as many ranks and workers as before")


def collate(samples):
    """A batch: tokens and targets, int64 (batch, context); the numbers of their texts;
    the reader, and its state after them.
    """
    windows, texts, readers, states = zip(*samples)
    rows = torch.from_numpy(np.stack(windows))
    return {
        "tokens": rows[:, :-1].contiguous(),
        "targets": rows[:, 1:].contiguous(),
        "texts": list(texts),
        "reader": readers[-1],
        "state": states[-1],
    }


class Position:
    """Which batches of its loader a rank has used: a part of its checkpoint.

    Only the same number of ranks and workers can go on from it: they decide who reads
    which document.
    """

    def __init__(self, dataset):
        self.dataset, self.batches, self.states = dataset, 0, {}

    def used(self, batch):
        self.batches += 1
        self.states[batch["reader"]] = batch["state"]

    def state_dict(self):
        return {"batches": self.batches, "states": dict(self.states)}

    def load_state_dict(self, found):
        self.batches, self.states = found["batches"], dict(found["states"])
        self.dataset.start = found
