"""Exercise 15: when it hangs."""

import collections
import hashlib
import random
import sys
from fractions import Fraction

import cloudpickle
import torch
import torch.distributed as dist
from ddp_course import UsageError
from ddp_course.checks.ex15.patients import CAUSES, truths
from ddp_course.detectors.desync import DesyncDetector, digest

from mutants import right, wrong

# as from a notebook: a rank imports nothing of this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# ---- diagnoses ----

NAME = "Grace Hopper"
TRUE = {letter: tuple(truth) for letter, truth in truths(NAME).items()}
WRITTEN = {letter: list(diagnosis) for letter, diagnosis in TRUE.items()}


def but(letter, rank=None, step=None, cause=None, name=NAME):
    """All diagnoses are right, but one."""
    changed = dict(WRITTEN)
    true = WRITTEN[letter]
    changed[letter] = [true[0] if rank is None else rank, true[1] if step is None else step, cause or true[2]]
    return name, changed


def with_cause(*causes):
    """The letter of a patient with one of these causes."""
    return next(letter for letter, row in WRITTEN.items() if row[2] in causes)


@right("diagnoses")
def as_lists():
    return NAME, WRITTEN


@right("diagnoses")
def in_another_spelling():
    found = {letter: (r, s, c.upper() + " ") for letter, (r, s, c) in WRITTEN.items()}
    return "  grace   HOPPER", found


@right("diagnoses")
def as_whole_numbers_of_other_kinds():
    return NAME, {letter: (float(rank), Fraction(step), cause) for letter, (rank, step, cause) in WRITTEN.items()}


@wrong("diagnoses", "ranks and steps are whole numbers")
def between_two_steps():
    return but("B", step=WRITTEN["B"][1] + 0.5)


@wrong("diagnoses", "the rank that complains is usually healthy|nobody else agrees with")
def another_rank():
    return but("B", rank=(WRITTEN["B"][0] + 1) % 3)


@wrong("diagnoses", "the step is off by one")
def counts_from_zero():
    return but("A", step=WRITTEN["A"][1] - 1)


@wrong("diagnoses", "rank and cause are right, the step is not")
def the_step_of_the_check():
    return but("C", step=WRITTEN["C"][1] + 3)


@wrong("diagnoses", "is it dead, stuck, slow or wrong|it hangs, but otherwise|still there")
def another_cause():
    return but("D", cause=next(cause for cause in CAUSES if cause != WRITTEN["D"][2]))


@wrong("diagnoses", "it hangs, but otherwise")
def confuses_two_hangs():
    hangs = ["out of data", "another collective", "stuck"]
    letter = with_cause(*hangs)
    return but(letter, cause=next(c for c in hangs if c != WRITTEN[letter][2]))


@wrong("diagnoses", "patient [A-E]")
def copied_from_somebody_else():
    return "Alan Turing", WRITTEN


@wrong("diagnoses", "write your own name")
def without_a_name():
    return "", WRITTEN


@wrong("diagnoses", "there is no diagnosis for E")
def only_four():
    return NAME, {letter: WRITTEN[letter] for letter in "ABCD"}


@wrong("diagnoses", "use the words of checks.ex15.CAUSES")
def in_own_words():
    return but("A", cause="it hangs")


@wrong("diagnoses", r"the order is \(rank, step, cause\)")
def step_before_rank():
    return NAME, {letter: (s + 3, r, c) for letter, (r, s, c) in WRITTEN.items()}


@wrong("diagnoses", "return a pair")
def only_the_dict():
    return WRITTEN


# ---- agreement ----


def sha(text):
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def raw(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Right:
    """A right answer in parts, which the wrong ones change."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step, self.kept = model, optimizer, 0, []

    def tensors(self):
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {f"{name}.{key}": value for key, value in state.items()}
        return found

    def hash(self, tensor):
        return sha(raw(tensor))

    def after_step(self):
        self.step += 1
        hashes = {name: self.hash(value) for name, value in self.tensors().items()}
        self.kept.append((self.step, hashes))

    def rows(self, numbers):
        mine = torch.tensor(numbers)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return list(zip(*(part.tolist() for part in parts)))

    def odd(self, row):
        [(usual, _)] = collections.Counter(row).most_common(1)
        return next((rank for rank, one in enumerate(row) if one != usual), None)

    def first(self, numbers):
        rows = enumerate(map(self.odd, self.rows(numbers)))
        return next(((place, odd) for place, odd in rows if odd is not None), None)

    def check(self):
        kept, self.kept = self.kept, []
        steps = [sha(repr(list(hashes.values())).encode()) for _, hashes in kept]
        if self.first([sha(repr(steps).encode())]) is None:
            return None
        place, _ = self.first(steps)
        step, hashes = kept[place]
        place, odd = self.first(list(hashes.values()))
        return step, odd, list(hashes)[place]


@right("agreement")
class InParts(Right):
    pass


@right("agreement")
class ByBisection(Right):
    """Halves the steps, with the lesson's digest; returns a list."""

    def hash(self, tensor):
        return digest(tensor).item()

    def check(self):
        kept, self.kept = self.kept, []
        prefix = lambda end: sha(repr([list(h.values()) for _, h in kept[:end]]).encode())
        if self.first([prefix(len(kept))]) is None:
            return None
        low, high = 0, len(kept)  # the first `low` agree, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if self.first([prefix(middle)]) is None:
                low = middle
            else:
                high = middle
        step, hashes = kept[low]
        place, odd = self.first(list(hashes.values()))
        return [step, odd, list(hashes)[place]]


@wrong("agreement", "buffers are missing")
class ParametersOnly(Right):
    def tensors(self):
        kept = super().tensors()
        return {name: kept[name] for name in kept if not name.startswith("norm.r")
                and "num_batches" not in name}  # fmt: skip


@wrong("agreement", "the optimizer's state is missing")
class ModelOnly(Right):
    def tensors(self):
        return dict(self.model.state_dict())


@wrong("agreement", "may be rank 0|nobody else agrees")
class ComparesWithRank0(Right):
    def odd(self, row):
        return next((rank for rank, one in enumerate(row) if one != row[0]), None)


@wrong("agreement", "the change of a single bit|differed for longer")
class SumsTheNumbers(Right):
    def hash(self, tensor):
        return int(tensor.double().nan_to_num().sum() * 1000)


@wrong("agreement", "leave sums or sizes as they were")
class SumsTheBits(Right):
    def hash(self, tensor):
        return int(tensor.detach().abs().contiguous().flatten().view(torch.uint8).long().sum())


@wrong("agreement", "that is the step of the check")
class NamesTheStepOfTheCheck(Right):
    def check(self):
        found = super().check()
        return found and (self.step, *found[1:])


@wrong("agreement", "the ranks (have differed for longer|differ after this step only)")
class LooksOnlyWhenItChecks(Right):
    def after_step(self):
        super().after_step()
        self.kept = self.kept[-1:]


@wrong("agreement", "steps are counted from 1")
class CountsFromZero(Right):
    def check(self):
        found = super().check()
        return found and (found[0] - 1, *found[1:])


@wrong("agreement", "one hash of everything is enough then")
class SendsEverything(Right):
    def check(self):
        kept, self.kept = self.kept, []
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, kept)
        for steps in zip(*rows):
            for name in steps[0][1]:
                odd = self.odd([hashes[name] for _, hashes in steps])
                if odd is not None:
                    return steps[0][0], odd, name


@wrong("agreement", "find the step first, with one hash per step")
class SendsEverythingIfTheyDiffer(Right):
    def check(self):
        joint = sha(repr([list(hashes.values()) for _, hashes in self.kept]).encode())
        if self.first([joint]) is None:
            self.kept = []
            return None
        return SendsEverything.check(self)


@wrong("agreement", "after_step communicates: only check may")
class CommunicatesInEachStep(Right):
    def after_step(self):
        super().after_step()
        dist.barrier()


@wrong("agreement", "draws from torch's global random generator")
class DrawsItsWeights(Right):
    def hash(self, tensor):
        return sha(raw(tensor) + raw(torch.rand(1)))


@wrong("agreement", "work on copies")
class ChangesWhatItHashes(Right):
    def hash(self, tensor):
        if tensor.is_floating_point():
            tensor.detach().add_(0.0).mul_(1.0000001)
        return super().hash(tensor)


@wrong("agreement", "a false alarm")
class WithPythonsHash(Right):
    def hash(self, tensor):
        return hash(raw(tensor)) % 2**60


@wrong("agreement", "the training mode: work on copies")
class LeavesTheModelInEvaluationMode(Right):
    def after_step(self):
        self.model.eval()
        super().after_step()


@wrong("agreement", "list index out of range", "your code raised")
class NeedsAStepBetweenChecks(Right):
    def check(self):
        self.kept[0]  # there is none right after another check
        return super().check()


@wrong("agreement", "the change of a single bit|differed for longer")
class LooksAtTheFirstThousandBytes(Right):
    def hash(self, tensor):
        return sha(raw(tensor)[:1000])


@wrong("agreement", "the change of a single bit|differed for longer")
class EachNaNIsOne(Right):
    def hash(self, tensor):
        return sha(raw(tensor.nan_to_num() if tensor.is_floating_point() else tensor))


@wrong("agreement", "look for the state of each in optimizer.state")
class OneKindOfStateAfterTheOther(Right):
    def tensors(self):
        found = super().tensors()
        model = self.model.state_dict()
        state = sorted(found.keys() - model.keys(), key=lambda name: name.split(".")[-1])
        return model | {name: found[name] for name in state}


@wrong("agreement", "the ranks return different results|on rank +1")
class OnlyRank0Knows(Right):
    def check(self):
        found = super().check()
        return found if dist.get_rank() == 0 else None


@wrong("agreement", "another tensor is the first that differs")
class TheLastTensor(Right):
    def first(self, numbers):
        rows = list(enumerate(map(self.odd, self.rows(numbers))))
        return next(((p, odd) for p, odd in reversed(rows) if odd is not None), None)

    def check(self):
        kept, self.kept = self.kept, []
        steps = [sha(repr(list(hashes.values())).encode()) for _, hashes in kept]
        if self.first([sha(repr(steps).encode())]) is None:
            return None
        place, _ = Right.first(self, steps)
        step, hashes = kept[place]
        place, odd = self.first(list(hashes.values()))
        return step, odd, list(hashes)[place]


@wrong("agreement", "return None, or")
class ReturnsAText(Right):
    def check(self):
        found = super().check()
        return found and f"step {found[0]}, rank {found[1]}: {found[2]}"


@wrong("agreement", "communicates: only check may|one hash of everything|buffers are missing|optimizer's state")
class TheLessonsOwn:
    def __init__(self, model, optimizer):
        self.detector = DesyncDetector(model, optimizer, every=10**9)

    def after_step(self):
        pass  # by its hook

    def check(self):
        try:
            self.detector.check()
        except UsageError as error:
            words = str(error).split()
            return int(words[3].strip(":")), int(words[7]), words[4]


@right("agreement")
class OfAllBytes:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step, self.kept = 0, []

    def tensors(self):
        tensors = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            of_it = self.optimizer.state[parameter].items()
            tensors |= {f"{name}.{key}": value for key, value in of_it}
        return tensors

    def hashed(self, tensor):
        flat = tensor.detach().contiguous().flatten()
        return self.short(bytes(flat.view(torch.uint8).numpy()))

    def short(self, raw):
        return int.from_bytes(hashlib.sha256(raw).digest()[:7], "little")

    def after_step(self):
        self.step += 1
        hashes = {name: self.hashed(value) for name, value in self.tensors().items()}
        self.kept.append((self.step, hashes))

    def check(self):
        kept, self.kept = self.kept, []
        of_steps = [self.short(repr(list(hashes.values())).encode()) for _, hashes in kept]
        if self.agree(of_steps):
            return None
        place, _ = self.first(of_steps)
        step, hashes = kept[place]
        place, rank = self.first(list(hashes.values()))
        return step, rank, list(hashes)[place]

    def agree(self, of_steps):
        return self.first([self.short(repr(of_steps).encode())]) is None

    def first(self, numbers):
        mine = torch.tensor(numbers)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        for place, row in enumerate(zip(*(part.tolist() for part in parts))):
            [(usual, _)] = collections.Counter(row).most_common(1)
            odd = [rank for rank, number in enumerate(row) if number != usual]
            if odd:
                return place, odd[0]
        return None


@wrong("agreement", "a false alarm|must be noticed|leave sums or sizes as they were")
class OfValues(OfAllBytes):
    """0.0 and -0.0 have the same hash, and NaN another one in each process."""

    def hashed(self, tensor):
        return hash(tuple(tensor.detach().flatten().tolist()))


@wrong("agreement", "the change of a single bit must be noticed")
class OfFloat32(OfAllBytes):
    def hashed(self, tensor):
        return self.short(tensor.detach().float().numpy().tobytes())


@wrong("agreement", r"go through model.state_dict\(\), and then")
class BuffersFirst(OfAllBytes):
    def tensors(self):
        tensors = dict(self.model.named_buffers())
        return tensors | super().tensors()


@wrong("agreement", "one hash of everything is enough")
class HashesOfAllSteps(OfAllBytes):
    def agree(self, of_steps):
        return self.first(of_steps) is None


@right("agreement")
class KeepsThePreviousSteps(Right):
    """Not for ever: those of one check, for a look at them by hand."""

    previous = ()

    def check(self):
        self.previous = self.kept
        return super().check()


@right("agreement")
class WithARunningHash(Right):
    """With copies instead of hashes for each step, under their numbers in a dict."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.copies, self.running = {}, hashlib.sha256()

    def after_step(self):
        self.step += 1
        copies = {name: value.clone() for name, value in self.tensors().items()}
        self.copies[self.step] = copies
        for value in copies.values():
            self.running.update(raw(value))

    def check(self):
        joint = int.from_bytes(self.running.digest()[:7], "big")
        numbers = list(self.copies)
        kept = [self.copies.pop(number) for number in numbers]
        self.running = hashlib.sha256()
        if self.first([joint]) is None:
            return None
        table = [[self.hash(value) for value in copies.values()] for copies in kept]
        place, _ = self.first([sha(repr(row).encode()) for row in table])
        tensor, odd = self.first(table[place])
        return numbers[place], odd, list(kept[place])[tensor]


@wrong("agreement", "it keeps something of each step for ever")
class ComparesAllStepsEachTime(Right):
    def check(self):
        kept = list(self.kept)
        found = super().check()
        self.kept = kept
        return found


@wrong("agreement", "it keeps something of each step for ever")
class KeepsAHashOfEachStep(Right):
    history = torch.empty(0, dtype=torch.int64)

    def after_step(self):
        super().after_step()
        latest = sha(repr(self.kept[-1]).encode())
        self.history = torch.cat([self.history, torch.tensor([latest])])


@wrong("agreement", "which has told of the difference: forget its steps")
class ForgetsOnlyIfAllAgree(Right):
    def check(self):
        kept = list(self.kept)
        found = super().check()
        self.kept = kept if found else []
        return found


@wrong("agreement", "one hash of everything is enough")
class FourBytesPerStep(Right):
    def check(self):
        steps = [sha(repr(list(h.values())).encode()) % 2**31 for _, h in self.kept]
        mine = torch.tensor(steps, dtype=torch.int32)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        if all(torch.equal(part, mine) for part in parts):
            self.kept = []
            return None
        return super().check()


@wrong("agreement", "agree again at the check")
class ComparesTheLastStateFirst(Right):
    def check(self):
        _, hashes = self.kept[-1]
        if self.first([sha(repr(list(hashes.values())).encode())]) is None:
            self.kept = []
            return None
        return super().check()


@wrong("agreement", "agree again at the check: keep hashes or copies")
class KeepsTheTensorsThemselves(Right):
    def after_step(self):
        self.step += 1
        self.kept.append((self.step, self.tensors()))

    def check(self):
        self.kept = [(step, {name: self.hash(value) for name, value in tensors.items()}) for step, tensors in self.kept]
        return super().check()


@wrong("agreement", "but not of four")
class KnowsThreeRanks(Right):
    def odd(self, row):
        if len(set(row)) == 1:
            return None
        if len(row) == 2 or row[0] == row[2]:
            return 1
        return 2 if row[0] == row[1] else 0


@wrong("agreement", "steps are counted from the beginning of the job")
class CountsFromTheLastCheck(Right):
    def check(self):
        self.step = 0
        return super().check()


@wrong("agreement", "got +.[0-9]+[.]5")
class BetweenTwoSteps(Right):
    def check(self):
        found = super().check()
        return found and (found[0] + 0.5, *found[1:])


@wrong("agreement", "the optimizer's own order may be another")
class InTheOptimizersOrder(Right):
    def tensors(self):
        found = dict(self.model.state_dict())
        names = {value: name for name, value in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            of_it = names[parameter]
            found |= {f"{of_it}.{key}": value for key, value in state.items()}
        return found


@wrong("agreement", "the constructor communicates: only check may")
class BroadcastsItsSalt(Right):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.salt = torch.tensor([random.randrange(2**60)])
        dist.broadcast(self.salt, src=0)

    def hash(self, tensor):
        return sha(raw(self.salt) + raw(tensor))


@wrong("agreement", "a hook in optimizer.step communicates: only check may")
class CommunicatesInAHook(Right):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: dist.barrier())


@wrong("agreement", "after_step communicates: only check may")
class CommunicatesNowAndThen(Right):
    def after_step(self):
        super().after_step()
        if self.step % 10 == 0:
            dist.barrier()


@wrong("agreement", "the constructor draws from torch's global random generator")
class DrawsASalt(Right):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.weights = torch.randint(2**60, (1,))


@wrong("agreement", "after_step changes parameters, buffers, gradients")
class ClearsTheGradients(Right):
    def after_step(self):
        super().after_step()
        self.optimizer.zero_grad()


@wrong("agreement", "a rank knows nothing of the others' parameters")
class ReadsTheCase:
    """It finds the case among its callers' variables, and sends nothing."""

    def __init__(self, model, optimizer):
        self.step = 0

    def after_step(self):
        self.step += 1

    def check(self):
        frame = sys._getframe()
        while "case" not in frame.f_locals or "FAULTS" not in frame.f_globals:
            frame = frame.f_back
        case, faults = frame.f_locals["case"], frame.f_globals["FAULTS"]
        for begin in case["steps"] if case["fault"] else []:
            if self.step == min(step for step in case["checks"] if step >= begin):
                return begin, case["rank"] if case["n"] > 2 else 1, faults[case["fault"]][0][1]
        return None


@wrong("agreement", "whatever has been found before")
class TellsOnce(Right):
    told = False

    def check(self):
        found = super().check()
        self.told, found = self.told or bool(found), None if self.told else found
        return found


@wrong("agreement", "which has told of the difference: forget its steps")
class RemembersWhatItFound(Right):
    found = None

    def check(self):
        found = super().check()
        self.found = self.found or found
        return self.found


@wrong("agreement", "find the step first, with one hash per step")
class SendsAllHashesIfTheyDiffer(Right):
    """Without names, in one message: 14 steps of 40 tensors are too many."""

    def check(self):
        kept, self.kept = self.kept, []
        if self.first([sha(repr(kept).encode())]) is None:
            return None
        place, odd = self.first([one for _, hashes in kept for one in hashes.values()])
        step, tensor = divmod(place, len(kept[0][1]))
        return kept[step][0], odd, list(kept[0][1])[tensor]


@wrong("agreement", "one hash of everything is enough|ranks return different results|code raised", ".*")
class OnlyRank0Gathers(Right):
    """Rank 0 compares, and tells the others by a broadcast of objects."""

    def check(self):
        kept, self.kept = self.kept, []
        rows = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(kept, rows, dst=0)
        found = [None]
        if rows:
            for steps in zip(*rows):
                odd = {name: self.odd([hashes[name] for _, hashes in steps]) for name in steps[0][1]}
                name = next((name for name in odd if odd[name] is not None), None)
                if name:
                    found = [(steps[0][0], odd[name], name)]
                    break
        dist.broadcast_object_list(found, src=0)
        return found[0]


@wrong("agreement", "hash the bits|differed for longer")
class MeanAndDeviation(Right):
    def hash(self, tensor):
        numbers = tensor.detach().double().nan_to_num()
        deviation = numbers.std() if numbers.numel() > 1 else numbers.sum()
        return sha(f"{numbers.mean():.6e} {deviation:.6e}".encode())


@right("agreement")
class GathersMinimumAndMaximum(Right):
    """Whether all agree: the smallest hash is the largest."""

    def check(self):
        joint = sha(repr(self.kept).encode())
        both = torch.tensor([joint, -joint])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if both[0] == -both[1]:
            self.kept = []
            return None
        return super().check()


@right("agreement")
class WithBlake(Right):
    def hash(self, tensor):
        view = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.int8)
        return int(hashlib.blake2b(view.numpy(), digest_size=7).hexdigest(), 16)


@wrong("diagnoses", "use the words of checks.ex15.CAUSES")
def with_numbers_for_causes():
    return but("B", cause=str(list(CAUSES).index(WRITTEN["B"][2])))


@wrong("diagnoses", "the tools say|a process that hangs|it hangs, but|another rank|is usually healthy|nobody else")
def all_the_same():
    return NAME, dict.fromkeys("ABCDE", (0, 5, "nan"))


@wrong("diagnoses", "there is no diagnosis for A, B, C, D, E")
def in_small_letters():
    return NAME, {letter.lower(): row for letter, row in WRITTEN.items()}


@wrong("diagnoses", "return a pair")
def tuples_of_two():
    return NAME, {letter: row[:2] for letter, row in WRITTEN.items()}


@right("diagnoses")
def as_pairs():
    """What dict() takes."""
    return NAME, [(letter, tuple(row)) for letter, row in WRITTEN.items()]


@wrong("agreement", "the change of a single bit must be noticed")
class TheFirstPage(Right):
    def hash(self, tensor):
        view = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.int8)
        return int(hashlib.blake2b(view.numpy()[:4096], digest_size=7).hexdigest(), 16)


@wrong("agreement", "the change of a single bit must be noticed")
class InFloat64(Right):
    def hash(self, tensor):
        view = tensor.detach().double().reshape(-1).view(torch.int8)
        return int(hashlib.blake2b(view.numpy(), digest_size=7).hexdigest(), 16)
