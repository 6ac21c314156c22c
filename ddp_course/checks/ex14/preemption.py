"""Question 4: training that is preempted, again and again, and goes on with other
numbers of ranks.
"""

import signal
import tempfile
from collections import Counter
from pathlib import Path

from ddp_course.checks.ex14.preempted import OneProcess, data_of, train_once
from ddp_course.checks.training import a_look, equal
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout
from ddp_course.school.judge import Wrong, question

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
NAMES = {TERM: "SIGTERM", USR1: "SIGUSR1"}


@question(
    "A signal comes at any moment, and to any rank. The handler only remembers it: signal.signal(signal.SIGTERM, handler), "
    "where handler takes two arguments. Between two updates the ranks look whether somebody has been told. Since one rank "
    "may know what the others do not, looking needs a collective.",
    "After each optimizer.step(), all-reduce two numbers: this rank's part of the loss, and 1.0 if it has had a signal, else "
    "0.0. If the sum of the second is above 0, all ranks know it, in the same update: rank 0 writes network, optimizer and "
    "losses under another name and renames, and all return. At the start, all ranks load the file if it exists, and go on "
    "with batches[len(losses):].",
    "told = []; for kind in (signal.SIGTERM, signal.SIGUSR1): signal.signal(kind, lambda *_: told.append(True)). Per update: "
    "mine = batch[rank::ranks]; loss = F.cross_entropy(network(inputs[mine]), labels[mine], reduction='sum') / len(batch); "
    "backward; all_reduce each gradient, without dividing; step; news = torch.tensor([loss.item(), len(told)], "
    "dtype=torch.float64); dist.all_reduce(news); losses.append(news[0].item()); if news[1] > 0: torch.save on rank 0 to "
    "path.with_suffix('.tmp'), os.replace, dist.barrier(), return losses.",
)
def check_survive_preemption(answer, draw):
    """Signals come to one rank or to all, in the middle of updates, and once the process
    that saves is killed as well; each time the training goes on with another number of
    ranks, and ends as one process that was left in peace.
    """
    run = {"seed": draw.randrange(10**6), "size": draw.choice([7, 11]), "updates": 10}
    truth = OneProcess(run)
    with tempfile.TemporaryDirectory() as folder:
        Trial(answer, run, truth, Path(folder, "peace.pt")).in_peace(2)
        trial = Trial(answer, run, truth, Path(folder, "checkpoint.pt"))
        kinds = draw.sample([TERM, USR1], 2)
        a_moment = lambda: draw.choice(["forward", "backward"])
        first, second, third = 1 + draw.randrange(2), 4, 6 + draw.randrange(2)
        # one rank, and not rank 0
        told = {draw.randrange(1, 3): (first, kinds[0], a_moment(), None)}
        trial.preempted(3, told, first)
        # all ranks, and rank 0 is killed while it writes
        limit = trial.path.stat().st_size // 2
        told = {rank: (second, kinds[rank % 2], a_moment(), None) for rank in (1, 2, 3)}
        told[0] = (second, kinds[0], a_moment(), limit)
        trial.killed(4, told, second, limit)
        told = {0: (third, kinds[1], a_moment(), None)}
        trial.preempted(2, told, third)
        trial.to_the_end(draw.choice([3, 4]))


class Trial:
    """A run that is started several times: `done` updates are known to be saved."""

    def __init__(self, answer, run, truth, path):
        self.answer, self.run, self.truth, self.path = answer, run, truth, path
        self.batches = [batch.tolist() for batch in data_of(run)[1]]
        self.update_of = {
            number: update
            for update, batch in enumerate(self.batches)
            for number in batch
        }
        self.done, self.was_killed = 0, False
        self.torn = None  # the size of a file that is not whole

    def train(self, n, told=None, only_rank_0=False):
        args = (self.run, str(self.path), told or {}, only_rank_0)
        return self.answer.on_ranks(train_once, *args, nproc=n, timeout=14)

    # ---- the ways in which it is started ----

    def in_peace(self, n):
        """Without a signal, and without a checkpoint."""
        checked = f"{self.run['updates']} updates on {n} ranks, without any signal"
        of_ranks = self.train(n)
        self.judge(checked, of_ranks, self.run["updates"])

    def preempted(self, n, told, update):
        """With signals in this update, after which it has to save and return."""
        checked = f"{told_in_words(told, n, update)}{self.since()}"
        try:
            of_ranks = self.train(n, told, only_rank_0=True)
        except RankError as error:
            raise self.explained(checked, error, told, n) from None
        stopped = self.judge_stop(checked, of_ranks, update)
        self.judge(checked, of_ranks, stopped)
        if not self.path.exists():
            cause = "nothing was saved: what was computed is lost when the job is started again"
            if any(self.path.parent.iterdir()):
                cause = "the checkpoint has another name: rename it to `path`"
            raise Wrong(
                checked, expected=f"a file {self.path.name}", got="no file", cause=cause
            )
        self.done, self.was_killed = stopped, False

    def killed(self, n, told, update, limit):
        """With signals in this update, and killed while rank 0 writes the checkpoint."""
        checked = f"{told_in_words(told, n, update)}{self.since()}"
        try:
            of_ranks = self.train(n, told)
        except RankError as error:
            if error.rank == 0 and "SIGXFSZ" in str(error):
                self.was_killed = True
                if self.path.exists() and self.path.stat().st_size <= limit:
                    self.torn = self.path.stat().st_size
                return
            raise self.explained(checked, error, told, n) from None
        stopped = self.judge_stop(checked, of_ranks, update)
        self.judge(checked, of_ranks, stopped)
        cause = "no checkpoint was written at this signal: each preemption needs one"
        got = f"no file of more than {limit:,} bytes was written"
        raise Wrong(checked, expected="a new checkpoint", got=got, cause=cause)

    def to_the_end(self, n):
        checked = (
            f"the rest of the {self.run['updates']} updates on {n} ranks{self.since()}"
        )
        of_ranks = self.train(n)
        self.judge(checked, of_ranks, self.run["updates"])

    def since(self):
        """How far the run was when it was started."""
        return f", after a restart with {self.done} updates saved" if self.done else ""

    # ---- what came of it ----

    def explained(self, checked, error, told, n):
        """The Wrong for an error in a run with a signal; or the error, if it is its own."""
        text, rows = f"{error.message}\n{error}", {"rank": f"{error.rank} of {n}"}
        if error.rank is None:
            rows = {}
        for name in NAMES.values():
            if f"killed by {name}" in text:
                cause = f"{name} has ended the process: without a handler, this is what a signal does"
                return Wrong(
                    checked,
                    **rows,
                    expected="it saves and returns",
                    got=f"killed by {name}",
                    cause=cause,
                )
        if "killed by SIGXFSZ" in text:
            cause = "this rank writes the checkpoint, too, and all write to the same place: let rank 0 do it"
            got = f"rank {error.rank} has written more than 4,096 bytes"
            return Wrong(
                checked, **rows, expected="only rank 0 writes", got=got, cause=cause
            )
        if "SystemExit" in text:
            cause = "train has to return the losses; its caller ends the program"
            return Wrong(
                checked, **rows, expected="the losses", got=error.message, cause=cause
            )
        if isinstance(error, RankTimeout) or any(words in text for words in SYMPTOMS):
            who = (
                f"the signal has reached rank {min(told)} only"
                if len(told) == 1
                else "the signals have reached all ranks, but not at the same moment"
            )
            cause = f"{who}, and then one rank has waited for another that had left, or was in another call: after each update, all ranks must decide together, in a collective, whether they stop"
            return Wrong(
                checked,
                **rows,
                expected="all ranks save and return",
                got=first_lines(str(error)),
                cause=cause,
            )
        return error

    def judge_stop(self, checked, of_ranks, update):
        """Raise Wrong unless all ranks have stopped after the update of the signal, or
        the next one; return how many updates are done then.
        """
        lengths = [
            len(seen["losses"]) if isinstance(seen["losses"], list) else None
            for seen in of_ranks
        ]
        self.judge_form(checked, of_ranks)
        allowed = (update + 1, update + 2)
        expected = (
            f"{update + 1} losses: the updates until the end of the one with the signal"
        )
        last = [max(self.updates_of(seen), default=-1) + 1 for seen in of_ranks]
        for rank, (length, computed) in enumerate(zip(lengths, last)):
            if computed in allowed:
                continue
            told = {"rank": f"{rank} of {len(of_ranks)}", "expected": expected}
            cause = "the system kills the job some seconds after the signal: save and return after the update in which it came"
            if computed <= update:
                cause = "the update in which the signal came was not computed: where does the training begin, and where does it end?"
            elif computed == self.run["updates"]:
                cause = "the training went on to the end, as if there was no signal: the rank that has it must tell the others, and all return"
            got = f"{computed} updates were computed"
            raise Wrong(checked, **told, got=got, cause=cause)
        if len(set(last)) > 1:
            cause = "the ranks have stopped after different updates: they must decide together"
            raise Wrong(
                checked, expected="the same on all ranks", got=last, cause=cause
            )
        return last[0]

    def updates_of(self, seen):
        """The updates whose samples a rank has had."""
        return {
            self.update_of.get(number, -1) for call in seen["seen"] for number in call
        }

    def judge_form(self, checked, of_ranks):
        for rank, seen in enumerate(of_ranks):
            if not isinstance(seen["losses"], list) or not all(
                isinstance(loss, float) for loss in seen["losses"]
            ):
                cause = "return a list with the loss of each update, numbers"
                if seen["losses"] is None:
                    cause = "the function ends without a return statement: return the losses"
                told = {"rank": f"{rank} of {len(of_ranks)}", "got": seen["losses"]}
                raise Wrong(checked, expected="a list of losses", **told, cause=cause)

    def judge(self, checked, of_ranks, end):
        """Raise Wrong unless the updates from `done` to `end` were computed, once, and
        losses and parameters are those of one process.
        """
        self.judge_form(checked, of_ranks)
        start = self.judge_samples(checked, of_ranks, end)
        self.judge_losses(checked, of_ranks, start, end)
        for rank, seen in enumerate(of_ranks):
            if not equal(seen["end"], self.truth.ends[end]):
                raise Wrong(
                    f"the parameters after {checked}, compared with one process",
                    rank=f"{rank} of {len(of_ranks)}",
                    expected=a_look(self.truth.ends[end]),
                    got=a_look(seen["end"]),
                    cause=self.cause_of_parameters(of_ranks, rank, start, end),
                )

    def judge_samples(self, checked, of_ranks, end):
        """Raise Wrong unless all ranks together had each sample of the updates that were
        left once; return the first of these updates.
        """
        n = len(of_ranks)
        found = sorted(set().union(*(self.updates_of(seen) for seen in of_ranks)))
        start = found[0] if found else end
        told = {"expected": f"update {self.done + 1} comes first"}
        told["got"] = f"update {start + 1}" if found else "no update"
        if start < self.done:
            cause = (
                "an update that was saved is computed again: go on behind the last loss"
            )
            if start == 0:
                cause = "the training begins anew, and what was saved is not used: load the file if it exists"
                if self.torn is not None:
                    cause = self.cause_of_torn()
            raise Wrong(checked, **told, cause=cause)
        # a checkpoint after each update is fine, too: then more is saved than we know
        latest = end if self.was_killed else self.done
        if start > latest or not found:
            cause = "updates have been left out, with all their samples"
            raise Wrong(checked, **told, cause=cause)
        counts = Counter(
            number for seen in of_ranks for call in seen["seen"] for number in call
        )
        for update in range(start, end):
            batch = self.batches[update]
            times = Counter(counts[number] for number in batch)
            if times == {1: len(batch)}:
                continue
            cause = "together, the ranks there are now must take each sample of an update once, also where the ranks do not divide it"
            if times == {n: len(batch)}:
                cause = "each rank computes all samples of the update: divide them"
            got = ", ".join(
                f"{many} samples {often} times" for often, many in sorted(times.items())
            )
            raise Wrong(
                f"the samples of update {update + 1}, all ranks together, in {checked}",
                expected=f"{len(batch)} samples 1 time",
                got=got,
                cause=cause,
            )
        return start

    def cause_of_torn(self):
        return f"the process was killed while it wrote, and the file has only its first {self.torn:,} bytes: write under another name, and then rename it"

    def judge_losses(self, checked, of_ranks, start, end):
        """Raise Wrong unless each rank has returned the losses of all updates."""
        n, truth = len(of_ranks), self.truth.losses[:end]
        for rank, seen in enumerate(of_ranks):
            got, told = seen["losses"], {"rank": f"{rank} of {n}"}
            if len(got) != end:
                cause = "return one loss for each update that has been computed since the run began"
                if self.done and len(got) == end - start:
                    cause = "the losses of the updates before the restart are missing: they belong into the checkpoint, too"
                elif len(got) % end == 0 and len(got):
                    cause = "an update has one loss, the mean over all its samples"
                raise Wrong(
                    f"the losses that come back in {checked}",
                    **told,
                    expected=f"{end} losses",
                    got=f"{len(got)} losses",
                    cause=cause,
                )
            wrong = [
                place for place in range(end) if not near(got[place], truth[place])
            ]
            if wrong:
                place = wrong[0]
                raise Wrong(
                    f"the loss of update {place + 1} in {checked}, compared with one process",
                    **told,
                    expected=f"{truth[place]:.6f}",
                    got=f"{got[place]:.6f}",
                    cause=self.cause_of_loss(of_ranks, rank, start, place),
                )

    def shares(self, of_ranks):
        """For each update, the samples of each rank in this run."""
        shares = []
        for update, batch in enumerate(self.batches):
            parts = [
                [
                    n
                    for call in seen["seen"]
                    for n in call
                    if self.update_of.get(n) == update
                ]
                for seen in of_ranks
            ]
            shares.append([part for part in parts if part] or [batch])
        return shares

    def cause_of_loss(self, of_ranks, rank, start, place):
        got, n, truth = of_ranks[rank]["losses"], len(of_ranks), self.truth.losses
        shares = self.shares(of_ranks)
        if not self.done:
            return self.cause_of_first_losses(of_ranks, rank)
        if place < start:
            return "the losses before the restart are not those that were returned: they belong into the checkpoint as they are"
        if place == start:
            if near(got[place], self.at_the_start(start)):
                return "this is the loss of a network that was never trained: load its parameters from the checkpoint, on all ranks"
            for late in (start - 1, start + 1):
                if near(got[place], self.loss_with(late, start)):
                    return "the parameters in the checkpoint are those before the last update: save after optimizer.step(), between two updates"
            return "the parameters after the restart are not those with which the last update ended: save them between two updates, and load them on all ranks"
        forgotten = OneProcess(self.run, forget=start).losses
        if near(got[place], forgotten[place]):
            return "the momentum is lost in the restart: the optimizer has a state, too, optimizer.state_dict()"
        means = OneProcess(self.run, shares=shares)
        if near(got[place], means.losses[place]):
            return "where parts of a batch have different sizes, the mean of their means is not the mean over the batch"
        return "the update before this one was different: are network and optimizer loaded on all ranks, each completely?"

    def at_the_start(self, update):
        """The loss of an update for the network before any training."""
        return self.loss_with(0, update)

    def loss_with(self, after, update):
        """The loss of an update with the parameters after some updates."""
        from torch.nn import functional as F

        from ddp_course.checks.ex14.preempted import Noted

        data, batches = data_of(self.run)
        network = Noted(self.run["seed"])
        network.load_state_dict(self.truth.ends[min(after, len(self.truth.ends) - 1)])
        batch = batches[update]
        return F.cross_entropy(network(data.inputs[batch]), data.labels[batch]).item()

    def cause_of_first_losses(self, of_ranks, rank):
        """Why the losses of a run without a restart are wrong, from its first loss."""
        got, n, truth = of_ranks[rank]["losses"], len(of_ranks), self.truth.losses
        if near(got[0], truth[0]):
            return self.cause_of_parameters(of_ranks, rank, 0, 1)
        own = [self.loss_of_share(seen) for seen in of_ranks]
        size = len(self.batches[0])
        looks = {
            truth[0]
            * n: "this is too large by the number of ranks: the mean over the batch, not the sum of what each rank has",
            truth[0]
            / n: "this is too small by the number of ranks: is it divided once too often?",
            truth[0] * size: "this is the sum over the samples: take the mean",
            own[rank][
                0
            ]: "this is the mean over this rank's own samples: the loss of an update is the mean over the samples of all ranks",
            own[rank][0]
            * own[rank][1]
            / size: "this is this rank's part of the loss only: add up the parts of all ranks",
            sum(loss for loss, _ in own)
            / n: "where parts of a batch have different sizes, the mean of their means is not the mean over the batch",
            sum(
                loss for loss, _ in own
            ): "this is the sum of the ranks' means: the loss of an update is the mean over its samples",
        }
        for loss, cause in looks.items():
            if near(got[0], loss):
                return cause
        return "the loss of an update is the mean of the cross entropy over its samples, on all ranks together, before the update"

    def loss_of_share(self, seen):
        """(mean loss of a rank's part of the first update, the part's size)."""
        from torch.nn import functional as F

        from ddp_course.checks.ex14.preempted import Noted

        data, _ = data_of(self.run)
        network = Noted(self.run["seed"])
        own = [n for call in seen["seen"] for n in call if self.update_of.get(n) == 0]
        if not own:
            return 0.0, 0
        return F.cross_entropy(network(data.inputs[own]), data.labels[own]).item(), len(
            own
        )

    def cause_of_parameters(self, of_ranks, rank, start, end):
        """Why the updates were not those of one process."""
        n, got = len(of_ranks), of_ranks[rank]
        if equal(got["end"], self.truth.ends[0]) and not self.done:
            return "the parameters have not changed: train the given network, in place"
        if self.done and not equal(got["end"], of_ranks[0]["end"]):
            return "the ranks have ended with different parameters: all of them load the checkpoint, network and optimizer"
        shares = self.shares(of_ranks)
        own = [[parts[rank]] if len(parts) > rank else parts for parts in shares]
        looks = [
            (
                {"shares": own},
                "this is what this rank ends with if it trains on its own samples alone: add up the gradients of all ranks",
            ),
            (
                {"shares": shares},
                "where parts of a batch have different sizes, the mean of their means is not the mean over the batch",
            ),
            (
                {"factor": n},
                "each update is too large by the number of ranks: the gradient is the mean over the batch",
            ),
            (
                {"factor": 1 / n},
                "each update is too small by the number of ranks: is the gradient divided once too often, as DDP does it already?",
            ),
            (
                {"momentum": 0.0},
                "the optimizer has no momentum: SGD with lr=0.1 and momentum=0.9",
            ),
            (
                {"factor": self.run["size"]},
                "the gradient is that of the sum over the samples: take the mean",
            ),
        ]
        for options, cause in looks:
            other = OneProcess(self.run, **options)
            if not self.done and self.like(got, other):
                return cause
        return "is the gradient of each update the mean over the samples of all ranks, and the optimizer SGD with lr=0.1 and momentum=0.9?"

    def like(self, got, other):
        """Whether a rank's run in peace ended as this one."""
        return equal(got["end"], other.ends[-1])


def near(got, expected):
    return abs(got - expected) <= 1e-6 * (1 + abs(expected))


def told_in_words(told, n, update):
    """Who gets which signal."""
    if len(told) == 1:
        [(rank, (_, kind, moment, _))] = told.items()
        return f"{n} ranks, of which rank {rank} gets {NAMES[kind]} in update {update + 1} ({moment})"
    return f"{n} ranks, which all get a signal in update {update + 1}"


def first_lines(text, most=3):
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join([*lines[:1], *lines[-most:]])[:300]
