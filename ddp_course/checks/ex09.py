"""Exercise 09: the newest good checkpoint, the rest of an epoch, and a file that cannot
be torn.
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
    beside them, things that are none.
    """
    for step in [*whole, *damaged]:
        checkpoint = make_checkpoint(folder, step, seed)
        if step in damaged:
            name, damage = DAMAGES[damaged[step]]
            damage(checkpoint / name)
    (folder / "notes.txt").write_text("the learning rate was too high")
    (folder / "step-999999.tar").write_text("an archive of somebody's")


def found_in(newest_good, cases, seed):
    """For each case what the answer returned, and whether the folder is as it was."""
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
    "Read each manifest with json.loads, and hash each file that it names: hashlib.sha256(path.read_bytes())"
    ".hexdigest(). Whatever goes wrong on the way means: not this one.",
    "The number in the name decides what is newer, not the alphabet: step-90 is older than step-100. "
    "int(path.name.removeprefix('step-')) as the key of sorted(), for the folders that glob('step-*') finds and "
    "whose rest is all digits.",
    "Go through the folders from the largest number down. In a try: manifest = json.loads((path / 'manifest.json')"
    ".read_text()), and return path if all(hashlib.sha256((path / name).read_bytes()).hexdigest() == expected for "
    "name, expected in manifest.items()). except (OSError, ValueError): go on. At the end, return None.",
)
def check_newest_good(answer, draw):
    """Of several folders, each with whole and damaged checkpoints, it finds the newest
    whole one, or none.
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
            cause = "something in the folder is another now: who looks for a checkpoint changes none"
            raise Wrong(
                checked, expected="the folder as it was", got="another", cause=cause
            )


def cause_of_choice(got, whole, damaged):
    """What a wrong choice looks like."""
    names = {f"step-{step}": why for step, why in damaged.items()}
    if got in names:
        return {
            "no manifest": "this one was never finished: the manifest comes last, and is not there",
            "half a manifest": "its manifest is cut short, and names nothing that one could trust",
            "a file missing": "its manifest names a file that is not there",
            "a file cut short": "a file is shorter than it was: compare its checksum, not only its name",
            "a flipped bit": "all files are there, of the right length, but one has another content: compare its "
            "checksum with the manifest's",
            "a flipped bit in its last file": "one file is right, and another is not: compare all of them",
        }[names[got]]
    if got in ("step-999999.tar", "notes.txt"):
        return "that is a file and no checkpoint: take folders named step- and a number"
    if got is None:
        return "there is a whole one: where one checkpoint is damaged, go on with the next older one"
    if whole and got in [f"step-{step}" for step in whole]:
        by_name = max(f"step-{step}" for step in whole)
        if got == by_name:
            return "as texts, step-9 comes after step-10: compare the numbers"
        return "it is whole, but there is a newer one: go from the largest number down"
    return "return the folder's Path, or None where no checkpoint is whole"


# ---- 2: the rest of an epoch ----


def rests(rest_of_epoch, cases):
    """What the answer gives to each rank, for each case; and the order of the whole
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
    """The order of an epoch, as DistributedSampler has it: asked of a sampler for one
    rank.
    """
    sampler = DistributedSampler(range(length), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@question(
    "All ranks together have walked along one order, each taking every n-th place. So what has been seen is the "
    "beginning of that order; how long is it?",
    "Each of the old ranks has done batches_done batches of batch_size: old_ranks * batches_done * batch_size places "
    "are done. What comes after is dealt out anew, to the ranks that are there now.",
    "order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist(); "
    "rest = order[old_ranks * batches_done * batch_size :]; return rest[rank::ranks].",
)
def check_rest_of_epoch(answer, draw):
    """Nothing is seen twice and nothing is left out, in the epoch's own order, also
    where the number of ranks changes.
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
        raise Wrong(checked, rank=f"{rank} of {ranks}", expected=expected or "nothing: all has been seen",
                    got=got or "nothing", cause=cause_of_rest(case, of_ranks, rank, order, skipped))  # fmt: skip


def cause_of_rest(case, of_ranks, rank, order, skipped):
    """What a wrong rest of an epoch looks like."""
    got, ranks, done = (
        of_ranks[rank],
        case["ranks"],
        case["batches_done"] * case["batch_size"],
    )
    first = order_of(case["length"], case["seed"], 0)
    looks = [
        (order[rank::ranks], "that is the whole epoch from its beginning: leave out what has been seen"),
        (order[rank::ranks][done:], "the ranks of now have not walked so far: what has been seen depends on how many "
         "ranks there were"),
        (order[done * ranks :][rank::ranks], "what has been seen depends on old_ranks, not on ranks"),
        (order[done:][rank::ranks], "so many places have been done by each of the old ranks, not by all together"),
        (order[case["old_ranks"] * case["batches_done"] :][rank::ranks], "batches_done counts batches, not samples"),
        (order[skipped:], "that is the rest for all ranks: each takes its own part of it"),
        (first[skipped:][rank::ranks], "every epoch has the order of epoch 0: the shuffle's seed is seed + epoch"),
        (list(range(case["length"]))[skipped:][rank::ranks], "the samples are in the data set's order, not shuffled"),
    ]  # fmt: skip
    for value, cause in looks:
        if got == value and value != order[skipped:][rank::ranks]:
            return cause
    everybody = sorted(index for of_rank in of_ranks for index in of_rank)
    rest = sorted(order[skipped:])
    if everybody == rest:
        return "nothing is lost or doubled, but the order is another: place p of the rest goes to rank p % ranks"
    if len(everybody) > len(set(everybody)):
        return "some samples come twice: deal out the rest without padding; ranks may differ by one"
    if set(everybody) < set(rest):
        return "some samples are left out that nobody has seen"
    return "is the order DistributedSampler's, torch.randperm with a generator of seed + epoch?"


# ---- 3: a file that cannot be torn ----


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
        time.sleep(0.2)  # so that a rank that does not wait for this one is seen
        original(descriptor)

    sys.addaudithook(hook)
    os.fsync = os.fdatasync = fsync
    try:
        yield events
    finally:
        on.clear()  # an audit hook stays for good
        os.fsync = original


def writes(mode, flags):
    return bool(set(mode or "") & set("wax+")) or bool(
        (flags or 0) & (os.O_WRONLY | os.O_RDWR)
    )


def save_on_ranks(save_whole, path, seed):
    """Have all ranks save over an older file, rank 0 later than the others; say what
    each did, and what it found after.
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
        return torch.load(path, weights_only=True)["step"]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def save_and_die(save_whole, path, seed, offset):
    """Save, and be killed by the system as soon as `offset` bytes are in a file."""
    with process_group(timeout=4):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (offset, resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
        )
        save_whole(Path(path), a_state(seed))


@question(
    "Write to another name in the same folder. Renaming is done at once or not at all, and the old file stays "
    "until then: os.replace(temporary, path).",
    "What a program has written may still be in memory, Python's or the system's: file.flush(), then "
    "os.fsync(file.fileno()), and only then the rename. One rank writes; the others must not go on before it has.",
    "if dist.get_rank() == 0: temporary = path.with_name(path.name + '.tmp'); with open(temporary, 'wb') as file: "
    "torch.save(state, file); file.flush(); os.fsync(file.fileno()). After the with: os.replace(temporary, path). "
    "Then, on all ranks: dist.barrier().",
)
def check_save_whole(answer, draw):
    """Killed at any byte it leaves the old file as it was; and rank 0 alone writes,
    flushes and renames, while all wait.
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
                cause = "the good file has been overwritten in its own place: write under another name, then rename"
                raise Wrong(
                    checked, expected="the first one, whole", got=found, cause=cause
                )


def judge_saving(of_ranks, path, seed):
    n = len(of_ranks)
    checked = f"what happens in save_whole('{path.name}', state), on {n} ranks"
    for rank, seen in enumerate(of_ranks[1:], 1):
        if written := [event for event in seen["events"] if event[0] != "flush"]:
            cause = "all ranks write, and to one place: only rank 0 may"
            raise Wrong(checked, rank=f"{rank} of {n}", expected="nothing is written or renamed", cause=cause,
                        got=f"{Path(written[0][-1]).name} is")  # fmt: skip
    for rank, seen in enumerate(of_ranks):
        if seen["found"] != seed:
            cause = "this rank goes on before the file is there: all wait for rank 0, dist.barrier() at the end"
            if rank == 0:
                cause = "rank 0 writes the state with torch.save, and renames the file to `path`"
            raise Wrong(f"the file, when save_whole has returned, on {n} ranks", rank=f"{rank} of {n}",
                        expected="the new state", cause=cause,
                        got="still the old one" if seen["found"] == seed + 1 else seen["found"])  # fmt: skip
    judge_order(checked, of_ranks[0], path, n)
    if of_ranks[0]["left"] != [path.name]:
        more = [name for name in of_ranks[0]["left"] if name != path.name]
        cause = "a file is left behind, at each checkpoint another one: rename it, with os.replace, and copy nothing"
        raise Wrong(
            checked,
            rank=f"0 of {n}",
            expected=f"only {path.name} in its folder",
            got=more,
            cause=cause,
        )


def judge_order(checked, seen, path, n):
    """Raise Wrong unless rank 0 wrote to another name, had all of it flushed, and then
    renamed it, in one folder.
    """
    where, events = f"0 of {n}", seen["events"]
    expected = "write another name, flush, fsync, rename"
    renames = [
        place
        for place, event in enumerate(events)
        if event[0] == "rename" and Path(event[2]) == path
    ]
    if not renames:
        cause = "it is written in its own place: whoever is killed there has lost the old one and not yet the new"
        raise Wrong(
            checked, rank=where, expected=expected, got="no rename", cause=cause
        )
    source = Path(events[renames[-1]][1])
    if source.parent != path.parent:
        cause = "that folder may be on another disk, where a rename is a copy, byte by byte: take the same folder"
        raise Wrong(checked, rank=where, expected=f"a temporary name in {path.parent.name}", cause=cause,
                    got=f"one in {source.parent}")  # fmt: skip
    flushes = [place for place, event in enumerate(events) if event[0] == "flush" and Path(event[1]).name in
               (source.name, path.name, "")]  # fmt: skip
    if not flushes:
        cause = "the name is on the disk at once, but the content may be only in memory: after a power cut the file "
        cause += "is there and empty. os.fsync(file.fileno()) before the rename"
        raise Wrong(checked, rank=where, expected=expected, got="no fsync", cause=cause)
    if flushes[0] > renames[-1]:
        cause = "fsync comes after the rename: for a moment the new name stands for what is only in memory"
        raise Wrong(
            checked, rank=where, expected=expected, got="rename, fsync", cause=cause
        )
    flushed = max(events[place][2] for place in flushes if place < renames[-1])
    if flushed < seen["size"]:
        cause = "fsync flushes what the system has; the rest was still in Python's own buffer: file.flush() first"
        raise Wrong(checked, rank=where, expected=f"{seen['size']:,} bytes flushed", got=f"{flushed:,} bytes",
                    cause=cause)  # fmt: skip
