"""Parts of a batch whose samples have weights, one per rank; and what an answer does when it
is called with its part.
"""

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.lesson05 import along_channels, sum_by_channel
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS

MANY = 3000  # samples in the least of `many_samples`

# ---- what is drawn ----


def parts_of_a_batch(draw, ranks, dims, empty=None):
    """A random batch, float64 (batch, channels, ...): parts of different lengths, one
    per rank.

    empty: the rank whose part has no samples. The mean and deviation of a channel
    differ between the parts.
    """
    lengths = [0 if rank == empty else length for rank, length in enumerate(draw.sample(range(3, 8), ranks))]
    channels, further = draw.randint(8, 10), draw.sample(range(2, 5), dims - 2)
    generator, parts = torch.Generator().manual_seed(draw.randrange(10**6)), []
    for length in lengths:
        noise = torch.randn(length, channels, *further, generator=generator, dtype=torch.float64)
        mean = 2 * torch.randn(channels, generator=generator)
        deviation = 0.5 + torch.rand(channels, generator=generator)
        parts.append(along_channels(mean, noise) + along_channels(deviation, noise) * noise)
    return parts


def channels_last(images):
    """The same images, (batch, channels, height, width), with the channels of a pixel
    side by side in memory.
    """
    return images.contiguous(memory_format=torch.channels_last)


def many_samples(draw, ranks):
    """Parts of a batch, so large that a few numbers per channel are negligible, and one
    per sample is not.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    shapes = [(MANY + rank, 2, 4, 4) for rank in range(ranks)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def in_words(parts):
    """A batch in words: 'parts of 3 and 5 samples, each (8, 2, 4), float64'."""
    *first, last = [str(len(part)) for part in parts]
    kind = str(parts[0].dtype).removeprefix("torch.")
    return f"parts of {', '.join(first)} and {last} samples, each {tuple(parts[0].shape[1:])}, {kind}"


def weights_of(draw, parts, without=None, light=False):
    """Weights for the samples of each part, of its dtype, some of them 0.

    without: the rank whose samples all have the weight 0, like padding. light: whether
    all weights of the batch together are less than 1.
    """
    generator, weights = torch.Generator().manual_seed(draw.randrange(10**6)), []
    for rank, part in enumerate(parts):
        of_part = 0.2 + 2 * torch.rand(len(part), generator=generator)
        of_part[rank % 3 : rank % 3 + 1] = 0
        of_part *= 0.01 if light else 1
        weights.append((of_part * (rank != without)).to(part.dtype))
    return weights


def along_samples(weights, x):
    """View weights, (batch,), so that they broadcast over x (batch, channels, ...)."""
    return weights.view(-1, *[1] * (x.dim() - 1))


def statistics(x, weights=None):
    """The weighted mean and variance of each channel, and the sum of the weights of its
    values. weights: (batch,); if left out, all are 1. Both are nan without any weight.
    """
    weights = x.new_ones(len(x)) if weights is None else weights
    each = along_samples(weights, x)
    total = weights.sum() * x.shape[2:].numel()
    mean = sum_by_channel(x * each) / total
    squares = (x - along_channels(mean, x)).square() * each
    return mean, sum_by_channel(squares) / total, total


# ---- what the ranks observe ----


def calls(function, cases):
    """Call an answer with this rank's arguments of each case; return what it returned,
    sent and changed.

    cases: pairs of a name and a dict of arguments for each rank, in the answer's order.
    """
    seen = []
    with process_group(timeout=4) as (rank, _):
        for name, of_ranks in cases:
            given = of_ranks[rank]
            copies = {what: value.clone() for what, value in given.items() if isinstance(value, torch.Tensor)}
            before = settings()
            with trying(name), CheckedWatch() as watch, noting_works() as works:
                returned = function(*given.values())
            seen.append({
                "returned": returned, "sent": [entry["name"] for entry in watch.log],
                "bytes": sum(entry["bytes"] for entry in watch.log),
                "forgotten": sum(not work.waited for work in works),
                "changed": {what: not torch.equal(given[what], copy) for what, copy in copies.items()},
                "set": {what: value != before[what] for what, value in settings().items()},
            })  # fmt: skip
    return seen


def settings():
    """What an answer shares with the rest of the program, {in words: value}."""
    return {
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the default dtype": str(torch.get_default_dtype()),
        "the state of the random generator": torch.get_rng_state().tolist(),
    }


def the_call_with_an_empty_part(function, name, of_ranks):
    """One of these `calls`; "lost" on a rank that waited for another one until the
    timeout.
    """
    try:
        return calls(function, [(name, of_ranks)])[0]
    except RuntimeError as error:
        if any(symptom in str(error) for symptom in SYMPTOMS):
            return "lost"
        raise


def seen_with_an_empty_part(answer, name, of_ranks, empty):
    n = len(of_ranks)
    seen = answer.on_ranks(the_call_with_an_empty_part, name, of_ranks, nproc=n)
    hold([Claim(
        name, "lost" in seen, False, "a rank with an empty part must call the same collectives, with zeros: the other ranks "
        "do not know that its part is empty",
        told="the same collectives as on the other ranks", shown="it returned while the others wait for it",
    )], f"{empty} of {n}")  # fmt: skip
    return seen


# ---- what is claimed of every call ----


def well_behaved(call, record, most):
    """Claims that arguments and settings are unchanged, and that at most `most` collectives
    were called.
    """
    for what, is_changed in record["changed"].items():
        yield Claim(
            f"{what} after {call}", is_changed, False, "it was changed in place, but the caller still needs it: -=, mul_() "
            "and other in-place operations write into the given tensor", told="unchanged", shown="changed",
        )  # fmt: skip
    for what, is_changed in record["set"].items():
        yield Claim(
            f"{what}, after {call}", is_changed, False, "this setting belongs to the whole program: change it for a block "
            "at most, as `with torch.no_grad():` does", told="as before the call", shown="changed",
        )  # fmt: skip
    yield Claim(
        f"collectives in {call}", len(record["sent"]), range(most + 1), "in each collective, all ranks wait for the "
        "slowest: use torch.cat to send values together that are known at the same time",
        told=f"at most {most}", shown=", ".join(record["sent"]),
    )  # fmt: skip


def sums_are_sent(call, record, part):
    """The claim that nothing was sent for each sample of one of `many_samples`."""
    return Claim(
        f"the bytes sent by {call}", record["bytes"], range(4 * len(part)),
        "you send numbers for each sample: add them up over the samples before you send them",
        [(Between(part.nbytes), "you send the samples themselves: sums over them are enough")],
        told="a few numbers per channel, however many samples there are",
        shown=f"{record['bytes']:,} bytes, where this rank's part of x has {part.nbytes:,}",
    )  # fmt: skip


NARROWED = "it is right to about seven digits: at some point you converted 64 bits to 32"
LIGHT = "the weights of all values together are less than 1 here: divide by their sum as it is"
