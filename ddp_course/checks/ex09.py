"""Exercise 09: the newest good checkpoint, the rest of an epoch, and writing a file
atomically.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError
from ddp_course.school.judge import Wrong, question, trying

# ---- 1: the newest good checkpoint ----


def make_checkpoint(folder, step, seed):
    """A checkpoint, folder/step-N, as a run would write it: two files of random bytes,
    and the manifest.
    """
    checkpoint, manifest = folder / f"step-{step}", {}
    checkpoint.mkdir(parents=True)
    for number, name in enumerate(("shared.pt", "rank0.pt")):
        generator = torch.Generator().manual_seed(seed + 10 * step + number)
        content = (
            torch.randint(256, (2000,), generator=generator, dtype=torch.uint8)
            .numpy()
            .tobytes()
        )
        (checkpoint / name).write_bytes(content)
        manifest[name] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def half_of(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


DAMAGES = {
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", half_of),
    "a file missing": ("rank0.pt", Path.unlink),
    "a file cut short": ("shared.pt", cut_short),
    "a flipped bit": ("shared.pt", flip_a_bit),
    "a flipped bit in its last file": ("rank0.pt", flip_a_bit),
}


def plant(folder, whole, damaged, seed):
    """A folder of checkpoints. whole: steps; damaged: {step: what is wrong with it};
    the folder also has entries that are not checkpoints.
    """
    for step in [*whole, *damaged]:
        checkpoint = make_checkpoint(folder, step, seed)
        if step in damaged:
            name, damage = DAMAGES[damaged[step]]
            damage(checkpoint / name)
    (folder / "notes.txt").write_text("the learning rate was too high")
    (folder / "step-999999.tar").write_text("an archive of somebody's")


def found_in(newest_good, cases, seed):
    """For each case, what the answer returned, and whether the folder is unchanged."""
    found = []
    with tempfile.TemporaryDirectory() as top:
        for number, (whole, damaged) in enumerate(cases):
            folder = Path(top, str(number), "checkpoints")
            folder.mkdir(parents=True)
            plant(folder, whole, damaged, seed)
            before = listing(folder)
            with trying(in_words(whole, damaged)):
                answer = newest_good(folder)
            if isinstance(answer, Path | str):
                answer = (
                    str(Path(answer).relative_to(folder))
                    if Path(answer).is_absolute()
                    else str(answer)
                )
            found.append({"answer": answer, "untouched": listing(folder) == before})
    return found


def listing(folder):
    return sorted(
        (str(path), path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    )


def in_words(whole, damaged):
    words = [
        f"step-{step}" + (f" ({damaged[step]})" if step in damaged else "")
        for step in [*whole, *damaged]
    ]
    return "a folder with " + (", ".join(sorted(words)) if words else "no checkpoint")


@question(
    "Read each manifest with json.loads, and hash each file that it names: "
    "hashlib.sha256(path.read_bytes()).hexdigest(). Any error on the way means that this checkpoint is damaged.",
    "The number in the name decides which checkpoint is newer, not the alphabet: step-90 is older than step-100. "
    "Use int(path.name.removeprefix('step-')) as the key of sorted(), for the folders that glob('step-*') finds and "
    "whose name ends in digits only.",
    "Go through the folders from the largest number down. In a try: manifest = json.loads((path / 'manifest.json')"
    ".read_text()), and return path if all(hashlib.sha256((path / name).read_bytes()).hexdigest() == expected for "
    "name, expected in manifest.items()). except (OSError, ValueError): go on. At the end, return None.",
)
def check_newest_good(answer, draw):
    """In each of several folders with whole and damaged checkpoints, it must find the
    newest whole one, or none.
    """
    steps = sorted(draw.sample(range(2, 9), 2)) + [
        draw.randrange(10, 90),
        draw.randrange(100, 900),
    ]
    first, second, third, last = steps
    cases = [([last], {}), (steps, {})]
    for damage in DAMAGES:
        cases.append(([first, second, third], {last: damage}))
    cases.append(([second, first], {third: "a flipped bit", last: "no manifest"}))
    cases.append(([], {first: "a file missing", last: "half a manifest"}))
    cases.append(([], {}))
    [found] = answer.on_ranks(found_in, cases, draw.randrange(10**6))
    for (whole, damaged), seen in zip(cases, found):
        expected = f"step-{max(whole)}" if whole else None
        got, checked = seen["answer"], in_words(whole, damaged)
        if got != expected:
            rows = {"expected": expected, "got": repr(got) if got is None else got}
            raise Wrong(checked, cause=cause_of_choice(got, whole, damaged), **rows)
        if not seen["untouched"]:
            cause = "the folder has changed: a search for a checkpoint must not change anything"
            raise Wrong(
                checked, expected="an unchanged folder", got="another", cause=cause
            )


def cause_of_choice(got, whole, damaged):
    """The likely cause of a wrong choice."""
    names = {f"step-{step}": why for step, why in damaged.items()}
    if got in names:
        return {
            "no manifest": "this checkpoint was never finished: its manifest, which is written last, is missing",
            "half a manifest": "its manifest is cut short, so it cannot be trusted",
            "a file missing": "its manifest names a file that is missing",
            "a file cut short": "a file is shorter than it was: compare its checksum, not only its name",
            "a flipped bit": "all files exist and have the right length, but the content of one has changed: "
            "compare its checksum with the manifest's",
            "a flipped bit in its last file": "one file is right, but another is not: compare all of them",
        }[names[got]]
    if got in ("step-999999.tar", "notes.txt"):
        return "that is a file, not a checkpoint: use only folders named step- and a number"
    if got is None:
        return "there is a whole checkpoint: if one is damaged, try the next older one"
    if whole and got in [f"step-{step}" for step in whole]:
        by_name = max(f"step-{step}" for step in whole)
        if got == by_name:
            return "as texts, step-9 comes after step-10: compare the numbers"
        return "it is whole, but there is a newer one: start with the largest number"
    return "return the folder's Path, or None if no checkpoint is whole"


# ---- 2: the rest of an epoch ----


def rests(rest_of_epoch, cases):
    """What the answer returns on each rank, for each case; and the order of the whole
    epoch.
    """
    seen = []
    for case in cases:
        with trying(str(case)):
            seen.append(
                [
                    [int(index) for index in rest_of_epoch(rank=rank, **case)]
                    for rank in range(case["ranks"])
                ]
            )
    return seen


def order_of(length, seed, epoch):
    """The order of an epoch, from a DistributedSampler for one rank."""
    sampler = DistributedSampler(range(length), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@question(
    "All ranks follow one order, and each takes every n-th place. So the samples that were seen are the beginning "
    "of that order. How long is it?",
    "Each of the old ranks has done batches_done batches of batch_size, so old_ranks * batches_done * batch_size "
    "places are done. Divide the remaining places among the current ranks.",
    "order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist(); "
    "rest = order[old_ranks * batches_done * batch_size :]; return rest[rank::ranks].",
)
def check_rest_of_epoch(answer, draw):
    """No sample may be seen twice or left out, in the epoch's own order, even if the
    number of ranks changes.
    """
    cases = []
    for old_ranks, ranks in [(2, 2), (3, 2), (2, 3), (1, 4), (3, 1)]:
        batch_size, batches = draw.choice([3, 4, 5]), draw.randrange(2, 4)
        length = old_ranks * batch_size * (batches + 2) + draw.randrange(4, 9)
        cases.append({"length": length, "seed": draw.randrange(1, 1000), "epoch": draw.randrange(1, 9),
                      "batches_done": batches, "batch_size": batch_size, "old_ranks": old_ranks,
                      "ranks": ranks})  # fmt: skip
    cases.append(cases[0] | {"batches_done": 0})
    cases.append(
        cases[1]
        | {
            "length": cases[1]["old_ranks"] * cases[1]["batch_size"] * 3 - 2,
            "batches_done": 3,
        }
    )
    [seen] = answer.on_ranks(rests, cases)
    for case, of_ranks in zip(cases, seen):
        judge_rest(case, of_ranks)


def judge_rest(case, of_ranks):
    order = order_of(case["length"], case["seed"], case["epoch"])
    skipped, ranks = (
        case["old_ranks"] * case["batches_done"] * case["batch_size"],
        case["ranks"],
    )
    rest = order[skipped:]
    for rank, got in enumerate(of_ranks):
        expected = rest[rank::ranks]
        if got == expected:
            continue
        checked = f"{case['length']} samples, epoch {case['epoch']}, of which {case['old_ranks']} ranks have done "
        checked += f"{case['batches_done']} batches of {case['batch_size']}; now there are {ranks} ranks"
        raise Wrong(checked, rank=f"{rank} of {ranks}", expected=expected or "nothing: all samples have been seen",
                    got=got or "nothing", cause=cause_of_rest(case, of_ranks, rank, order, skipped))  # fmt: skip


def cause_of_rest(case, of_ranks, rank, order, skipped):
    """The likely cause of a wrong rest of an epoch."""
    got, ranks, done = (
        of_ranks[rank],
        case["ranks"],
        case["batches_done"] * case["batch_size"],
    )
    first = order_of(case["length"], case["seed"], 0)
    looks = [
        (order[rank::ranks], "that is the whole epoch from its beginning: leave out the samples that have been seen"),
        (order[rank::ranks][done:], "the samples that have been seen depend on the old number of ranks, not on the "
         "current one"),
        (order[done * ranks :][rank::ranks], "the samples that have been seen depend on old_ranks, not on ranks"),
        (order[done:][rank::ranks], "each of the old ranks has done this many places, not all of them together"),
        (order[case["old_ranks"] * case["batches_done"] :][rank::ranks], "batches_done counts batches, not samples"),
        (order[skipped:], "that is the rest for all ranks: each rank must take its own part of it"),
        (first[skipped:][rank::ranks], "every epoch has the order of epoch 0: the shuffle's seed must be seed + epoch"),
        (list(range(case["length"]))[skipped:][rank::ranks], "the samples are in the data set's order, not shuffled"),
    ]  # fmt: skip
    for value, cause in looks:
        if got == value and value != order[skipped:][rank::ranks]:
            return cause
    everybody = sorted(index for of_rank in of_ranks for index in of_rank)
    rest = sorted(order[skipped:])
    if everybody == rest:
        return "no sample is missing or repeated, but the order is wrong: place p of the rest belongs to rank p % ranks"
    if len(everybody) > len(set(everybody)):
        return "some samples come twice: divide the rest without padding; the ranks' shares may differ by one"
    if set(everybody) < set(rest):
        return "some samples are left out that no rank has seen"
    return "do you use DistributedSampler's order, torch.randperm with a generator of seed + epoch?"


# ---- 3: writing a file atomically ----


def a_state(seed, numbers=20_000):
    return {
        "weights": torch.randn(numbers, generator=torch.Generator().manual_seed(seed)),
        "step": seed,
    }


@contextmanager
def watching(path):
    """A list of what this process does to files in the path's folder, and to other
    files that come into it, in order.

    Entries: ("write", name), ("flush", name, bytes that the system has of it),
    ("rename", from where, to what name).
    """
    events, on, original = [], [True], os.fsync

    def hook(event, args):
        if (
            on
            and event == "open"
            and isinstance(args[0], str | bytes)
            and writes(args[1], args[2])
        ):
            events.append(["write", os.fsdecode(args[0])])
        elif on and event == "os.rename":
            events.append(["rename", os.fsdecode(args[0]), os.fsdecode(args[1])])

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        place = (
            os.readlink(f"/proc/self/fd/{number}")
            if os.path.isdir("/proc/self/fd")
            else ""
        )
        events.append(["flush", place, os.fstat(number).st_size])
        time.sleep(0.2)  # so that a rank that does not wait for this one is detected
        original(descriptor)

    sys.addaudithook(hook)
    os.fsync = os.fdatasync = fsync
    try:
        yield events
    finally:
        on.clear()  # an audit hook cannot be removed
        os.fsync = original


def writes(mode, flags):
    return bool(set(mode or "") & set("wax+")) or bool(
        (flags or 0) & (os.O_WRONLY | os.O_RDWR)
    )


def save_on_ranks(save_whole, path, seed):
    """Let all ranks save over an older file, rank 0 later than the others; return what
    each did, and what it found afterwards.
    """
    path = Path(path)
    with process_group(timeout=4) as (rank, _):
        if rank == 0:
            torch.save(a_state(seed + 1), path)
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
        with watching(path) as events:
            save_whole(path, a_state(seed))
        found = reading(path)
        size = path.stat().st_size if path.exists() else 0
        dist.barrier()
        return {
            "events": events,
            "found": found,
            "size": size,
            "left": sorted(os.listdir(path.parent)),
        }


def reading(path):
    """The `step` of a saved state, or what is wrong with the file."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            return torch.load(file, weights_only=True)["step"]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def without_waiting(path, flags):
    """Open a file that an answer has made: no link is followed, no pipe waited for."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, name, 0)  # Windows lacks them
    return os.open(path, flags)


def save_and_die(save_whole, path, seed, offset):
    """Save; the system kills the process as soon as `offset` bytes are in a file."""
    with process_group(timeout=4):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (offset, resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
        )
        save_whole(Path(path), a_state(seed))


@question(
    "Write to another name in the same folder. Renaming is atomic, and the old file stays until then: "
    "os.replace(temporary, path).",
    "Data that a program has written may still be in memory, in Python's buffer or the system's: call file.flush(), "
    "then os.fsync(file.fileno()), and only then rename. One rank writes; the others must wait until it has "
    "finished.",
    "if dist.get_rank() == 0: temporary = path.with_name(path.name + '.tmp'); with open(temporary, 'wb') as file: "
    "torch.save(state, file); file.flush(); os.fsync(file.fileno()). After the with: os.replace(temporary, path). "
    "Then, on all ranks: dist.barrier().",
)
def check_save_whole(answer, draw):
    """If it is killed at any byte, the old file must be unchanged; only rank 0 may
    write, flush and rename, and all ranks must wait.
    """
    seed = 2 * draw.randrange(10**6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        of_ranks = answer.on_ranks(save_on_ranks, str(path), seed, nproc=3)
        judge_saving(of_ranks, path, seed)
        size = path.stat().st_size
        for part in (0.0, draw.uniform(0.1, 0.9), 0.999):
            offset = int(part * size)
            try:
                answer.on_ranks(save_and_die, str(path), seed + 7, offset)
            except RankError as error:
                if "SIGXFSZ" not in str(error):
                    raise
            if (found := reading(path)) != seed:
                checked = f"a file that is saved for the second time, by a process that is killed after {offset:,} "
                checked += f"of {size:,} bytes"
                cause = "the good file was overwritten in place: write under another name, then rename"
                raise Wrong(
                    checked, expected="the first one, whole", got=found, cause=cause
                )


def judge_saving(of_ranks, path, seed):
    n = len(of_ranks)
    checked = f"what happens in save_whole('{path.name}', state), on {n} ranks"
    for rank, seen in enumerate(of_ranks[1:], 1):
        if written := [event for event in seen["events"] if event[0] != "flush"]:
            cause = "all ranks write to the same place: only rank 0 may write"
            raise Wrong(checked, rank=f"{rank} of {n}", expected="no write and no rename", cause=cause,
                        got=f"{Path(written[0][-1]).name} is")  # fmt: skip
    for rank, seen in enumerate(of_ranks):
        if seen["found"] != seed:
            cause = (
                "this rank continues before the file exists: all ranks must wait for rank 0, with dist.barrier() at "
                "the end"
            )
            if rank == 0:
                cause = "rank 0 must write the state with torch.save, and rename the file to `path`"
            raise Wrong(f"the file, when save_whole has returned, on {n} ranks", rank=f"{rank} of {n}",
                        expected="the new state", cause=cause,
                        got="still the old state" if seen["found"] == seed + 1 else seen["found"])  # fmt: skip
    judge_order(checked, of_ranks[0], path, n)
    if of_ranks[0]["left"] != [path.name]:
        more = [name for name in of_ranks[0]["left"] if name != path.name]
        cause = "a file is left behind, one more at each checkpoint: rename it with os.replace instead of copying"
        raise Wrong(
            checked,
            rank=f"0 of {n}",
            expected=f"only {path.name} in its folder",
            got=more,
            cause=cause,
        )


def judge_order(checked, seen, path, n):
    """Raise Wrong unless rank 0 wrote to another name in the same folder, flushed
    everything, and then renamed it.
    """
    where, events = f"0 of {n}", seen["events"]
    expected = "write another name, flush, fsync, rename"
    renames = [
        place
        for place, event in enumerate(events)
        if event[0] == "rename" and Path(event[2]) == path
    ]
    if not renames:
        cause = (
            "the file is written in place: a process that is killed meanwhile has lost the old file and has not "
            "finished the new one"
        )
        raise Wrong(
            checked, rank=where, expected=expected, got="no rename", cause=cause
        )
    source = Path(events[renames[-1]][1])
    if source.parent != path.parent:
        cause = "that folder may be on another disk, where a rename is a copy, byte by byte: use the same folder"
        raise Wrong(checked, rank=where, expected=f"a temporary name in {path.parent.name}", cause=cause,
                    got=f"one in {source.parent}")  # fmt: skip
    flushes = [place for place, event in enumerate(events) if event[0] == "flush" and Path(event[1]).name in
               (source.name, path.name, "")]  # fmt: skip
    if not flushes:
        cause = "the name is on the disk immediately, but the content may be only in memory: after a power cut, the file "
        cause += "exists and is empty. Call os.fsync(file.fileno()) before the rename"
        raise Wrong(checked, rank=where, expected=expected, got="no fsync", cause=cause)
    if flushes[0] > renames[-1]:
        cause = "fsync comes after the rename: for a moment, the new name belongs to data that is only in memory"
        raise Wrong(
            checked, rank=where, expected=expected, got="rename, fsync", cause=cause
        )
    flushed = max(events[place][2] for place in flushes if place < renames[-1])
    if flushed < seen["size"]:
        cause = (
            "fsync flushes only the system's buffer; the rest was still in Python's own buffer: call file.flush() "
            "first"
        )
        raise Wrong(checked, rank=where, expected=f"{seen['size']:,} bytes flushed", got=f"{flushed:,} bytes",
                    cause=cause)  # fmt: skip
