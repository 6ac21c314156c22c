"""Question 5: training that is preempted, again and again, and goes on with other
numbers of ranks.
"""

import signal
from collections import Counter
from functools import partial

from ddp_course.checks.claims import Claim, OneOf, hold, on_every_rank
from ddp_course.checks.ex14 import causes
from ddp_course.checks.ex14.preempted import OneProcess, data_of, train_once
from ddp_course.checks.training import a_look
from ddp_course.judge.question import question
from ddp_course.ranks.launch import RankError

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
UPDATES = 19


@question(
    "A signal comes at any moment, and to any rank. The handler only remembers it: signal.signal(signal.SIGTERM, handler), "
    "where handler takes two arguments. Between two updates, the ranks look whether one of them has been told. One rank may "
    "know what the others do not, so looking needs a collective.",
    "After each optimizer.step(), all-reduce two numbers: this rank's part of the loss, and 1.0 if it has had a signal, "
    "else 0.0. If the sum of the second is above 0, all ranks know it, in the same update: rank 0 writes network, optimizer "
    "and losses under another name and renames, and all return. At the start, all ranks load the file if it exists, and go "
    "on with batches[len(losses):].",
    "told = []; for kind in (signal.SIGTERM, signal.SIGUSR1): signal.signal(kind, lambda *_: told.append(True)). Per "
    "update: mine = batch[rank::ranks]; loss = F.cross_entropy(network(inputs[mine]), labels[mine], reduction='sum') / "
    "len(batch); backward; all_reduce each gradient, without dividing; step; news = torch.tensor([loss.item(), len(told)], "
    "dtype=torch.float64); dist.all_reduce(news); losses.append(news[0].item()); if news[1] > 0: torch.save on rank 0 to "
    "path.with_suffix('.tmp'), os.replace, dist.barrier(), return losses.",
)
def check_survive_preemption(answer, draw):
    """Signals come to one rank or to all, in the middle of updates, and once rank 0 is
    killed while it saves; each time the training goes on with another number of ranks,
    and ends as one process that was left in peace.
    """
    run = {"seed": draw.randrange(10**6), "size": draw.choice([7, 11])}
    run["updates"] = UPDATES
    kinds, a_moment = draw.sample([TERM, USR1], 2), lambda: draw.choice(MOMENTS)
    with answer.folder() as folder:
        Trial(answer, run, folder / "peace.pt").finish(2)
        Trial(answer, run, folder / "early.pt").preempt(2, {1: (0, kinds[1], a_moment(), None)})
        trial = Trial(answer, run, folder / "checkpoint.pt")
        # one rank, which is not rank 0
        update = draw.randrange(1, 3)
        trial.preempt(3, {draw.randrange(1, 3): (update, kinds[0], a_moment(), None)})
        # all ranks, and rank 0 is killed in the middle of the new file
        update, limit = draw.randrange(4, 7), trial.saved() // 2
        told = {rank: (update, kinds[rank % 2], a_moment(), None) for rank in range(4)}
        trial.kill(4, told | {0: (*told[0][:3], limit)}, limit)
        # a multiple of 3 and 4: if the ranks look only after every third or fourth
        # update, they are too late
        trial.preempt(2, {0: (12, kinds[1], a_moment(), None)})
        trial.finish(4)


MOMENTS = "forward", "backward"


class Trial:
    """A run that is started several times with one path.

    done: the updates that have been saved; torn: the size of a file that is not whole,
    or None; killed: whether more may have been saved than is known.
    """

    def __init__(self, answer, run, path):
        self.answer, self.run, self.path = answer, run, path
        self.truth = OneProcess(run)
        self.batches = [batch.tolist() for batch in data_of(run)[1]]
        numbered = enumerate(self.batches)
        self.update_of = {n: update for update, batch in numbered for n in batch}
        self.done, self.torn, self.killed = 0, None, False

    # ---- the ways in which it is started ----

    def train(self, checked, n, told=None, only_rank_0=False):
        args = (self.run, str(self.path), told or {}, only_rank_0)
        try:
            return self.answer.on_ranks(train_once, *args, nproc=n, timeout=15)
        except RankError as error:
            if told and killed_while_writing(error):
                raise
            rank = ... if error.rank is None else f"{error.rank} of {n}"
            hold(causes.of_error(self, checked, error, told), rank)
            raise

    def finish(self, n):
        """Without a signal."""
        checked = f"{n} ranks without a signal{self.since()}"
        self.judge(checked, self.train(checked, n), UPDATES)

    def preempt(self, n, told):
        """With signals, {rank: (update, signal, moment, limit)}: it has to save and
        return after that update.
        """
        checked = f"{in_words(told, n)}{self.since()}"
        of_ranks = self.train(checked, n, told, only_rank_0=True)
        stopped = self.judge_stop(checked, of_ranks, update_in(told))
        self.judge(checked, of_ranks, stopped)
        renamed = any(self.path.stem in name for name in self.answer.files(self.path.parent))
        hold([Claim(
            checked, of_ranks[0]["written over"], False, "the old file was written over in place: a rank that is killed "
            "meanwhile leaves half of a file. Write another one, and rename it: os.replace", told="a new file in its place",
            shown="new content in the old file",
        )])  # fmt: skip
        hold([Claim(
            checked, self.saved() is None, False, "the checkpoint has another name: rename it to `path`" if renamed else
            "nothing was saved: all of it is lost when the job is started again",
            told=f"a file {self.path.name}", shown="no such file",
        )])  # fmt: skip
        self.done, self.killed = stopped, False

    def kill(self, n, told, limit):
        """With signals, and killed while rank 0 writes the checkpoint."""
        checked = f"{in_words(told, n)}{self.since()}"
        of_ranks = None
        try:
            of_ranks = self.train(checked, n, told)
        except RankError as error:
            if not killed_while_writing(error):
                raise
        if of_ranks:
            self.judge(checked, of_ranks, self.judge_stop(checked, of_ranks, update_in(told)))
        self.killed, size = True, self.saved()
        hold([
            Claim(
                checked, of_ranks, None, "no checkpoint was written at this signal: each preemption needs one",
                told="a new checkpoint", shown=f"no rank has written more than {limit:,} bytes to a file",
            ),
            Claim(
                f"{checked}; rank 0 is killed in the middle of the new file", size is None, False,
                "for a moment there was no file at `path`: leave the old one there until os.replace",
                told="the old file", shown="no file",
            ),
        ])  # fmt: skip
        self.torn = size if size <= limit else None

    def saved(self):
        """The size of the checkpoint in bytes; None if there is no file at `path`."""
        return self.answer.files(self.path.parent).get(self.path.name)

    def since(self):
        """How far the run was when it was started."""
        words = f", after a restart with {self.done} updates saved"
        return words * bool(self.done)

    # ---- what came of it ----

    def updates_of(self, seen):
        """The updates whose samples a rank has had."""
        return {self.update_of.get(n, -1) for call in seen["seen"] for n in call}

    def judge_stop(self, checked, of_ranks, update):
        """All ranks stop after the update of the signal, or the next one; return how many
        updates are done then.
        """
        on_every_rank(partial(form, checked), of_ranks)
        last = [max(self.updates_of(seen), default=-1) + 1 for seen in of_ranks]
        on_every_rank(partial(stop, checked, update), last)
        decide = "the ranks have stopped after different updates: decide together"
        hold([Claim(checked, last, last[:1] * len(last), decide, told="the same number of updates on all ranks")])
        return last[0]

    def judge(self, checked, of_ranks, end):
        """The updates from `done` to `end` were computed, once, and losses and parameters
        are those of one process.
        """
        on_every_rank(partial(form, checked), of_ranks)
        start = min(set().union(*map(self.updates_of, of_ranks)), default=UPDATES)
        hold([self.goes_on(checked, start, end), *self.takes_each_sample(checked, of_ranks, start, end)])
        on_every_rank(partial(self.as_one_process, checked, start, end), of_ranks)

    def goes_on(self, checked, start, end):
        """The claim that update `start` is the first one that is not saved."""
        # a checkpoint after each update is fine, too: then more is saved than we know
        possible = range(self.done, end) if self.killed else [self.done]
        again = "the training begins anew, and what was saved is not used: load the file if it exists"
        return Claim(
            checked, start, OneOf([*possible]), "updates have been left out, with all their samples",
            [(0, again if self.torn is None else causes.of_torn(self)),
             (range(self.done), "an update that was saved is computed again: go on behind the last loss")],
            told=f"update {self.done + 1} comes first", shown=f"update {start + 1}",
        )  # fmt: skip

    def takes_each_sample(self, checked, of_ranks, start, end):
        """Claims that all ranks together had each sample of these updates once."""
        counts = Counter(n for seen in of_ranks for call in seen["seen"] for n in call)
        for update in range(start, end):
            batch = self.batches[update]
            times = dict(Counter(counts[number] for number in batch))
            everything = {len(of_ranks): len(batch)}, "each rank computes all samples of the update: divide them"
            yield Claim(
                f"the samples of update {update + 1}, all ranks together: {checked}", times, {1: len(batch)},
                "together, the ranks there are now must take each sample of an update once, also where their number does "
                "not divide it", [everything],
                told=f"{len(batch)} samples once",
                shown=", ".join(f"{many} samples {often} times" for often, many in sorted(times.items())),
            )  # fmt: skip

    def as_one_process(self, checked, start, end, rank, of_ranks):
        """Claims that this rank has returned the losses of all updates, and has the
        parameters of one process.
        """
        losses, own = of_ranks[rank]["losses"], of_ranks[rank]["end"]
        yield Claim(
            f"the losses that come back: {checked}", len(losses), end,
            "return one loss for each update that has been computed since the run began",
            [(end - start, "the losses of the updates before the restart are missing: they belong into the checkpoint, too"),
             (end - (start - self.done), "updates have been left out, with all their samples")],
            told=f"{end} losses", shown=f"{len(losses)} losses",
        )  # fmt: skip
        parameters = Claim(
            f"the parameters after {end} updates, compared with one process: {checked}",
            causes.numbers_of(own), causes.numbers_of(self.truth.ends[end]), *causes.of_parameters(self, of_ranks, rank),
            digits=6, mistake_digits=6, told=a_look(self.truth.ends[end]), shown=a_look(own),
        )  # fmt: skip
        for place, (got, right) in enumerate(zip(losses, self.truth.losses)):
            yield Claim(
                f"the loss of update {place + 1}, compared with one process: {checked}", got, right,
                *causes.of_loss(self, of_ranks, rank, start, place, parameters),
                digits=6, scale=1, mistake_digits=6, told=f"{right:.6f}", shown=f"{got:.6f}",
            )  # fmt: skip
        yield parameters

    def shares(self, of_ranks):
        """For each update, the samples of each rank in this run."""
        return [
            [[n for call in seen["seen"] for n in call if self.update_of.get(n) == update] for seen in of_ranks]
            for update in range(UPDATES)
        ]


def killed_while_writing(error):
    """Whether rank 0 has written more to a file than it was allowed."""
    return error.rank == 0 and "killed by SIGXFSZ" in str(error)


def form(checked, rank, of_ranks):
    """A rank has returned a list of numbers."""
    losses = of_ranks[rank]["losses"]
    told = "a list of losses"
    yield Claim(checked, losses is None, False, "the function ends without a return statement: return the losses",
                told=told, shown="nothing (None)")  # fmt: skip
    fits = isinstance(losses, list) and all(isinstance(loss, float) for loss in losses)
    yield Claim(checked, fits, True, "return a list with the loss of each update, numbers", told=told, shown=losses)


def stop(checked, update, rank, last):
    """last: how many updates each rank has computed."""
    yield Claim(
        checked, last[rank], range(update + 1, update + 3),
        "the system kills the job some seconds after the signal: save and return after that update",
        [(UPDATES, "the training went on to the end, as if there was no signal: the rank that has it must tell the others, "
          "and all return"),
         (range(update + 1), "the update in which the signal came was not computed: finish it")],
        told=f"{update + 1} updates, with that of the signal", shown=f"{last[rank]} updates",
    )  # fmt: skip


def update_in(told):
    """The update in which the signals come."""
    return next(iter(told.values()))[0]


def in_words(told, n):
    """Which ranks get which signal."""
    if len(told) > 1:
        return f"{n} ranks, which all get a signal in update {update_in(told) + 1}"
    [(rank, (update, kind, moment, _))] = told.items()
    name = signal.Signals(kind).name
    return f"{n} ranks, of which rank {rank} gets {name} in update {update + 1}, in its {moment} pass"
