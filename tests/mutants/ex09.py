"""Exercise 09: exact resume."""

import hashlib
import io
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from os import fsync, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ddp_course import UsageError, runs
from torch.utils.data import DistributedSampler

from mutants import right, wrong

# ---- newest_good ----


def number_of(checkpoint):
    text = checkpoint.name.removeprefix("step-")
    return int(text) if text.isdigit() else -1


def by_number(folder):
    return sorted(
        (path for path in folder.glob("step-*") if path.is_dir() and number_of(path) >= 0), key=number_of, reverse=True
    )


def good(checkpoint):
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return all(
            hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == expected
            for name, expected in manifest.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


@right("newest_good")
def first_of_those_that_are(folder):
    return next(filter(good, by_number(folder)), None)


@right("newest_good")
def the_largest_of_all_good_ones(folder):
    """Looks at all, and returns text."""
    found = [path for path in by_number(folder) if good(path)]
    return str(max(found, key=number_of)) if found else None


@wrong("newest_good", "as texts, step-9 comes after step-10")
def sorts_as_text(folder):
    return next(filter(good, sorted((p for p in by_number(folder)), reverse=True, key=str)), None)


@wrong("newest_good", "it is whole, but there is a newer one")
def takes_the_oldest(folder):
    return next(filter(good, reversed(by_number(folder))), None)


@wrong("newest_good", "this checkpoint was never finished|its manifest is cut short")
def takes_the_last(folder):
    return next(iter(by_number(folder)), None)


@wrong("newest_good", "there is a whole checkpoint: if one is damaged, try")
def gives_up(folder):
    for checkpoint in by_number(folder):
        return checkpoint if good(checkpoint) else None


@wrong("newest_good", "a file is shorter than it was|the content of one has changed")
def looks_at_names_only(folder):
    for checkpoint in by_number(folder):
        try:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            if all((checkpoint / name).exists() for name in manifest):
                return checkpoint
        except (OSError, ValueError, AttributeError, TypeError):
            pass


@wrong("newest_good", "the other files are right, but one is not")
def compares_one_file(folder):
    for checkpoint in by_number(folder):
        try:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            [(name, expected), *_] = manifest.items()
            if all((checkpoint / other).exists() for other in manifest):
                if hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == expected:
                    return checkpoint
        except (OSError, ValueError, AttributeError, TypeError):
            pass


@wrong("newest_good", "a search for a checkpoint must not change anything")
def tidies_up(folder):
    for checkpoint in by_number(folder):
        if good(checkpoint):
            return checkpoint
        shutil.rmtree(checkpoint)


@wrong("newest_good", r"FileNotFoundError[\s\S]*in a folder with", "your code raised")
def trusts_every_manifest(folder):
    for checkpoint in by_number(folder):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if all(hashlib.sha256((checkpoint / n).read_bytes()).hexdigest() == manifest[n] for n in manifest):
            return checkpoint


@wrong("newest_good", "IndexError|StopIteration", "your code raised")
def fails_where_there_is_none(folder):
    return [path for path in by_number(folder) if good(path)][0]


@right("newest_good")
def in_chunks(folder):
    """By regular expression and file_digest, from a list of all candidates."""
    numbered = {}
    for path in folder.iterdir():
        if found := re.fullmatch(r"step-(\d+)", path.name):
            numbered[int(found[1])] = path
    while numbered:
        checkpoint = numbered.pop(max(numbered))
        try:
            manifest = dict(json.loads((checkpoint / "manifest.json").read_bytes()))
            for name, expected in manifest.items():
                with open(checkpoint / name, "rb") as file:
                    assert hashlib.file_digest(file, "sha256").hexdigest() == expected
            return checkpoint
        except Exception:
            continue


def newest_by(is_good):
    """An answer that takes the newest checkpoint for which is_good(path, manifest)."""

    def newest_good(folder):
        for checkpoint in by_number(folder):
            try:
                manifest = json.loads((checkpoint / "manifest.json").read_text())
                if is_good(checkpoint, manifest):
                    return checkpoint
            except (OSError, ValueError, AttributeError, TypeError):
                pass

    return newest_good


def sha256(path, most=None):
    return hashlib.sha256(path.read_bytes()[:most]).hexdigest()


@wrong("newest_good", "this checkpoint is whole, and it was refused")
def hashes_a_kilobyte(folder):
    return newest_by(lambda c, m: all(sha256(c / name, 1024) == m[name] for name in m))(folder)


@wrong("newest_good", "this checkpoint is whole, and it was refused")
def compares_digests_of_another_kind(folder):
    return newest_by(lambda c, m: all(hashlib.sha256((c / name).read_bytes()).digest() == m[name] for name in m))(
        folder
    )


@wrong("newest_good", "the other files are right, but one is not")
def compares_two_files(folder):
    return newest_by(
        lambda c, m: all((c / name).exists() for name in m) and all(sha256(c / name) == m[name] for name in list(m)[:2])
    )(folder)


@wrong("newest_good", "and it was refused.*of no other file")
def hashes_every_file_in_the_folder(folder):
    def is_good(checkpoint, manifest):
        there = {path.name: sha256(path) for path in checkpoint.iterdir()}
        there.pop("manifest.json")
        return there == manifest

    return newest_by(is_good)(folder)


@wrong("newest_good", "its manifest is not a JSON object")
def takes_null_for_an_empty_manifest(folder):
    return newest_by(lambda c, m: all(sha256(c / name) == value for name, value in (m or {}).items()))(folder)


@wrong("newest_good", "TypeError|AttributeError", "your code raised")
def expects_an_object(folder):
    for checkpoint in by_number(folder):
        try:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            if all(sha256(checkpoint / name) == manifest[name] for name in manifest):
                return checkpoint
        except (OSError, json.JSONDecodeError):
            pass


@wrong("newest_good", "its name is not step- and a number")
def takes_the_first_number_in_the_name(folder):
    found = [p for p in folder.glob("step-*") if p.is_dir() and good(p)]
    return max(found, key=lambda p: int(re.search(r"\d+", p.name)[0]), default=None)


@wrong("newest_good", "the folder of the whole program")
def goes_there(folder):
    os.chdir(folder)
    return next(filter(good, by_number(folder)), None)


@wrong("newest_good", "does something remain from an earlier call")
def remembers(folder, seen=[]):  # noqa: B006
    seen += filter(good, by_number(folder))
    return max(seen, key=number_of, default=None)


@wrong("newest_good", "by its name alone")
def its_name_only(folder):
    found = next(filter(good, by_number(folder)), None)
    return found and found.name


@wrong("newest_good", "as texts|it was refused|there is a whole checkpoint|newer one")
def the_lessons_own(folder):
    """Lesson 9 writes all numbers with eight digits."""
    from ddp_course.checkpoints import whole as checkpoints

    found = reversed(checkpoints.finished(folder))
    return next(filter(checkpoints.is_whole, found), None)


@wrong("newest_good", "the one with the largest number|as texts")
def by_time(folder):
    """The newest by its date."""
    found = [(path.stat().st_mtime, path) for path in folder.iterdir() if number_of(path) >= 0 and good(path)]
    return max(found)[1] if found else None


@wrong("newest_good", "the one with the largest number|as texts")
def by_the_time_of_the_manifest(folder):
    return max(filter(good, by_number(folder)), key=lambda path: os.path.getctime(path / "manifest.json"), default=None)


@wrong("newest_good", "the one with the largest number|as texts")
def the_last_that_is_listed(folder):
    found = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    return ([None] + [path for path in found if number_of(path) >= 0 and good(path)])[-1]


@wrong("newest_good", "the one with the largest number")
def longer_names_are_newer(folder):
    return max(filter(good, by_number(folder)), key=lambda path: (len(path.name), path.name), default=None)


@wrong("newest_good", r"UnicodeDecodeError[\s\S]*a flipped bit in its manifest", "your code raised")
def only_json_errors(folder):
    for checkpoint in by_number(folder):
        with suppress(OSError, json.JSONDecodeError):
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            if isinstance(manifest, dict) and all(sha256(checkpoint / name) == manifest[name] for name in manifest):
                return checkpoint


@wrong("newest_good", "NotADirectoryError", "your code raised")
def knows_of_missing_files_only(folder):
    """Among them are files of such a name."""
    paths = [path for path in folder.glob("step-*") if number_of(path) >= 0]
    for checkpoint in sorted(paths, key=number_of, reverse=True):
        with suppress(FileNotFoundError, ValueError, AttributeError):
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            if all(sha256(checkpoint / name) == expected for name, expected in manifest.items()):
                return checkpoint


@wrong("newest_good", "'list' object has no attribute 'items'", "your code raised")
def leaves_out_null_only(folder):
    for checkpoint in by_number(folder):
        with suppress(OSError, ValueError):
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            if manifest is not None and all(sha256(checkpoint / name) == value for name, value in manifest.items()):
                return checkpoint


@wrong("newest_good", "directly in it")
def searches_everywhere(folder):
    found = {number_of(path.parent): path.parent for path in folder.rglob("manifest.json") if good(path.parent)}
    found.pop(-1, None)
    return found[max(found)] if found else None


@wrong("newest_good", "its name is not step- and a number")
def a_number_at_the_end(folder):
    found = [path for path in folder.iterdir() if re.search(r"step-\d+$", path.name) and good(path)]
    return max(found, key=lambda path: int(path.name.split("-")[-1]), default=None)


@right("newest_good")
def by_regular_expression_of_the_last_first(folder):
    """By os.walk, and with the whole manifest made again."""
    top, names, _ = next(os.walk(folder))
    numbers = {int(name[5:]): name for name in names if re.fullmatch("step-[0-9]+", name)}
    for number in sorted(numbers)[::-1]:
        place = os.path.join(top, numbers[number])
        try:
            manifest = json.loads(Path(place, "manifest.json").read_bytes())
            now = {name: hashlib.sha256(Path(place, name).read_bytes()).hexdigest() for name in manifest}
        except (OSError, ValueError, TypeError):
            continue
        if isinstance(manifest, dict) and now == manifest:
            return Path(place)


# ---- plan_checkpoints ----


def interval(size, disk_speed, machine_mtbf, machines):
    return math.sqrt(2 * size / disk_speed * machine_mtbf / machines)


def bytes_of(tensors):
    return sum(value.numel() * value.element_size() for value in tensors)


def adam_of(model):
    return 2 * bytes_of(value for value in model.parameters() if value.requires_grad)


def state_of(model):
    """The tensors of a state_dict, each once."""
    return {id(value): value for value in model.state_dict(keep_vars=True).values()}


@right("plan_checkpoints")
def from_the_state(model, disk_speed, machine_mtbf, machines):
    size = bytes_of(state_of(model).values()) + adam_of(model)
    return size, interval(size, disk_speed, machine_mtbf, machines)


@right("plan_checkpoints")
def with_names_and_counts(model, disk_speed, machine_mtbf, machines):
    """Counts Adam's steps and some bytes for each name; as NumPy numbers, in a list."""
    size = np.int64(bytes_of(state_of(model).values()) + adam_of(model))
    size += sum(4 + 600 for _ in model.parameters())
    failures = 1 / (machines / machine_mtbf)
    return [size, np.sqrt(2 * (size / disk_speed) * failures)]


@right("plan_checkpoints")
def by_an_optimizer_on_meta(model, disk_speed, machine_mtbf, machines):
    """Lets AdamW take a step without numbers."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    averages = [v for state in optimizer.state.values() for v in state.values()]
    size = bytes_of(state_of(model).values()) + bytes_of(averages)
    return size, interval(size, disk_speed, machine_mtbf, machines)


def planned(size_of):
    """An answer with another size."""

    def plan_checkpoints(model, disk_speed, machine_mtbf, machines):
        size = size_of(model)
        return size, interval(size, disk_speed, machine_mtbf, machines)

    return plan_checkpoints


@wrong("plan_checkpoints", "a frozen parameter|gradients are not in the file", several=True)
def sixteen_bytes():
    return [planned(lambda model: 16 * sum(p.numel() for p in model.parameters()))]


@wrong("plan_checkpoints", "the optimizer keeps nothing for it", several=True)
def averages_of_frozen_ones():
    return [planned(lambda model: bytes_of(state_of(model).values()) + 2 * bytes_of(model.parameters()))]


@wrong("plan_checkpoints", "two names", several=True)
def the_whole_state_dict():
    return [planned(lambda model: bytes_of(model.state_dict().values()) + adam_of(model))]


@wrong("plan_checkpoints", "buffers are missing", several=True)
def parameters_only():
    return [planned(lambda model: bytes_of(model.parameters()) + adam_of(model))]


@wrong("plan_checkpoints", "persistent=False is not in", several=True)
def all_buffers():
    return [planned(lambda model: bytes_of([*model.parameters(), *model.buffers()]) + adam_of(model))]


@wrong("plan_checkpoints", "Adam's averages are missing", several=True)
def model_only():
    return [planned(lambda model: bytes_of(state_of(model).values()))]


@wrong("plan_checkpoints", "Adam keeps two averages", several=True)
def one_average():
    return [planned(lambda model: bytes_of(state_of(model).values()) + adam_of(model) // 2)]


@wrong("plan_checkpoints", "in the dtype of the parameter", several=True)
def averages_in_float32():
    return [
        planned(
            lambda model: (
                bytes_of(state_of(model).values()) + 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
            )
        )
    ]


@wrong("plan_checkpoints", "these are numbers, not bytes", several=True)
def numbers_for_bytes():
    return [planned(lambda model: 3 * sum(p.numel() for p in model.parameters()))]


@wrong("plan_checkpoints", "it has one pair of averages", several=True)
def averages_of_both_names():
    def size_of(model):
        named = model.named_parameters(remove_duplicate=False)
        averages = 2 * bytes_of(value for _, value in named if value.requires_grad)
        return bytes_of(state_of(model).values()) + averages

    return [planned(size_of)]


@wrong("plan_checkpoints", "nobody keeps a copy in float32", several=True)
def master_weights():
    def size_of(model):
        trained = [value for value in model.parameters() if value.requires_grad]
        more = sum(4 * v.numel() for v in trained if v.element_size() == 2)
        averages = 8 * sum(value.numel() for value in trained)
        return bytes_of(state_of(model).values()) + averages + more

    return [planned(size_of)]


@wrong("plan_checkpoints", "bytes come first")
def seconds_first(model, disk_speed, machine_mtbf, machines):
    return from_the_state(model, disk_speed, machine_mtbf, machines)[::-1]


def every(rule):
    """An answer with the right size and another interval."""

    def plan_checkpoints(model, disk_speed, machine_mtbf, machines):
        size = bytes_of(state_of(model).values()) + adam_of(model)
        return size, rule(size / disk_speed, machine_mtbf, machines)

    return [plan_checkpoints]


@wrong("plan_checkpoints", "when any of its n machines fails", several=True)
def for_one_machine():
    return every(lambda save, mtbf, n: math.sqrt(2 * save * mtbf))


@wrong("plan_checkpoints", "divide by their number", several=True)
def more_machines_last_longer():
    return every(lambda save, mtbf, n: math.sqrt(2 * save * mtbf * n))


@wrong("plan_checkpoints", "half of the interval on average", several=True)
def without_the_two():
    return every(lambda save, mtbf, n: math.sqrt(save * mtbf / n))


@wrong("plan_checkpoints", "the square root is missing", several=True)
def without_the_root():
    return every(lambda save, mtbf, n: 2 * save * mtbf / n)


@wrong("plan_checkpoints", "return a tuple of the two")
def the_size_only(model, disk_speed, machine_mtbf, machines):
    return bytes_of(state_of(model).values()) + adam_of(model)


@wrong("plan_checkpoints", "meta|Error", "your code raised")
def tries_it(model, disk_speed, machine_mtbf, machines):
    """Measures instead of predicting: there are no numbers to save."""
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    model(torch.zeros(1, 1)).sum().backward()
    size = 3 * len(memory.getvalue())
    return size, interval(size, disk_speed, machine_mtbf, machines)


@wrong("plan_checkpoints", "not all parameters have the dtype of the first one", several=True)
def all_as_the_first_one():
    def size_of(model):
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
        numbers = sum(value.numel() for value in state_of(model).values()) + 2 * trained
        return next(model.parameters()).element_size() * numbers

    return [planned(size_of)]


@wrong("plan_checkpoints", "persistent=False is not in|buffers are missing", several=True)
def knows_its_own_buffers_only():
    """Those of the modules within are not in _non_persistent_buffers_set."""

    def size_of(model):
        left_out = model._non_persistent_buffers_set
        buffers = [value for name, value in model.named_buffers() if name not in left_out]
        return bytes_of([*model.parameters(), *buffers]) + adam_of(model)

    return [planned(size_of)]


@wrong("plan_checkpoints", "buffers are not trained", several=True)
def averages_of_all_that_is_saved():
    def size_of(model):
        frozen = [value for value in model.parameters() if not value.requires_grad]
        return 3 * bytes_of(state_of(model).values()) - 2 * bytes_of(frozen)

    return [planned(size_of)]


@wrong("plan_checkpoints", "saving takes bytes / disk_speed seconds", several=True)
def bytes_for_seconds():
    def plan_checkpoints(model, disk_speed, machine_mtbf, machines):
        size = bytes_of(state_of(model).values()) + adam_of(model)
        return size, math.sqrt(2 * size * machine_mtbf / machines)

    return [plan_checkpoints]


# ---- rest_of_epoch ----


def order_of(length, seed):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


@right("rest_of_epoch")
def by_the_sampler(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """Asks the old ranks' samplers what they have seen."""
    seen = set()
    for old in range(old_ranks):
        sampler = DistributedSampler(range(length), old_ranks, old, seed=seed)
        sampler.set_epoch(epoch)
        seen |= set(list(sampler)[: batches_done * batch_size])
    sampler = DistributedSampler(range(length), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    rest = [index for index in sampler if index not in seen]
    return rest[rank::ranks]


@right("rest_of_epoch")
def as_a_tensor(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    order = torch.tensor(order_of(length, seed + epoch))
    return order[old_ranks * batches_done * batch_size + rank :: ranks]


@wrong("rest_of_epoch", "that is the whole epoch from its beginning")
def from_the_beginning(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[rank::ranks]


@wrong("rest_of_epoch", "depend on the old number of ranks, not on the current|depend on old_ranks, not on ranks")
def each_rank_skips_its_own(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[rank::ranks][batches_done * batch_size :]


@wrong("rest_of_epoch", "depend on (old_ranks|the old number)")
def with_the_ranks_of_now(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "each of the old ranks has done this many places, not all of them together")
def one_ranks_share(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "batches_done counts batches, not samples")
def batches_for_samples(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[old_ranks * batches_done :][rank::ranks]


@wrong("rest_of_epoch", "the order of epoch 0")
def forgets_the_epoch(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed)[old_ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "that is the rest for all ranks")
def everybody_takes_all(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]


@wrong("rest_of_epoch", "not shuffled")
def without_a_shuffle(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    return list(range(length))[old_ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "no sample is missing or repeated, but the order is wrong")
def in_blocks(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    share = -(-len(rest) // ranks)
    return rest[rank * share : (rank + 1) * share]


@wrong("rest_of_epoch", "some samples come twice")
def pads_the_rest(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    share = -(-len(rest) // ranks) + 1
    return (rest * (2 + ranks))[rank : share * ranks : ranks] if rest else []


@wrong("rest_of_epoch", "some samples are left out")
def drops_the_last(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    return rest[rank::ranks][:-1]


@right("rest_of_epoch")
def by_numpy(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """NumPy integers; the rest is dealt out by its places."""
    order = np.array(order_of(length, seed + epoch))
    places = np.arange(length) - old_ranks * batches_done * batch_size
    return [index for place, index in zip(places, order) if place >= 0 and place % ranks == rank]


@wrong("rest_of_epoch", "the padding is in it")
def keeps_the_padding(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    shares = []
    for old in range(old_ranks):
        sampler = DistributedSampler(range(length), old_ranks, old, seed=seed)
        sampler.set_epoch(epoch)
        shares.append(list(sampler)[batches_done * batch_size :])
    rest = [index for places in zip(*shares) for index in places]
    return rest[rank::ranks]


@wrong("rest_of_epoch", "the padding is in it|seen come again|come twice")
def pads_from_the_beginning(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    order = order_of(length, seed + epoch)
    order += order[: -length % ranks]
    return order[old_ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "dropout draws from torch's global generator")
def seeds_the_global_generator(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist()
    return order[old_ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "dropout draws from torch's global generator")
def seeds_it_again(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """The seed comes back, and the state does not."""
    before = torch.initial_seed()
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist()
    torch.manual_seed(before)
    return order[old_ranks * batches_done * batch_size :][rank::ranks]


@wrong("rest_of_epoch", "the padding is in it|depend on")
def lesson_nines_sampler(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    from ddp_course import lesson09  # here, or all ranks of all candidates import it

    sampler = lesson09.ResumableSampler(range(length), ranks, rank, seed=seed)
    sampler.set_epoch(epoch)
    sampler.start = batches_done * batch_size
    return list(sampler)


@wrong("rest_of_epoch", "depend on|the padding|seen come again")
def torchs_sampler(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    sampler = DistributedSampler(range(length), ranks, rank, seed=seed, drop_last=False)
    sampler.set_epoch(epoch)
    return list(sampler)[old_ranks * batches_done * batch_size // ranks :]


@wrong("rest_of_epoch", "no sample is missing or repeated, but the order is wrong")
def backwards(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    return rest[rank::ranks][::-1]


@wrong("rest_of_epoch", "no sample is missing or repeated, but the order is wrong")
def sorts_the_rest(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    return sorted(set(rest))[rank::ranks]


@wrong("rest_of_epoch", "place p of the rest belongs to rank p % ranks")
def by_places_in_the_whole_epoch(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """Position p of the whole order belongs to rank p % ranks."""
    skipped = old_ranks * batches_done * batch_size
    return [
        index
        for place, index in enumerate(order_of(length, seed + epoch))
        if place >= skipped and place % ranks == rank
    ]


@wrong("rest_of_epoch", "some samples come twice")
def a_full_row_of_padding(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """Right where a rest is left over, and cut: wrong where the ranks divide it."""
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    share = len(rest) // ranks + (rank < len(rest) % ranks or len(rest) % ranks == 0)
    return (rest + rest)[rank::ranks][:share]


@wrong("rest_of_epoch", "some samples come twice|the padding is in it")
def at_least_one_for_each(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """No rank may be without samples, or it would hang, so the last ones repeat one."""
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :]
    return rest[rank::ranks] or rest[:1]


@wrong("rest_of_epoch", "some samples are left out")
def leaves_out_the_short_batches(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    rest = order_of(length, seed + epoch)[old_ranks * batches_done * batch_size :][rank::ranks]
    return rest[: len(rest) // batch_size * batch_size]


@right("rest_of_epoch")
def in_a_fork_of_the_generator(length, seed, epoch, batches_done, batch_size, old_ranks, rank, ranks):
    """The global generator is put back; the rest is a queue from which all ranks take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + epoch)
        queue = torch.randperm(length).tolist()[batches_done * old_ranks * batch_size :]
    shares = [[] for _ in range(ranks)]
    for place in range(len(queue)):
        shares[place % ranks].append(queue[place])
    return tuple(shares[rank])


# ---- save_whole ----


def to_disk(file):
    file.flush()
    os.fsync(file.fileno())


def by_rank_0(write):
    """Call write() on rank 0, and raise its error on all ranks."""
    problem = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise OSError(problem[0])


@contextmanager
def gone_afterwards(temporary):
    """Remove a file in the end, if it is still there."""
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@right("save_whole")
def from_memory(path, state):
    """By os.open and os.rename; everybody waits for a number of rank 0's."""
    failed = torch.ones(1)
    if dist.get_rank() == 0:
        name = None
        with suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                name = file.name
                file.write(in_memory(state))
                to_disk(file)
            os.rename(name, path)
            failed.zero_()
        if failed and name:
            os.remove(name)
    dist.broadcast(failed, src=0)
    if failed:
        raise RuntimeError("rank 0 could not write")


@right("save_whole")
def flushes_afterwards_and_the_folder_too(path, state):
    """torch.save opens and closes the file itself; it can be opened again and flushed."""

    def write():
        with gone_afterwards(path.parent / "new") as temporary:
            torch.save(state, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    problem, all_problems = None, [None] * dist.get_world_size()
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:
            problem = error
    dist.all_gather_object(all_problems, problem and repr(problem))
    if problem:
        raise problem
    assert not any(all_problems), all_problems


@wrong("save_whole", "the file is written in place|all ranks write")
def in_place(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


@wrong("save_whole", "only rank 0 may")
def every_rank(path, state):
    temporary = path.with_name(f"{path.name}.{dist.get_rank()}")
    with temporary.open("wb") as file:
        torch.save(state, file)
        to_disk(file)
    os.replace(temporary, path)
    dist.barrier()


@wrong("save_whole", "this rank continues before the file exists")
def nobody_waits(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            to_disk(file)
        os.replace(temporary, path)


@wrong("save_whole", "this rank continues before the file exists")
def waits_too_early(path, state):
    dist.barrier()
    nobody_waits(path, state)


@wrong("save_whole", "only in memory: after a power cut")
def without_fsync(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)
    dist.barrier()


@wrong("save_whole", "still in Python's own buffer")
def without_flush(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        memory = io.BytesIO()
        torch.save(state, memory)
        with temporary.open("wb", buffering=2**20) as file:
            file.write(memory.getvalue())
            os.fsync(file.fileno())
        os.replace(temporary, path)
    dist.barrier()


@wrong("save_whole", "fsync comes after the rename")
def flushes_too_late(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    dist.barrier()


@wrong("save_whole", "may be on another disk")
def elsewhere(path, state):
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            torch.save(state, file)
            to_disk(file)
        shutil.move(file.name, path)
    dist.barrier()


@wrong("save_whole", "a file is left behind|the file is written in place")
def copies(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            to_disk(file)
        shutil.copy(temporary, path)
    dist.barrier()


@wrong("save_whole", "torch.save, and rename the file to `path`")
def forgets_the_suffix(path, state):
    if dist.get_rank() == 0:
        temporary = Path(f"{path}.tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            to_disk(file)
        path.unlink()
    dist.barrier()


@right("save_whole")
def with_names_imported_before(path, state):
    def write():
        with gone_afterwards(path.with_name("new")) as temporary:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                fsync(file)
            replace(temporary, path)

    by_rank_0(write)


@right("save_whole")
def flushes_all_disks(path, state):
    def write():
        with gone_afterwards(path.with_name("new")) as temporary:
            torch.save(state, temporary)
            os.sync()
            temporary.rename(path)

    by_rank_0(write)


@right("save_whole")
def writes_synchronously(path, state):
    def write():
        with gone_afterwards(path.with_name("new")) as name:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_SYNC
            with open(os.open(name, flags), "wb") as file:
                file.write(in_memory(state))
            os.replace(name, path)

    by_rank_0(write)


@right("save_whole")
def waits_by_messages(path, state):
    """Lesson 9's function, and a message to each rank."""
    failed = torch.zeros(1)
    if dist.get_rank() == 0:
        try:
            runs.write_atomically(path, in_memory(state))
        except UsageError:
            failed += 1
        for other in range(1, dist.get_world_size()):
            dist.send(failed, other)
    else:
        dist.recv(failed, 0)
    if failed:
        raise OSError("cannot write")


@wrong("save_whole", "this rank waits for it: rank 0 must first tell")
def lesson_nines_way(path, state):
    if dist.get_rank() == 0:
        runs.write_atomically(path, in_memory(state))
    dist.barrier()


@wrong("save_whole", "goes on as if the file was there")
def tells_them_that_it_is_over(path, state):
    try:
        if dist.get_rank() == 0:
            runs.write_atomically(path, in_memory(state))
    finally:
        dist.barrier()


@wrong("save_whole", "goes on as if it was: raise the error")
def only_prints(path, state):
    if dist.get_rank() == 0:
        try:
            runs.write_atomically(path, in_memory(state))
        except UsageError as error:
            print(error)
    dist.barrier()


@wrong("save_whole", "half a file is left behind")
def leaves_half_a_file(path, state):
    by_rank_0(lambda: written(path, state).replace(path))


@wrong("save_whole", "rank 0 must first tell")
def fails_while_it_cleans_up(path, state):
    """Removes the temporary file, also where it was never there."""
    failed = torch.zeros(1)
    if dist.get_rank() == 0:
        try:
            written(path, state).replace(path)
        except Exception:
            path.with_name("new").unlink()
            failed += 1
    dist.broadcast(failed, 0)
    if failed:
        raise OSError("cannot write")


@wrong("save_whole", "rank 0 must first tell")
def catches_errors_of_the_system_only(path, state):
    """Where the disk is full, torch.save raises a RuntimeError."""
    failed = torch.zeros(1)
    if dist.get_rank() == 0:
        try:
            written(path, state).replace(path)
        except OSError:
            path.with_name("new").unlink(missing_ok=True)
            failed += 1
    dist.broadcast(failed, 0)
    if failed:
        raise OSError("cannot write")


def in_memory(state):
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def written(path, state):
    """A file beside `path` that is on the disk."""
    temporary = path.with_name("new")
    with temporary.open("wb") as file:
        torch.save(state, file)
        to_disk(file)
    return temporary


@wrong("save_whole", "for a moment there is no file at `path`")
def unlinks_first(path, state):
    """As people write it for Windows."""
    if dist.get_rank() == 0:
        temporary = written(path, state)
        path.unlink(missing_ok=True)
        temporary.rename(path)
    dist.barrier()


@wrong("save_whole", "for a moment there is no file at `path`")
def keeps_a_backup(path, state):
    if dist.get_rank() == 0:
        temporary, backup = written(path, state), path.with_name("backup")
        if path.exists():
            os.rename(path, backup)
        os.rename(temporary, path)
        backup.unlink(missing_ok=True)
    dist.barrier()


@wrong("save_whole", "for a moment there is no file at `path`")
def links(path, state):
    if dist.get_rank() == 0:
        temporary = written(path, state)
        path.unlink(missing_ok=True)
        os.link(temporary, path)
        temporary.unlink()
    dist.barrier()


@wrong("save_whole", "no sleep is long enough")
def sleeps(path, state):
    if dist.get_rank() == 0:
        written(path, state).rename(path)
    else:
        time.sleep(2)


@wrong("save_whole", "this rank continues before the file exists")
def waits_before_the_rename(path, state):
    temporary = written(path, state) if dist.get_rank() == 0 else None
    dist.barrier()
    if temporary:
        temporary.replace(path)


@wrong("save_whole", "the rename comes too early")
def renames_an_open_file(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_name("new")
        with temporary.open("wb", buffering=2**20) as file:
            file.write(in_memory(state))
            os.fsync(file.fileno())
            os.replace(temporary, path)
    dist.barrier()


@wrong("save_whole", "must be able to overwrite it")
def refuses_what_is_left(path, state):
    if dist.get_rank() == 0:
        temporary = path.with_name("new")
        with temporary.open("xb") as file:
            torch.save(state, file)
            to_disk(file)
        temporary.replace(path)
    dist.barrier()


@wrong("save_whole", "the file must hold the whole state")
def rounds(path, state):
    if dist.get_rank() == 0:
        half = {**state, "weights": state["weights"].bfloat16().float()}
        written(path, half).replace(path)
    dist.barrier()


@wrong("save_whole", "do not change it")
def empties_the_state(path, state):
    if dist.get_rank() == 0:
        written(path, state).replace(path)
    dist.barrier()
    state.clear()


@wrong("save_whole", "FileNotFoundError", "your code raised")
def expects_an_older_file(path, state):
    if dist.get_rank() == 0:
        temporary = written(path, state)
        os.stat(path)
        temporary.replace(path)
    dist.barrier()


@right("save_whole")
def hidden_and_as_text(path, state):
    """A hidden file by its name, which torch.save opens; all ranks get all errors."""
    error, path = None, str(path)
    if dist.get_rank() == 0:
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name}")
        try:
            torch.save(state, temporary)
            descriptor = os.open(temporary, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)
            os.rename(temporary, path)
        except Exception as raised:
            error = repr(raised)
            if os.path.exists(temporary):
                os.remove(temporary)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    assert not any(errors), errors


@wrong("save_whole", "rank 0 must write the state")
def in_a_thread(path, state):
    if dist.get_rank() == 0:
        threading.Thread(target=lambda: written(path, state).replace(path)).start()
    dist.barrier()


@wrong("save_whole", "this rank continues before the file exists")
def waits_until_a_file_is_there(path, state):
    """The old one is there already."""
    if dist.get_rank() == 0:
        written(path, state).replace(path)
    while not path.exists():
        time.sleep(0.01)


@wrong("save_whole", "rank 0 must first tell")
def renames_outside_of_the_try(path, state):
    problem, temporary = [None], path.with_name("new")
    if dist.get_rank() == 0:
        try:
            written(path, state)
        except Exception as error:
            temporary.unlink(missing_ok=True)
            problem = [str(error)]
        if problem == [None]:
            os.replace(temporary, path)
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise OSError(problem[0])


@wrong("save_whole", "flush|fsync")
def flushes_the_old_file(path, state):
    def write():
        with gone_afterwards(path.with_name("new")) as temporary:
            torch.save(state, temporary)
            if path.exists():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            temporary.replace(path)

    by_rank_0(write)


@wrong("save_whole", ".")
def all_ranks_write_by_name(path, state):
    """torch.save of a name opens the file in C++."""
    torch.save(state, path.with_name("new"))
    dist.barrier()

    def rename():
        with gone_afterwards(path.with_name("new")) as temporary:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)

    by_rank_0(rename)


@wrong("save_whole", "folder")
def makes_the_folder_again(path, state):
    def write():
        path.parent.mkdir(parents=True, exist_ok=True)
        with gone_afterwards(path.with_name("new")):
            written(path, state).replace(path)

    by_rank_0(write)


@wrong("save_whole", "the rename fails[^$]*is left behind")
def removes_it_only_if_it_is_not_whole(path, state):
    def write():
        with suppress_and_remove(path.with_name("new")):
            written(path, state)
        os.replace(path.with_name("new"), path)

    by_rank_0(write)


@contextmanager
def suppress_and_remove(temporary):
    try:
        yield
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


# ---- train_job ----


def gathered():
    """The random states of all ranks, for the file."""
    random = [None] * dist.get_world_size()
    dist.all_gather_object(random, torch.get_rng_state())
    return random


def a_job(
    network, batches, stop, path, *, own_masks=True, resets=True, counts=True, averages=True, waits=True, by=0,
    kept=("velocities",), late=0, shuffle_seed=None, forgets=(),
):  # fmt: skip
    """A job; by default it is right. counts: the whole run. by: the rank that writes, or None for all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    velocities = [torch.zeros_like(parameter) for parameter in network.parameters()]
    done, losses = 0, []
    if path.exists():
        saved = torch.load(path)
        if "network" not in forgets:
            network.load_state_dict(saved["network"])
        done = saved["done"] + late
        velocities = saved.get("velocities", velocities)
        if "random" not in forgets:
            torch.set_rng_state(saved["random"][rank if own_masks else 0])
    epoch, skipped = divmod(done, len(batches))
    if "position" in forgets:
        skipped = 0
    while done + len(losses) < stop:
        seed = epoch if shuffle_seed is None else shuffle_seed
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
        for number in order[skipped:][: stop - done - len(losses)]:
            losses.append(one_update(network, batches[number], velocities, ranks if averages else 1))
        skipped, epoch = 0 if resets else skipped, epoch + 1
    state = {"network": network.state_dict(), "random": gathered()}
    state |= {"done": done * counts + len(losses)} | {name: velocities for name in kept}
    if rank == by or by is None:
        torch.save(state, path)
    if waits:
        dist.barrier()
    return losses


def one_update(network, batch, velocities, ranks):
    network.zero_grad()
    loss = network(batch).square().mean()
    loss.backward()
    for parameter, velocity in zip(network.parameters(), velocities):
        dist.all_reduce(parameter.grad)
        velocity.mul_(0.9).add_(parameter.grad / ranks)
        parameter.data -= 0.02 * velocity
    return loss.item()


ONE_FOR_ALL, SKIPS, COUNTS = "rank 0's random state", "leaves out as many batches in each later", "not how many the run"


@wrong("train_job", ONE_FOR_ALL)
def as_it_is_given(network, batches, stop, path):
    return a_job(network, batches, stop, path, own_masks=False, resets=False, counts=False)


@wrong("train_job", ONE_FOR_ALL)
def masks_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, own_masks=False)


@wrong("train_job", SKIPS)
def skip_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, resets=False)


@wrong("train_job", COUNTS)
def count_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, counts=False)


@wrong("train_job", ONE_FOR_ALL)
def masks_and_skip_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, own_masks=False, resets=False)


@wrong("train_job", ONE_FOR_ALL)
def masks_and_count_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, own_masks=False, counts=False)


@wrong("train_job", f"{SKIPS}|{COUNTS}")
def skip_and_count_left(network, batches, stop, path):
    return a_job(network, batches, stop, path, resets=False, counts=False)


@wrong("train_job", "before rank 0 has written the file")
def does_not_wait(network, batches, stop, path):
    return a_job(network, batches, stop, path, waits=False)


@wrong("train_job", "two ranks that write to one file")
def all_ranks_write(network, batches, stop, path):
    """So that each rank has its own random state: the last one that writes wins."""
    return a_job(network, batches, stop, path, by=None)


@wrong("train_job", "the velocities start with zeros")
def loses_the_velocities(network, batches, stop, path):
    return a_job(network, batches, stop, path, kept=())


@wrong("train_job", "not those with which the run would have gone on")
def loads_no_random_state(network, batches, stop, path):
    return a_job(network, batches, stop, path, forgets=("random",))


@wrong("train_job", "leave out the batches that are done")
def skips_nothing(network, batches, stop, path):
    return a_job(network, batches, stop, path, forgets=("position",))


@wrong("train_job", "one batch too late")
def one_too_far(network, batches, stop, path):
    return a_job(network, batches, stop, path, late=1)


@wrong("train_job", "once more")
def one_again(network, batches, stop, path):
    return a_job(network, batches, stop, path, late=-1)


@wrong("train_job", "each epoch has the order of epoch 0")
def one_order(network, batches, stop, path):
    return a_job(network, batches, stop, path, shuffle_seed=0)


@wrong("train_job", "Follow a run of three jobs|this is the first job")
def loads_no_network(network, batches, stop, path):
    return a_job(network, batches, stop, path, forgets=("network",))


@wrong("train_job", "Follow a run of three jobs|this is the first job")
def adds_up_the_gradients(network, batches, stop, path):
    return a_job(network, batches, stop, path, averages=False)


@wrong("train_job", "Follow a run of three jobs|this is the first job")
def seeds_the_masks(network, batches, stop, path):
    """In place of random states: it resumes exactly, but no rank draws on from where the caller has seeded."""
    torch.manual_seed(dist.get_rank())
    return a_job(network, batches, stop, path)


@wrong("train_job", "more random numbers were drawn")
def draws_the_order_from_the_global_generator(network, batches, stop, path):
    torch.randperm(len(batches))
    return a_job(network, batches, stop, path)


@wrong("train_job", "FileNotFoundError", "your code raised")
def expects_a_file(network, batches, stop, path):
    torch.load(path)
    return a_job(network, batches, stop, path)


@wrong("train_job", "return the losses of this call's updates")
def returns_the_last_loss(network, batches, stop, path):
    return a_job(network, batches, stop, path)[-1]


@wrong("train_job", "do not change them")
def changes_the_batches(network, batches, stop, path):
    losses = a_job(network, batches, stop, path)
    batches[0].zero_()
    return losses


@wrong("train_job", "how many updates it does")
def forgets_where_to_stop(network, batches, stop, path):
    """stop is taken for the number of updates of this job."""
    done = torch.load(path)["done"] if path.exists() else 0
    return a_job(network, batches, done + stop, path)


@wrong("train_job", "some digits are lost")
def rounds_the_file(network, batches, stop, path):
    """Half of the size: the parameters go through 32 bits."""
    losses = a_job(network, batches, stop, path)
    if dist.get_rank() == 0:
        saved = torch.load(path)
        saved["network"] = {name: value.float() for name, value in saved["network"].items()}
        torch.save(saved, path)
    dist.barrier()
    return losses


@right("train_job")
def a_file_per_rank(network, batches, stop, path):
    """Random states beside the file; epoch and place in it, in the place of a count."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = path.with_name(f"rank{rank}.pt")
    velocities = [torch.zeros_like(parameter) for parameter in network.parameters()]
    place, losses = [0, 0], []
    if path.exists():
        saved = torch.load(path, weights_only=False)
        network.load_state_dict(saved["network"])
        velocities, place = saved["velocities"], saved["place"]
        torch.set_rng_state(torch.load(own))
    while place[0] * len(batches) + place[1] < stop:
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(place[0]))
        losses.append(one_update(network, batches[order[place[1]]], velocities, ranks))
        place[1] += 1
        if place[1] == len(batches):
            place = [place[0] + 1, 0]
    torch.save(torch.get_rng_state(), own)
    if rank == 0:
        torch.save({"network": network.state_dict(), "velocities": velocities, "place": place}, path)
    dist.barrier()
    return losses


@right("train_job")
def by_the_number_of_the_update(network, batches, stop, path):
    """Each update's epoch and place follow from its number; the file is renamed, and rank 0 tells that it is there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    velocities = [torch.zeros_like(parameter) for parameter in network.parameters()]
    saved = torch.load(path) if path.exists() else {"done": 0}
    if saved["done"]:
        network.load_state_dict(saved["network"])
        velocities = saved["velocities"]
        torch.set_rng_state(saved["random"][rank].clone())
    losses = []
    for update in range(saved["done"], stop):
        epoch, place = divmod(update, len(batches))
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch))
        losses.append(torch.tensor(one_update(network, batches[order[place]], velocities, ranks), dtype=torch.float64))
    random = [torch.empty_like(torch.get_rng_state()) for _ in range(ranks)]
    dist.all_gather(random, torch.get_rng_state())
    if rank == 0:
        kept = {"network": network.state_dict(), "velocities": velocities, "random": torch.stack(random), "done": stop}
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(in_memory(kept))
        os.replace(temporary, path)
    dist.broadcast(torch.zeros(1), 0)
    return losses


@right("train_job")
def counts_in_the_list(network, batches, stop, path):
    """The file has all losses of the run, whose number is the position; the skip is only in the first epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    velocities = [torch.zeros_like(parameter) for parameter in network.parameters()]
    losses = []
    if path.exists():
        saved = torch.load(path)
        network.load_state_dict(saved["network"])
        velocities, losses = saved["velocities"], saved["losses"]
        torch.set_rng_state(saved[f"random of {rank}"])
    begin = len(losses)
    for epoch in range(begin // len(batches), -(-stop // len(batches))):
        shuffle = torch.Generator().manual_seed(epoch)
        for place, number in enumerate(torch.randperm(len(batches), generator=shuffle).tolist()):
            if begin <= epoch * len(batches) + place < stop:
                losses.append(one_update(network, batches[number], velocities, ranks))
    state = {"network": network.state_dict(), "velocities": velocities, "losses": losses}
    state |= {f"random of {other}": random for other, random in enumerate(gathered())}
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    return losses[begin:]


@wrong("train_job", "only rank 0 writes to `path`")
def rank_1_writes(network, batches, stop, path):
    return a_job(network, batches, stop, path, by=1)
