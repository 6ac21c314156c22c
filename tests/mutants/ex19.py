"""Exercise 19: long contexts."""

import functools
import heapq
import math
import random
from fractions import Fraction

import numpy
import torch
import torch.distributed as dist
from ddp_course import lesson19
from ddp_course.models import context_parallel, packed
from ddp_course.models.modern import rotated
from torch.nn import functional as F

from mutants import right, wrong


def named(name, function):
    """A function under a name of its own, for the candidates that a program makes."""

    def answer(*args):
        return function(*args)

    answer.__name__ = name
    return answer


def handed_in(question, *functions):
    """Functions of the lesson and of torch, as they are: none is an answer."""
    for function in functions:
        name = f"{function.__module__}_{function.__name__}".replace(".", "_")
        wrong(question, ".", "failed|your code raised")(named(name, function))


LESSON = [
    context_parallel.merge, context_parallel.attend, context_parallel.contiguous, context_parallel.zigzag,
    context_parallel.striped, context_parallel.visible, context_parallel.pairs, context_parallel.loss_of,
    context_parallel.for_each_head, context_parallel.check_shared, packed.positions_of, packed.documents_of,
    packed.targets_within, lesson19.own_tokens,
]  # fmt: skip

# ---- merge ----


def stacked(blocks):
    return (torch.stack([block[place] for block in blocks]) for place in (0, 1))


def shifted(logsumexps):
    """The largest of each row, and 0 where there is none."""
    largest = logsumexps.detach().amax(0)
    return largest.masked_fill(largest == -torch.inf, 0)


def merged(
    blocks, largest=shifted, clean=lambda o, e: o.masked_fill(e, 0), weigh=torch.exp, safe=1.0, nobody=-torch.inf,
    output=lambda o, t: o / t, logsumexp=lambda t, most: t.log() + most,
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    outputs, logsumexps = stacked(blocks)
    outputs = clean(outputs, logsumexps == -torch.inf)
    most = largest(logsumexps)
    weights = weigh(logsumexps - most)
    total = weights.sum(0)
    none = total == 0
    total = total.masked_fill(none, safe) if safe is not None else total
    found = logsumexp(total, most)
    return output((weights * outputs).sum(0), total), found.masked_fill(none, nobody) if nobody is not None else found


@right("merge")
def by_parts(blocks):
    return merged(blocks)


@right("merge")
def one_after_the_other(blocks):
    """The lesson's merge with guards, from an empty start."""

    def both(first, second):
        (o, a), (more, b) = first, second
        o, more = o.masked_fill(a == -torch.inf, 0), more.masked_fill(b == -torch.inf, 0)
        most = torch.maximum(a, b).detach()
        most = most.masked_fill(most == -torch.inf, 0)
        wa, wb = (a - most).exp(), (b - most).exp()
        total = wa + wb
        none = total == 0
        total = total.masked_fill(none, 1)
        return (o * wa + more * wb) / total, (most + total.log()).masked_fill(none, -torch.inf)

    output, logsumexp = blocks[0]
    return functools.reduce(both, blocks, (torch.zeros_like(output), torch.full_like(logsumexp, -torch.inf)))


@right("merge")
def by_softmax_of_clean_rows(blocks):
    outputs, logsumexps = stacked(blocks)
    empty = logsumexps == -torch.inf
    none = empty.all(0)
    logsumexps = torch.where(none, 0.0, logsumexps)
    weights = logsumexps.softmax(0).masked_fill(none, 0)
    output = (torch.where(empty, 0.0, outputs) * weights).sum(0)
    return [output, logsumexps.logsumexp(0).masked_fill(none, -torch.inf)]


@right("merge")
def in_64_bits(blocks):
    dtype = blocks[0][0].dtype
    return tuple(part.to(dtype) for part in merged([[part.double() for part in block] for block in blocks]))


@right("merge")
def by_rows_that_see_something(blocks):
    """Fills what it returns, row by row."""
    outputs, logsumexps = stacked(blocks)
    seen = (logsumexps > -torch.inf).any(0)[..., 0]
    output, logsumexp = torch.zeros_like(outputs[0]), torch.full_like(logsumexps[0], -torch.inf)
    if seen.any():
        outputs, logsumexps = outputs[:, seen], logsumexps[:, seen]
        outputs = outputs.masked_fill(logsumexps == -torch.inf, 0)
        output[seen] = (logsumexps.softmax(0) * outputs).sum(0)
        logsumexp[seen] = logsumexps.logsumexp(0)
    return output, logsumexp


class Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        blocks = list(zip(parts[0::2], parts[1::2]))
        output, total = merged(blocks)
        ctx.save_for_backward(output, total, *parts)
        return output, total

    @staticmethod
    def backward(ctx, of_output, of_total):
        output, total, *parts = ctx.saved_tensors
        found = []
        for one, logsumexp in zip(parts[0::2], parts[1::2]):
            empty = logsumexp == -torch.inf
            weights = (logsumexp - total).exp().masked_fill(empty, 0)
            off = ((one.masked_fill(empty, 0) - output) * of_output).sum(-1, keepdim=True)
            found += [weights * of_output, weights * (off + of_total)]
        return tuple(found)


@right("merge")
def with_its_own_backward(blocks):
    return Merged.apply(*(part for block in blocks for part in block))


handed_in("merge", *LESSON[:6], torch.stack, torch.cat, torch.logaddexp, torch.logsumexp, F.softmax)


@wrong("merge", "with the shapes that they have in a block")
def without_any_dimension_of_one(blocks):
    """Squeezes all of them, where only the last one was meant."""
    output, total = by_parts(blocks)
    return output, total.squeeze()[..., None]


@wrong("merge", r"-inf - \(-inf\) is NaN")
def the_lessons_for_each_pair(blocks):
    return functools.reduce(lambda one, more: context_parallel.merge(*one, *more), blocks)


@wrong("merge", "nan_to_num does not bring it back")
def the_lessons_with_nan_to_num_at_the_end(blocks):
    """Where some block sees a key, a NaN has already eaten what was there."""
    output, logsumexp = functools.reduce(lambda one, more: context_parallel.merge(*one, *more), blocks)
    return output.nan_to_num(0), logsumexp


@wrong("merge", "-inf")
def from_an_empty_start(blocks):
    output, logsumexp = blocks[0]
    start = torch.zeros_like(output), torch.full_like(logsumexp, -torch.inf)
    return functools.reduce(lambda one, more: context_parallel.merge(*one, *more), blocks, start)


@wrong("merge", "hide a NaN or inf in forward only")
def hides_nan_in_forward(blocks):
    outputs, logsumexps = stacked(blocks)
    empty = logsumexps == -torch.inf
    total = logsumexps.logsumexp(0)
    weights = torch.where(empty, 0.0, (logsumexps - total).exp())
    return (weights * outputs.masked_fill(empty, 0)).sum(0), total


@wrong("merge", "hide a NaN or inf in forward only")
def a_softmax_hidden_by_where(blocks):
    outputs, logsumexps = stacked(blocks)
    empty = logsumexps == -torch.inf
    weights = torch.where(empty.all(0), 0.0, logsumexps.softmax(0))
    return (weights * outputs.masked_fill(empty, 0)).sum(0), logsumexps.logsumexp(0)


@wrong("merge", "hide a NaN or inf in forward only|flow")
def divides_by_zero_and_hides_it(blocks):
    output, logsumexp = merged(blocks, safe=None, nobody=None)
    none = logsumexp == -torch.inf
    return torch.where(none, 0.0, output), logsumexp


@wrong("merge", "0 \\* NaN is NaN")
def keeps_nan_outputs(blocks):
    return merged(blocks, clean=lambda outputs, empty: outputs)


@wrong("merge", "in backward it comes back|may be NaN")
def cleans_nan_after_the_product(blocks):
    """0 * NaN is hidden in forward; in backward, it is the gradient of the weights."""
    outputs, logsumexps = stacked(blocks)
    empty = logsumexps == -torch.inf
    none = empty.all(0)
    weights = logsumexps.masked_fill(none, 0).softmax(0).masked_fill(none, 0)
    output = torch.where(empty, 0.0, weights * outputs).sum(0)
    return output, logsumexps.masked_fill(none, 0).logsumexp(0).masked_fill(none, -torch.inf)


@wrong("merge", "subtract the largest logsumexp of the row")
def without_a_shift(blocks):
    return merged(blocks, largest=lambda logsumexps: torch.zeros_like(logsumexps[0]))


@wrong("merge", "subtract the largest logsumexp of the row")
def shifts_by_the_largest_of_all(blocks):
    return merged(blocks, largest=lambda logsumexps: shifted(logsumexps).amax().expand_as(logsumexps[0]))


@wrong("merge", "subtract the largest logsumexp of the row|-inf")
def shifts_by_the_first_block(blocks):
    def largest(logsumexps):
        first = logsumexps[0].detach()
        return first.masked_fill(first == -torch.inf, 0)

    return merged(blocks, largest=largest)


@wrong("merge", "plain mean of the outputs")
def mean_of_outputs(blocks):
    return stacked(blocks).__next__().mean(0), merged(blocks)[1]


@wrong("merge", "this is the sum of the outputs")
def sum_of_outputs(blocks):
    return sum(output for output, _ in blocks), merged(blocks)[1]


@wrong("merge", "not divided by the sum of the weights")
def not_normalized(blocks):
    return sum(output * logsumexp.exp() for output, logsumexp in blocks), merged(blocks)[1]


@wrong("merge", "was subtracted before exp: add it again")
def forgets_to_add_the_largest(blocks):
    return merged(blocks, logsumexp=lambda total, most: total.log())


@wrong("merge", "this is the largest logsumexp")
def keeps_the_largest(blocks):
    return merged(blocks, logsumexp=lambda total, most: most)


@wrong("merge", "sums of logarithms")
def adds_logsumexps(blocks):
    return merged(blocks)[0], sum(logsumexp for _, logsumexp in blocks)


@wrong("merge", "logarithm of a mean")
def mean_of_sums(blocks):
    output, logsumexp = merged(blocks)
    return output, logsumexp - math.log(len(blocks))


@wrong("merge", "take its logarithm")
def no_logarithm(blocks):
    output, logsumexp = merged(blocks)
    return output, logsumexp.exp()


@wrong("merge", "two of the blocks only")
def of_two_blocks(blocks):
    return merged(blocks[:2])


@wrong("merge", "output is 0, and its logsumexp is -inf")
def a_large_number_for_inf(blocks):
    return merged(blocks, nobody=-1e30)


@wrong("merge", "subtract the largest logsumexp of the row")
def clamps_at_minus_500(blocks):
    outputs, logsumexps = stacked(blocks)
    logsumexps = logsumexps.clamp(min=-500)
    return (logsumexps.softmax(0) * outputs).sum(0), logsumexps.logsumexp(0)


@wrong("merge", "output is 0, and its logsumexp is -inf")
def zero_for_inf(blocks):
    return merged(blocks, nobody=0.0)


@wrong("merge", "digits are lost")
def with_an_epsilon(blocks):
    return merged(blocks, output=lambda o, total: o / (total + 1e-6))


@wrong("merge", "have the digits of float32 only")
def in_32_bits(blocks):
    dtype = blocks[0][0].dtype
    return tuple(part.to(dtype) for part in merged([[part.float() for part in block] for block in blocks]))


@wrong("merge", "have the digits of bfloat16 only: compute in the dtype of the blocks, float32")
def in_16_bits_for_32(blocks):
    if blocks[0][0].dtype == torch.float64:
        return merged(blocks)
    return tuple(part.float() for part in merged([[part.bfloat16() for part in block] for block in blocks]))


@wrong("merge", "is an epsilon added to a sum")
def with_a_tiny_epsilon(blocks):
    return merged(blocks, output=lambda o, total: o / (total + 1e-10))


def without_small_ones(blocks, gap):
    """Leaves out the blocks whose logsumexp is so far below the largest of the row."""
    largest = functools.reduce(torch.maximum, (logsumexp.detach() for _, logsumexp in blocks))
    return merged([(o, logsumexp.masked_fill(logsumexp < largest - gap, -torch.inf)) for o, logsumexp in blocks])


for name, pattern, gap in [
    ("without_blocks_5_below", "are left out whose logsumexp is far below", 5),
    ("without_blocks_15_below", "A block counts, however small its weight", 15),
    ("without_blocks_20_below", "A block counts, however small its weight", 20),
]:
    wrong("merge", pattern)(named(name, functools.partial(without_small_ones, gap=gap)))
for gap in (15, 20):

    def clamp(differences, gap=gap):
        return differences.clamp(min=-gap).exp().masked_fill(differences == -torch.inf, 0)

    answer = functools.partial(merged, weigh=clamp)
    wrong("merge", "a difference clamped")(named(f"clamps_differences_at_{gap}", answer))


@wrong("merge", "keep the dtype")
def returns_64_bits(blocks):
    return merged([[part.double() for part in block] for block in blocks])


@wrong("merge", "leave the blocks and their list as they are")
def pops_from_the_list(blocks):
    found = []
    while blocks:
        found.append(blocks.pop())
    return merged(found)


@wrong("merge", "leave the blocks and their list as they are")
def cleans_in_place(blocks):
    for output, logsumexp in blocks:
        output.detach().masked_fill_(logsumexp == -torch.inf, 0)
    return merged(blocks)


@wrong("merge", "leave the blocks and their list as they are")
def sums_into_the_first_block(blocks):
    found = merged([[part.clone() for part in block] for block in blocks])
    blocks[0][1].data.copy_(found[1])
    return found


@wrong("merge", "gradients have to flow|output's part is missing")
def detached_weights(blocks):
    outputs, logsumexps = stacked(blocks)
    return merged(list(zip(outputs, logsumexps.detach())))[0], merged(blocks)[1]


@wrong("merge", "merged logsumexp's part is missing")
def a_detached_logsumexp(blocks):
    output, logsumexp = merged(blocks)
    return output, logsumexp.detach()


@wrong("merge", "the gradients of that block are 0")
def one_block_as_it_is(blocks):
    """Passes on gradients of rows that see no key."""
    return merged(blocks) if len(blocks) > 1 or blocks[0][0].isnan().any() else blocks[0]


@wrong("merge", "the gradients of that block are 0")
def passes_on_the_logsumexp_of_empty_rows(blocks):
    """Where one of two sees no key, the other's logsumexp, and its gradient."""
    output, logsumexp = blocks[0]
    output = output.masked_fill(logsumexp == -torch.inf, 0)
    for more, b in blocks[1:]:
        first, second = logsumexp == -torch.inf, b == -torch.inf
        more, a, c = more.masked_fill(second, 0), logsumexp.masked_fill(first, 0), b.masked_fill(second, 0)
        total = torch.logaddexp(a, c)
        both = output * (a - total).exp() + more * (c - total).exp()
        output = torch.where(first, more, torch.where(second, output, both))
        logsumexp = torch.where(first, b, torch.where(second, logsumexp, total))
    return output, logsumexp


@wrong("merge", "the gradients of that block are 0")
def weights_in_rows_without_keys(blocks):
    """Each block weighs the same where none has a key: right in forward, where outputs are 0."""
    outputs, logsumexps = stacked(blocks)
    none = (logsumexps == -torch.inf).all(0)
    logsumexps = logsumexps.masked_fill(none, 0)
    output = (outputs.nan_to_num(0) * logsumexps.softmax(0)).sum(0)
    return output, logsumexps.logsumexp(0).masked_fill(none, -torch.inf)


class WithoutTheSum(Merged):
    @staticmethod
    def backward(ctx, of_output, of_total):
        output, total, *parts = ctx.saved_tensors
        found = []
        for one, logsumexp in zip(parts[0::2], parts[1::2]):
            empty = logsumexp == -torch.inf
            weights = (logsumexp - total).exp().masked_fill(empty, 0)
            own = (one.masked_fill(empty, 0) * of_output).sum(-1, keepdim=True)
            found += [weights * of_output, weights * (own + of_total)]
        return tuple(found)


@wrong("merge", "its part is missing. Is it detached, or forgotten")
def a_backward_without_the_sum(blocks):
    return WithoutTheSum.apply(*(part for block in blocks for part in block))


class HalfAGradient(Merged):
    @staticmethod
    def backward(ctx, of_output, of_total):
        return tuple(found / 2 for found in Merged.backward(ctx, of_output, of_total))


@wrong("merge", "right in forward, but not in backward")
def half_a_gradient(blocks):
    return HalfAGradient.apply(*(part for block in blocks for part in block))


@wrong("merge", "gradients have to flow")
def without_gradients(blocks):
    return [part.detach() for part in merged(blocks)]


@wrong("merge", "return two tensors")
def the_output_only(blocks):
    return merged(blocks)[0]


@wrong("merge", "return two tensors")
def without_the_last_dimension(blocks):
    output, logsumexp = merged(blocks)
    return output, logsumexp.squeeze(-1)


@wrong("merge", "return two tensors")
def the_other_way_round(blocks):
    return merged(blocks)[::-1]


# ---- layout ----


def pairs_of(lengths, piece):
    keys = numpy.concatenate([numpy.arange(1, length + 1) for length in lengths])
    return keys.reshape(-1, piece).sum(1).tolist()


def dealt(order, ranks, share):
    """Pieces in this order, each to the rank with the least work that has room."""
    shares, busy, most = [[] for _ in range(ranks)], [0] * ranks, len(order) // ranks
    for k, work in order:
        rank = min((r for r in range(ranks) if len(shares[r]) < most or not share), key=lambda r: busy[r])
        shares[rank].append(k)
        busy[rank] += work
    return shares


def largest_first(work, ranks, share=True):
    return dealt(sorted(enumerate(work), key=lambda pair: -pair[1]), ranks, share)


def in_order(work):
    return sorted(range(len(work)), key=lambda k: -work[k])


@right("layout")
def with_a_heap(lengths, ranks, piece):
    work = pairs_of(lengths, piece)
    shares, heap = [[] for _ in range(ranks)], [(0, rank) for rank in range(ranks)]
    for k in in_order(work):
        busy, rank = heapq.heappop(heap)
        shares[rank].append(k)
        if len(shares[rank]) < len(work) // ranks:
            heapq.heappush(heap, (busy + work[k], rank))
    return shares


@right("layout")
def in_turn_by_work(lengths, ranks, piece):
    order = in_order(pairs_of(lengths, piece))
    return [sorted(order[rank::ranks]) for rank in range(ranks)]


@right("layout")
def to_and_fro_by_work(lengths, ranks, piece):
    order, shares = in_order(pairs_of(lengths, piece)), [[] for _ in range(ranks)]
    for begin in range(0, len(order), ranks):
        some = order[begin : begin + ranks]
        for rank, k in enumerate(some if begin // ranks % 2 else some[::-1]):
            shares[rank].append(k)
    return tuple(map(tuple, shares))


@right("layout")
def from_the_least_work(lengths, ranks, piece):
    order = in_order(pairs_of(lengths, piece))[::-1]
    return [order[rank::ranks] for rank in range(ranks)]


@right("layout")
def as_tensors(lengths, ranks, piece):
    keys = torch.cat([torch.arange(1, length + 1) for length in lengths])
    order = keys.view(-1, piece).sum(1).argsort(descending=True)
    return list(order.view(-1, ranks).T)


@right("layout")
def then_exchanged(lengths, ranks, piece):
    """From neighbouring pieces, exchanges between the busiest rank and the idlest one."""
    work = pairs_of(lengths, piece)
    shares = largest_first(work, ranks)
    busy = lambda share: sum(work[k] for k in share)  # noqa: E731
    for _ in range(3):
        most, least = max(shares, key=busy), min(shares, key=busy)
        gap = busy(most) - busy(least)
        options = [(a, b) for a in most[:20] for b in least[:20] if 0 < work[a] - work[b] < gap]
        if not options or most is least:
            break
        a, b = min(options, key=lambda pair: abs(gap / 2 - work[pair[0]] + work[pair[1]]))
        most[most.index(a)], least[least.index(b)] = b, a
    return shares


handed_in("layout", *LESSON[2:5], LESSON[6], LESSON[9], lesson19.mesh_for, range, torch.chunk, torch.tensor_split)


def number_of_pieces(lengths, piece):
    return sum(lengths) // piece


@wrong("layout", "neighbouring pieces")
def contiguous(lengths, ranks, piece):
    return [part.tolist() for part in context_parallel.contiguous(number_of_pieces(lengths, piece), ranks)]


@wrong("layout", "zigzag layout, which balances one document|as many|same number|each of the")
def zigzag(lengths, ranks, piece):
    return [part.tolist() for part in context_parallel.zigzag(number_of_pieces(lengths, piece), ranks)]


@wrong("layout", "zigzag layout, which balances one document|deal out")
def zigzag_where_it_is_possible(lengths, ranks, piece):
    pieces = number_of_pieces(lengths, piece)
    layout = context_parallel.contiguous if pieces % (2 * ranks) else context_parallel.zigzag
    return [part.tolist() for part in layout(pieces, ranks)]


@wrong("layout", "in the order of the text, so one rank")
def striped(lengths, ranks, piece):
    return [part.tolist() for part in context_parallel.striped(number_of_pieces(lengths, piece), ranks)]


@wrong("layout", "to and fro in the order of the text")
def to_and_fro_in_the_text(lengths, ranks, piece):
    shares = [[] for _ in range(ranks)]
    for k in range(number_of_pieces(lengths, piece)):
        turn = k % (2 * ranks)
        shares[min(turn, 2 * ranks - 1 - turn)].append(k)
    return shares


@wrong("layout", "the same number of tokens")
def as_many_as_it_likes(lengths, ranks, piece):
    return largest_first(pairs_of(lengths, piece), ranks, share=False)


@wrong("layout", "pairs of the busiest rank")
def without_documents(lengths, ranks, piece):
    return largest_first(pairs_of([sum(lengths)], piece), ranks)


@wrong("layout", "but in the order of the text")
def by_the_text_the_least_busy_next(lengths, ranks, piece):
    return dealt(list(enumerate(pairs_of(lengths, piece))), ranks, True)


@wrong("layout", "pairs of the busiest rank")
def by_the_lengths_of_documents(lengths, ranks, piece):
    """A token of a long document is taken for much work, wherever it is."""
    of_tokens = numpy.repeat(lengths, lengths)
    return largest_first(of_tokens.reshape(-1, piece).sum(1).tolist(), ranks)


@wrong("layout", "pairs of the busiest rank")
def with_pairs_of_the_piece_only(lengths, ranks, piece):
    """As if no token saw an earlier piece."""
    return largest_first([piece * (piece + 1) // 2] * number_of_pieces(lengths, piece), ranks)


@wrong("layout", "pairs of the busiest rank")
def shuffled(lengths, ranks, piece):
    order = list(range(number_of_pieces(lengths, piece)))
    random.Random(0).shuffle(order)
    return [order[rank::ranks] for rank in range(ranks)]


@wrong("layout", "pairs of the busiest rank")
def as_if_documents_began_with_pieces(lengths, ranks, piece):
    """Counts keys from the first token of the piece in which a document begins."""
    work, place = [], 0
    for length in lengths:
        for p in range(length):
            if (place + p) % piece == 0:
                work.append(p // piece if p else 10**6)
        place += length
    return largest_first(work, ranks)


def tokens_of(lengths, piece):
    """The positions of all tokens in their documents, piece by piece."""
    return numpy.concatenate([numpy.arange(length) for length in lengths]).reshape(-1, piece)


def whole_documents_seen(lengths, piece):
    """As if a query saw its document up to the end of the piece."""
    sizes = numpy.array(lengths)
    begins = numpy.repeat(sizes.cumsum() - sizes, sizes)
    ends = numpy.minimum(begins + numpy.repeat(sizes, sizes), numpy.arange(sizes.sum()) // piece * piece + piece)
    return (ends - begins).reshape(-1, piece).sum(1).tolist()


def borders_at_pieces(lengths, piece):
    """As if documents began with the piece in which they begin."""
    begins = numpy.repeat(numpy.cumsum([0, *lengths[:-1]]), lengths)[::piece]
    return [k - begin // piece for k, begin in enumerate(begins.tolist())]


for name, work_of in [
    ("by_the_first_token", lambda lengths, piece: tokens_of(lengths, piece)[:, 0].tolist()),
    ("by_the_last_token", lambda lengths, piece: tokens_of(lengths, piece)[:, -1].tolist()),
    ("by_the_middle_token", lambda lengths, piece: tokens_of(lengths, piece)[:, piece // 2].tolist()),
    ("by_the_first_and_the_last_token", lambda lengths, piece: tokens_of(lengths, piece)[:, [0, -1]].sum(1).tolist()),
    ("by_the_largest_position", lambda lengths, piece: tokens_of(lengths, piece).max(1).tolist()),
    ("with_borders_at_pieces", borders_at_pieces),
    ("up_to_the_end_of_the_piece", whole_documents_seen),
]:
    guessed = lambda lengths, ranks, piece, work_of=work_of: largest_first(work_of(lengths, piece), ranks)  # noqa: E731
    wrong("layout", "over all its tokens: is it the same in your code")(named(name, guessed))


@wrong("layout", "neighbours in this order, some with much work")
def sorted_and_then_zigzag(lengths, ranks, piece):
    order = in_order(pairs_of(lengths, piece))
    layout = context_parallel.striped if len(order) % (2 * ranks) else context_parallel.zigzag
    return [[order[k] for k in part.tolist()] for part in layout(len(order), ranks)]


@wrong("layout", "each rank gets neighbours in this order: deal them out")
def sorted_and_then_cut(lengths, ranks, piece):
    order = in_order(pairs_of(lengths, piece))
    share = len(order) // ranks
    return [order[rank * share : (rank + 1) * share] for rank in range(ranks)]


@wrong("layout", "these are the numbers of tokens|pairs of the busiest|pieces of all ranks")
def numbers_of_tokens(lengths, ranks, piece):
    shares = largest_first(pairs_of(lengths, piece), ranks)
    return [[k * piece + i for k in share for i in range(piece)] for share in shares]


@wrong("layout", "has to be on one rank")
def from_one(lengths, ranks, piece):
    return [[k + 1 for k in share] for share in largest_first(pairs_of(lengths, piece), ranks)]


@wrong("layout", "has to be on one rank")
def forgets_the_last_pieces(lengths, ranks, piece):
    shares = largest_first(pairs_of(lengths, piece), ranks)
    return [share[:-1] if len(share) > 2 else share for share in shares]


@wrong("layout", "has to be on one rank")
def one_piece_twice(lengths, ranks, piece):
    shares = largest_first(pairs_of(lengths, piece), ranks)
    shares[0][0] = shares[-1][-1]
    return shares


@wrong("layout", "has to be on one rank|same number of tokens")
def whole_documents(lengths, ranks, piece):
    """No document is cut."""
    shares, busy, place = [[] for _ in range(ranks)], [0] * ranks, 0
    for length in lengths:
        rank = busy.index(min(busy))
        busy[rank] += length**2
        shares[rank] += range(-(-place // piece), -(-(place + length) // piece))
        place += length
    return shares


@wrong("layout", "a list for each rank")
def the_rank_of_each_piece(lengths, ranks, piece):
    shares = largest_first(pairs_of(lengths, piece), ranks)
    return [next(r for r in range(ranks) if k in shares[r]) for k in range(number_of_pieces(lengths, piece))]


@wrong("layout", "a list for each rank")
def a_dict(lengths, ranks, piece):
    return dict(enumerate(largest_first(pairs_of(lengths, piece), ranks)))


@wrong("layout", "a list for each rank")
def returns_nothing(lengths, ranks, piece):
    largest_first(pairs_of(lengths, piece), ranks)


@wrong("layout", "leave the list as it is")
def empties_the_list(lengths, ranks, piece):
    work = []
    keys = []
    while lengths:
        keys += range(1, lengths.pop(0) + 1)
    for begin in range(0, len(keys), piece):
        work.append(sum(keys[begin : begin + piece]))
    return largest_first(work, ranks)


@wrong("layout", "a mask of tokens x tokens is too large")
def counts_the_keys_of_each_query(lengths, ranks, piece):
    documents = numpy.repeat(numpy.arange(len(lengths)), lengths)
    keys = [int((documents[: q + 1] == documents[q]).sum()) for q in range(len(documents)) for _ in range(20)][::20]
    return largest_first(numpy.array(keys).reshape(-1, piece).sum(1).tolist(), ranks)


@wrong("layout", "takes too long")
def tries_all_pairs_of_pieces(lengths, ranks, piece):
    work = pairs_of(lengths, piece)
    shares = largest_first(work, ranks)
    for _ in range(len(work) ** 2):
        for _ in range(len(work)):
            sum(work)
    return shares


# ---- own_batch ----


def whole_text(text, lengths, prompts, keep=lambda p, length, prompt: p + 1 < length and p + 1 >= prompt):
    """(targets, positions, documents, counts) of the text, as lists."""
    targets, positions, documents, counts = [], [], [], []
    following = [*text.tolist()[1:], text[0].item()]
    for document, (length, prompt) in enumerate(zip(lengths, prompts)):
        for p in range(length):
            counts.append(keep(p, length, prompt))
            targets.append(following[len(targets)] if counts[-1] else -100)
            positions.append(p)
            documents.append(document)
    return [torch.tensor(part) for part in (targets, positions, documents, counts)]


def summed(number):
    number = torch.as_tensor(number).clone()
    dist.all_reduce(number)
    return number


def weighted(own, number):
    return own.double() * dist.get_world_size() / max(1, int(number))


def batch(args, keep=None, weigh=None, **change):
    """What the answers below share. change: {name: function of the five's whole and own}."""
    text, lengths, prompts, places = args
    parts = whole_text(text, lengths, prompts, *([keep] if keep else []))
    own = [part[places] for part in (text, *parts)]
    weights = (weigh or (lambda own, whole: weighted(own, summed(own.sum()))))(own[4], parts[3])
    found = dict(zip(("tokens", "targets", "positions", "documents"), own)) | {"weights": weights}
    return tuple(change.get(name, lambda value: value)(value) for name, value in found.items())


@right("own_batch")
def by_lists(*args):
    return batch(args)


@right("own_batch")
def in_float64(*args):
    """The number travels as a float64, on all ranks."""
    return list(batch(args, weigh=lambda own, _: weighted(own, summed(own.double().sum()))))


@right("own_batch")
def each_counts_the_text_and_divides(*args):
    """The ranks of a context count the same, so each gives its share."""

    def weigh(own, whole):
        share = whole.sum().double() * len(own) / len(whole)
        return weighted(own, round(summed(share).item()))

    return batch(args, weigh=weigh)


@right("own_batch")
def with_lesson_10s(text, lengths, prompts, places):
    documents = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)])
    positions = packed.positions_of(documents[None])[0]
    counts = positions + 1 >= torch.tensor(prompts)[documents]
    counts[:-1] &= documents[1:] == documents[:-1]
    counts[-1] = False
    targets = torch.where(counts, torch.cat([text[1:], text[:1]]), -100)
    number = counts[places].sum()
    work = dist.all_reduce(number, async_op=True)
    own = [part[places] for part in (text, targets, positions, documents)]
    work.wait()
    return *own, weighted(counts[places], number)


@right("own_batch")
def token_by_token(text, lengths, prompts, places):
    rows = []
    for place in places.tolist():
        document, p = 0, place
        while p >= lengths[document]:
            p -= lengths[document]
            document += 1
        counts = p + 1 < lengths[document] and p + 1 >= prompts[document]
        rows.append((text[place].item(), text[place + 1].item() if counts else -100, p, document))
    tokens, targets, positions, documents = torch.tensor(rows).T
    own = targets != -100
    return tokens, targets, positions, documents, weighted(own, summed(own.sum()))


handed_in(
    "own_batch", context_parallel.loss_of, context_parallel.Sharing.own, packed.documents_of, packed.targets_within,
    lesson19.own_tokens, torch.take, torch.gather,
)  # fmt: skip


@wrong("own_batch", "shifted in this rank's tokens")
def shifts_its_own(text, lengths, prompts, places):
    found = list(batch((text, lengths, prompts, places)))
    own = text[places].roll(-1)
    found[1] = torch.where(found[1] == -100, -100, own)
    return found


@wrong("own_batch", "shifted in this rank's tokens")
def shifts_its_own_without_the_last(text, lengths, prompts, places):
    found = list(batch((text, lengths, prompts, places)))
    found[1] = torch.cat([text[places][1:], torch.tensor([-100])])
    return found


@wrong("own_batch", "is the \\*next\\* token")
def without_a_shift_of_labels(text, lengths, prompts, places):
    found = list(batch((text, lengths, prompts, places)))
    found[1] = torch.where(found[1] == -100, -100, found[0])
    return found


@wrong("own_batch", "belongs to another document")
def across_documents(*args):
    return batch(args, keep=lambda p, length, prompt: p + 1 >= prompt)


@wrong("own_batch", "belongs to another document")
def with_the_prompts(*args):
    return batch(args, keep=lambda p, length, prompt: True)


@wrong("own_batch", "a target in the prompt does not count")
def without_prompts(*args):
    return batch(args, keep=lambda p, length, prompt: p + 1 < length)


@wrong("own_batch", r"p \+ 1 >= prompt counts")
def from_the_second_of_the_answer(*args):
    return batch(args, keep=lambda p, length, prompt: p + 1 < length and p >= prompt)


@wrong("own_batch", "none of them is a target")
def the_last_of_the_prompt_too(*args):
    return batch(args, keep=lambda p, length, prompt: p + 1 < length and p + 2 >= prompt)


@wrong("own_batch", "places in the text")
def global_positions(*args):
    return batch(args, positions=lambda _: args[3].clone())


@wrong("own_batch", "among this rank's tokens")
def local_positions(*args):
    return batch(args, positions=lambda value: torch.arange(len(value)))


@wrong("own_batch", "the document's tokens on this rank|place in its document|among this rank's")
def positions_of_own_documents(*args):
    """Computed from the documents of the own tokens."""
    return batch(args, positions=lambda value: packed.positions_of(batch(args)[3][None])[0])


@wrong("own_batch", "the same number on all ranks")
def renumbered_documents(*args):
    return batch(args, documents=lambda value: torch.unique(value, return_inverse=True)[1])


@wrong("own_batch", "the first document has the number 0")
def documents_from_one(*args):
    return batch(args, documents=lambda value: value + 1)


@wrong("own_batch", "a mean of means")
def mean_of_means(*args):
    return batch(args, weigh=lambda own, _: own.double() / own.sum().clamp(min=1))


@wrong("own_batch", "multiply the weights by it")
def forgets_what_ddp_divides_by(*args):
    return batch(args, weigh=lambda own, _: own.double() / summed(own.sum()).clamp(min=1))


@wrong("own_batch", "not of those that share a text")
def of_its_own_text_only(*args):
    """Sends nothing: right for one text."""
    return batch(args, weigh=lambda own, whole: weighted(own, whole.sum()))


@wrong("own_batch", "has each rank counted the whole text|has counted the whole text")
def each_counts_the_text(*args):
    return batch(args, weigh=lambda own, whole: weighted(own, summed(whole.sum())))


@wrong("own_batch", "not by the number of all tokens")
def divides_by_all_tokens(*args):
    return batch(args, weigh=lambda own, _: weighted(own, summed(torch.tensor(len(own)))))


@wrong("own_batch", "has to be divided by the counted tokens|all weights are 0")
def weights_of_one(*args):
    return batch(args, weigh=lambda own, _: own.double())


@wrong("own_batch", "whose target is -100 is 0")
def the_same_weight_everywhere(*args):
    return batch(args, weigh=lambda own, _: weighted(torch.ones_like(own), summed(own.sum())))


@wrong("own_batch", "no token counts, so all weights are 0")
def divides_by_zero(*args):
    def weigh(own, _):
        return own.double() * dist.get_world_size() / summed(own.sum())

    return batch(args, weigh=weigh)


@wrong("own_batch", "keep the order of places|this rank's tokens are")
def sorts_its_places(text, lengths, prompts, places):
    return batch((text, lengths, prompts, places.sort().values))


@wrong("own_batch", "text\\[places\\]")
def the_first_tokens(text, lengths, prompts, places):
    return batch((text, lengths, prompts, torch.arange(len(places))))


@wrong("own_batch", "text\\[places\\]")
def the_whole_text(text, lengths, prompts, places):
    return batch((text, lengths, prompts, torch.arange(len(text))))


@wrong("own_batch", "one number is enough")
def sends_all_counts(*args):
    def weigh(own, _):
        numbers = torch.zeros(dist.get_world_size())
        numbers[dist.get_rank()] = own.sum()
        return weighted(own, summed(numbers.double()).sum())

    return batch(args, weigh=weigh)


@wrong("own_batch", "one all-reduce")
def sends_twice(*args):
    summed(0)
    return batch(args)


@wrong("own_batch", "leave out the barrier")
def waits_for_all_before(*args):
    dist.barrier()
    return batch(args)


@wrong("own_batch", "leave out the barrier")
def waits_for_all_after(*args):
    found = batch(args)
    dist.barrier()
    return found


@wrong("own_batch", "one all-reduce")
def sends_nothing_twice(*args):
    summed(torch.zeros(0))
    return batch(args)


@wrong("own_batch", "one all-reduce")
def gathers_objects(*args):
    def weigh(own, _):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, int(own.sum()))
        return weighted(own, sum(found))

    return batch(args, weigh=weigh)


@wrong("own_batch", "did not|not finish|all ranks|Timed out|waits", "your code raised|timed out")
def only_those_that_count_call_it(*args):
    return batch(args, weigh=lambda own, _: weighted(own, summed(own.sum()) if own.any() else 1))


@wrong("own_batch", "leave the arguments as they are")
def masks_the_text(text, lengths, prompts, places):
    found = batch((text, lengths, prompts, places))
    text[places[found[1] == -100]] = 0
    return found


@wrong("own_batch", "leave the arguments as they are")
def pops_documents(text, lengths, prompts, places):
    found = batch((text, lengths, prompts, places))
    lengths.clear()
    return found


@wrong("own_batch", "return five tensors")
def without_documents_in_it(*args):
    found = batch(args)
    return found[:3] + found[4:]


@wrong("own_batch", "return five tensors")
def as_lists(*args):
    return [part.tolist() for part in batch(args)]


@wrong("own_batch", "the dtype is int64")
def documents_as_floats(*args):
    return batch(args, documents=lambda value: value.double())


@wrong("own_batch", "the dtype is int64")
def positions_in_32_bits(*args):
    return batch(args, positions=lambda value: value.int())


@wrong("own_batch", "weights are float64")
def weights_in_32_bits(*args):
    return batch(args, weights=lambda value: value.float())


@wrong("own_batch", "is a part computed in float32")
def weights_rounded_to_32_bits(*args):
    return batch(args, weights=lambda value: value.float().double())


@wrong("own_batch", "one weight per own token")
def weights_with_a_second_dimension(*args):
    return batch(args, weights=lambda value: value[:, None])


for dtype in (torch.bfloat16, torch.float16, torch.uint8):

    def counts_in(*args, dtype=dtype):
        return batch(args, weigh=lambda own, _: weighted(own, summed(own.sum().to(dtype)).double()))

    name = "counts_in_" + str(dtype).removeprefix("torch.")
    wrong("own_batch", "exact on its way")(named(name, counts_in))


@wrong("own_batch", "the token 0 is a token like any other: it counts")
def counts_no_token_0(*args):
    targets = batch(args, weigh=lambda own, _: own.double())[1] > 0
    return batch(args, weigh=lambda own, _: weighted(targets, summed(targets.sum())))


@wrong("own_batch", "the token 0 is a token like any other, and may be a target")
def no_target_is_token_0(*args):
    return batch(args, targets=lambda value: value.masked_fill(value == 0, -100))


@wrong("own_batch", "is -100, and not 0")
def targets_of_0(*args):
    return batch(args, targets=lambda value: value.masked_fill(value == -100, 0))


@wrong("own_batch", "hides all targets of this document")
def whole_prompts_for_none(*args):
    return batch(args, keep=lambda p, length, prompt: p + 1 < length and (p + 1 >= prompt or prompt == length))


def masked_by_slices(args, before, border):
    text, lengths, prompts, places = args
    targets, begin = text.roll(-1), 0
    targets[-1] = -100
    for length, prompt in zip(lengths, prompts):
        targets[begin : before(begin, prompt)] = -100
        begin += length
        if begin < len(text):
            targets[begin + border] = -100
    return batch(args, targets=lambda _: targets[places])


@wrong("own_batch", "does a slice end at prompt - 1")
def a_slice_to_minus_one(*args):
    return masked_by_slices(args, lambda begin, prompt: begin + prompt - 1, -1)


@wrong("own_batch", "mask the place e - 1")
def masks_the_first_of_a_document(*args):
    return masked_by_slices(args, lambda begin, prompt: begin + max(prompt - 1, 0), 0)


# ---- bytes_sent ----


def sent(
    tokens, heads, key_heads, width, ranks, rounds=lambda n: n - 1, home=lambda n: n if n > 1 else 0, of_sums=4,
    keys=lambda h, k, n: k, possible=lambda h, k, n: h % n == 0 and (k % n == 0 or n % k == 0),
    exchanged=lambda h, k, n: 2 * h + 2 * max(k, n), kept=lambda n: Fraction(n - 1, n), both=2, better=min,
    impossible=None, own=lambda t, n: Fraction(t, n), backward=2,
):  # fmt: skip
    part = own(tokens, ranks) * width
    ring = 2 * part * keys(heads, key_heads, ranks) * (2 * backward * rounds(ranks) + of_sums * home(ranks))
    if not possible(heads, key_heads, ranks):
        return int(ring), impossible, "ring"
    swap = 2 * both * part * exchanged(heads, key_heads, ranks) * kept(ranks)
    name = "ring" if ring == swap or better(ring, swap) == ring else "all-to-all"
    return int(ring), int(swap), name


@right("bytes_sent")
def by_fractions(*args):
    return sent(*args)


@right("bytes_sent")
def as_floats(*args):
    ring, swap, name = sent(*args)
    return float(ring), None if swap is None else float(swap), name


@right("bytes_sent")
def as_a_list_of_numpys(*args):
    ring, swap, name = sent(*args)
    return [numpy.int64(ring), None if swap is None else numpy.int64(swap), name]


@right("bytes_sent")
def step_by_step(tokens, heads, key_heads, head_width, ranks):
    """Adds up each message of a rank."""
    own, ring, swap = tokens // ranks * head_width, 0, 0
    for _ in range(ranks - 1):
        ring += 2 * (2 * own * key_heads * 2)
    for _ in range(ranks if ranks > 1 else 0):
        ring += 2 * own * key_heads * 4
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        return ring, None, "ring"
    copied = key_heads if key_heads % ranks == 0 else ranks
    for _ in range(ranks - 1):
        swap += 2 * 2 * own * (2 * heads // ranks + 2 * copied // ranks)
    return ring, swap, min((ring, "ring"), (swap, "ring swap"))[1][:4] if ring <= swap else "all-to-all"


@right("bytes_sent")
def with_tensors(*args):
    ring, swap, name = sent(*args)
    return torch.tensor(ring), swap if swap is None else torch.tensor(swap), name


handed_in("bytes_sent", context_parallel.ring, context_parallel.pairs, context_parallel.check_shared, max, print)
for name, pattern, change in [
    ("gradients_in_two_bytes", "sums in float32, 4 bytes", {"of_sums": 2}),
    ("no_gradients_in_the_ring", "travel, too", {"home": lambda n: 0}),
    ("gradients_are_not_home", "not n - 1 times", {"home": lambda n: n - 1}),
    ("passes_the_last_ones_on", "n - 1 times, not n times", {"rounds": lambda n: n}),
    ("keys_in_forward_only", "keys and values in backward, too", {"backward": 1}),
    ("forward_only", "forward only", {"backward": 1, "home": lambda n: 0, "both": 1}),
    ("sends_what_it_keeps", "a rank keeps 1/n", {"kept": lambda n: 1}),
    ("no_copies", "these are copied", {"exchanged": lambda h, k, n: 2 * h + 2 * k}),
    ("never_copies", "are copied until there is one per rank", {"possible": lambda h, k, n: h % n == 0 and k % n == 0}),
    (
        "keys_decide",
        "do not divide . heads|do not divide .. heads",
        {"possible": lambda h, k, n: k % n == 0 or n % k == 0},
    ),
    ("queries_decide", "neither be divided by", {"possible": lambda h, k, n: h % n == 0}),
    ("always", "all-to-all is impossible here", {"possible": lambda h, k, n: True}),
    ("a_ring_of_all_heads", "have key_heads heads, and not heads", {"keys": lambda h, k, n: h}),
    ("all_heads_exchanged", "fewer heads than queries", {"exchanged": lambda h, k, n: 4 * h}),
    ("three_all_to_alls", "the output is exchanged", {"exchanged": lambda h, k, n: h + 2 * max(k, n)}),
    ("of_all_tokens", "tokens / n of the tokens", {"own": lambda t, n: t}),
    ("sends_to_itself", "with one rank, nothing is sent", {"home": lambda n: n}),
    ("the_larger_one", "with fewer bytes", {"better": max}),
    ("zero_for_none", "its bytes are None", {"impossible": 0}),
    ("endless_bytes", "Its bytes are None", {"impossible": math.inf}),
    ("two_mistakes", "go through what travels in the ring", {"of_sums": 2, "kept": lambda n: 1}),
]:
    wrong("bytes_sent", pattern)(named(name, functools.partial(sent, **change)))


@wrong("bytes_sent", "the ring if they are equal")
def all_to_all_if_equal(*args):
    ring, swap, name = sent(*args)
    return ring, swap, "all-to-all" if ring == swap and args[-1] > 1 else name


@wrong("bytes_sent", "return three values")
def two_values(*args):
    return sent(*args)[:2]


@wrong("bytes_sent", "without a return statement")
def no_return(*args):
    sent(*args)


@wrong("bytes_sent", "the name is")
def ulysses_for_a_name(*args):
    ring, swap, name = sent(*args)
    return ring, swap, "ring" if name == "ring" else "ulysses"


# ---- train_shared ----

OWN_GRADIENT = "the backward of a gather adds up"
TEXT_ORDER = "takes the gathered keys to be in the order of the text"
LOCAL_ROTATION = "Two tokens then seem to have another distance"


def gathered_with(of_gradient):
    """A gather of all ranks' parts along the tokens, with a backward of its own."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, own):
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own.contiguous())
            return torch.cat(parts, dim=2)

        @staticmethod
        def backward(ctx, gradient):
            return of_gradient(gradient, dist.get_rank(), dist.get_world_size())

    return Gather.apply


def reduce_scattered(gradient, rank, ranks):
    parts = [part.contiguous() for part in gradient.chunk(ranks, dim=2)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


def all_reduced(gradient, rank, ranks):
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient)
    return gradient.chunk(ranks, dim=2)[rank]


def own_part(gradient, rank, ranks):
    return gradient.chunk(ranks, dim=2)[rank]


class Shared:
    """A repaired program; what answers do in another way, they replace."""

    gather = staticmethod(gathered_with(reduce_scattered))

    def cut(self, tokens):
        """The places of all ranks."""
        return context_parallel.zigzag(tokens, self.n)

    def visible(self):
        return self.places[:, None] >= torch.cat(self.everywhere)

    def positions(self):
        """Of the queries, and of the keys."""
        return self.places, self.places

    def keys(self, x):
        key = rotated(self.network.key(x), self.positions()[1])
        return self.gather(key), self.gather(self.network.value(x))

    def attended(self, x):
        query = rotated(self.network.query(x), self.positions()[0])
        key, value = self.keys(x)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.visible())

    def loss(self, logits):
        """Whose gradients are added up."""
        return F.cross_entropy(logits, self.own, reduction="sum") / (self.targets != -100).sum()

    def told(self, loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    def combine(self, parameters):
        for parameter in parameters:
            dist.all_reduce(parameter.grad)

    def forget(self, parameter):
        parameter.grad = None

    def forward(self):
        x = self.network.embedding(self.text[self.places])[None, None]
        return self.network.output(x + self.attended(x))[0, 0]

    def step(self):
        loss = self.loss(self.forward())
        loss.backward()
        told = self.told(loss)
        parameters = list(self.network.parameters())
        self.combine(parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= self.learning_rate * parameter.grad
                self.forget(parameter)
        return told

    def train(self, network, text, targets, steps, learning_rate):
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.network, self.text, self.targets, self.learning_rate = network, text, targets, learning_rate
        self.everywhere = self.cut(len(text))
        self.places = self.everywhere[self.rank]
        self.own = targets[self.places]
        return [self.step() for _ in range(steps)]


def trains_shared(kind):
    """A class as an answer, under its name."""

    def train_shared(network, text, targets, steps, learning_rate):
        return kind().train(network, text, targets, steps, learning_rate)

    train_shared.__name__, train_shared.__module__ = kind.__name__, kind.__module__
    return train_shared


def right_shared(kind):
    right("train_shared")(trains_shared(kind))
    return kind


def wrong_shared(*given, **options):
    def register(kind):
        wrong("train_shared", *given, **options)(trains_shared(kind))
        return kind

    return register


def shared_with(*bugs):
    """A repaired program in which some of the given bugs are left."""

    class Rest(Shared):
        gather = staticmethod(gathered_with(own_part if "gather" in bugs else reduce_scattered))

        def visible(self):
            keys = torch.arange(len(self.text)) if "mask" in bugs else torch.cat(self.everywhere)
            return self.places[:, None] >= keys

        def positions(self):
            own = torch.arange(len(self.places)) if "rotation" in bugs else self.places
            return own, own

    return Rest


@wrong("train_shared", TEXT_ORDER)
def as_it_is_given(network, text, targets, steps, learning_rate):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(len(text)).chunk(2 * ranks)
    places = torch.cat([pieces[rank], pieces[-1 - rank]])
    visible = places[:, None] >= torch.arange(len(text))
    number = (targets != -100).sum()
    text, targets = text[places], targets[places]
    positions = torch.arange(len(text))
    gather, losses = gathered_with(own_part), []
    for _ in range(steps):
        x = network.embedding(text)[None, None]
        query = rotated(network.query(x), positions)
        key = gather(rotated(network.key(x), positions))
        value = gather(network.value(x))
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        logits = network.output(x)[0, 0]
        loss = F.cross_entropy(logits, targets, reduction="sum") / number
        loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= learning_rate * parameter.grad
                parameter.grad = None
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


for bugs, pattern in [
    (("gather",), OWN_GRADIENT), (("mask",), TEXT_ORDER), (("rotation",), LOCAL_ROTATION),
    (("gather", "mask"), TEXT_ORDER), (("gather", "rotation"), LOCAL_ROTATION), (("mask", "rotation"), TEXT_ORDER),
]:  # fmt: skip
    kind = shared_with(*bugs)
    kind.__name__ = "SharedWithTheBugs" + "".join(bug.capitalize() for bug in bugs)
    wrong_shared(pattern)(kind)


@right_shared
class SharedRepaired(Shared):
    pass


@right_shared
class SharedAllReducesInBackward(Shared):
    gather = staticmethod(gathered_with(all_reduced))


@right_shared
class SharedWithTorchsOwnGather(Shared):
    def gather(self, own):
        return torch.cat(torch.distributed.nn.functional.all_gather(own), dim=2)


@right_shared
class SharedInOneGather(Shared):
    """Keys and values together."""

    def keys(self, x):
        key, value = rotated(self.network.key(x), self.places), self.network.value(x)
        return self.gather(torch.cat([key, value], dim=3)).chunk(2, dim=3)


@right_shared
class SharedInTheOrderOfTheText(Shared):
    """Sorts the gathered keys, so that the given mask fits."""

    def keys(self, x):
        order = torch.cat(self.everywhere).argsort()
        return (part[:, :, order] for part in super().keys(x))

    def visible(self):
        return self.places[:, None] >= torch.arange(len(self.text))


@right_shared
class SharedRotatesAfterTheGather(Shared):
    def keys(self, x):
        key, value = self.gather(self.network.key(x)), self.gather(self.network.value(x))
        return rotated(key, torch.cat(self.everywhere)), value


@right_shared
class SharedWithItsPlacesGathered(Shared):
    """The places of all ranks come by an all-gather, once."""

    def visible(self):
        if not hasattr(self, "mask"):
            places = [torch.empty_like(self.places) for _ in range(self.n)]
            dist.all_gather(places, self.places)
            self.mask = self.places[:, None] >= torch.cat(places)
        return self.mask


@right_shared
class SharedByHand(Shared):
    """Scores and softmax, and one all-reduce of all gradients."""

    def attended(self, x):
        query = rotated(self.network.query(x), self.places)
        key, value = self.keys(x)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return scores.masked_fill(~self.visible(), -torch.inf).softmax(-1) @ value

    def combine(self, parameters):
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):
            parameter.grad.copy_(part.view_as(parameter))


@right_shared
class SharedAveragesAsDdpDoes(Shared):
    """The ranks' part of the loss times their number, and the mean of the gradients."""

    def loss(self, logits):
        return self.n * super().loss(logits)

    def told(self, loss):
        return super().told(loss / self.n)

    def combine(self, parameters):
        super().combine(parameters)
        for parameter in parameters:
            parameter.grad /= self.n


@right_shared
class SharedCountsTogether(Shared):
    def loss(self, logits):
        number = (self.own != -100).sum()
        dist.all_reduce(number)
        return F.cross_entropy(logits, self.own, reduction="sum") / number


@right_shared
class SharedShiftsAllPlaces(Shared):
    """Only distances matter to a rotation."""

    def positions(self):
        return self.places + 7, self.places + 7


@right_shared
class SharedWithLatePiecesFirst(Shared):
    """The same tokens per rank, in another order."""

    def cut(self, tokens):
        return [places.roll(len(places) // 2) for places in super().cut(tokens)]


@right_shared
class SharedTellsTensors(Shared):
    def told(self, loss):
        return torch.tensor(super().told(loss), dtype=torch.float64)


@right_shared
class SharedWaits(Shared):
    def combine(self, parameters):
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in parameters]
        for work in works:
            work.wait()


@wrong_shared("until work.wait.. has returned")
class SharedForgetsToWait(Shared):
    def combine(self, parameters):
        for parameter in parameters:
            dist.all_reduce(parameter.grad, async_op=True)
        dist.barrier()


@wrong_shared("the gradients of keys and values are averaged")
class SharedAveragesTheGather(Shared):
    gather = staticmethod(gathered_with(lambda *args: reduce_scattered(*args) / args[2]))


@wrong_shared("are they added up twice")
class SharedMultipliesTheGather(Shared):
    gather = staticmethod(gathered_with(lambda *args: reduce_scattered(*args) * args[2]))


@wrong_shared("the backward of a gather adds up")
class SharedGathersWithoutAFunction(Shared):
    """The rank's own part is put back, so that it has a gradient."""

    def gather(self, own):
        parts = [torch.empty_like(own) for _ in range(self.n)]
        dist.all_gather(parts, own.detach().contiguous())
        parts[self.rank] = own
        return torch.cat(parts, dim=2)


@wrong_shared("the queries need their places")
class SharedRotatesKeysOnly(Shared):
    def positions(self):
        return torch.arange(len(self.places)), self.places


@wrong_shared("the keys need their places")
class SharedRotatesQueriesOnly(Shared):
    def positions(self):
        return self.places, torch.arange(len(self.places))


@wrong_shared("rotated as if they were in the order of the text")
class SharedRotatesLate(Shared):
    def keys(self, x):
        key, value = self.gather(self.network.key(x)), self.gather(self.network.value(x))
        return rotated(key, torch.arange(len(self.text))), value


@wrong_shared("the places of tokens play no part")
class SharedWithoutRotation(Shared):
    def positions(self):
        return 0 * self.places, 0 * self.places


@wrong_shared("the numbers of the queries among this rank's own tokens, and the keys in the order")
class SharedCausalByNumbers(Shared):
    def visible(self):
        return torch.ones(len(self.places), len(self.text)).tril().bool()


@wrong_shared("numbers among the tokens of a rank, for queries and keys")
class SharedCausalByOwnNumbers(Shared):
    def visible(self):
        return torch.ones(len(self.places), len(self.places)).tril().bool().repeat(1, self.n)


@wrong_shared("numbers among the tokens of a rank for the keys")
class SharedCausalByNumbersOfKeys(Shared):
    def visible(self):
        return self.places[:, None] >= torch.arange(len(self.places)).repeat(self.n)


@wrong_shared("later tokens of the text have to be hidden")
class SharedSeesEverything(Shared):
    def visible(self):
        return None


@wrong_shared("those up to its place are meant")
class SharedLooksAhead(Shared):
    def visible(self):
        return self.places[:, None] <= torch.cat(self.everywhere)


@wrong_shared("the keys of their own rank only")
class SharedSeesItsOwn(Shared):
    def visible(self):
        return super().visible() & torch.isin(torch.cat(self.everywhere), self.places)


@wrong_shared("Compare the attention with that of one process")
class SharedDoesNotSeeItself(Shared):
    def visible(self):
        return self.places[:, None] > torch.cat(self.everywhere)


@wrong_shared("Compare the attention with that of one process")
class SharedRotatesValues(Shared):
    def keys(self, x):
        key, value = super().keys(x)
        return key, rotated(value, torch.cat(self.everywhere))


@wrong_shared("this is a mean of the ranks' means")
class SharedMeanOfMeans(Shared):
    def loss(self, logits):
        return F.cross_entropy(logits, self.own) / self.n


@wrong_shared("divides the sum of its losses by its own number")
class SharedSumOfMeans(Shared):
    def loss(self, logits):
        return F.cross_entropy(logits, self.own)


@wrong_shared("this is a sum over tokens")
class SharedSumOfTokens(Shared):
    def loss(self, logits):
        return F.cross_entropy(logits, self.own, reduction="sum")


@wrong_shared("divided by the number of ranks as well")
class SharedAveragesTheSum(Shared):
    """Tells the right loss, and takes a smaller step."""

    def combine(self, parameters):
        super().combine(parameters)
        for parameter in parameters:
            parameter.grad /= self.n


@wrong_shared("too large by the number of ranks")
class SharedWeighsAsDdpDoesAndAddsUp(Shared):
    def loss(self, logits):
        return self.n * super().loss(logits)


@wrong_shared("with its own gradient of the parameters")
class SharedTakesItsOwnStep(Shared):
    def combine(self, parameters):
        pass


@wrong_shared("this rank's part of the loss")
class SharedTellsItsPart(Shared):
    def told(self, loss):
        return loss.item()


@wrong_shared("this rank's own tokens that count: all tokens")
class SharedTellsItsMean(Shared):
    def told(self, loss):
        return loss.item() * (self.targets != -100).sum().item() / (self.own != -100).sum().item()


@wrong_shared("gradients of earlier steps are still in")
class SharedKeepsGradients(Shared):
    def step(self):
        self.kept = [parameter.grad for parameter in self.network.parameters()]
        for parameter in self.network.parameters():
            parameter.grad = None
        return super().step()

    def combine(self, parameters):
        super().combine(parameters)
        for parameter, kept in zip(parameters, self.kept):
            if kept is not None:
                parameter.grad += kept

    def forget(self, parameter):
        pass


@wrong_shared("return a list with the loss of each step")
class SharedTellsTheLastLoss(Shared):
    def train(self, *args):
        return super().train(*args)[-1]


@wrong_shared("return a list with the loss of each step")
class SharedTellsNothing(Shared):
    def train(self, *args):
        super().train(*args)


@wrong_shared("before the parameters change")
class SharedTellsOneLossOnly(Shared):
    """That of the first step, for each of them."""

    def train(self, *args):
        losses = super().train(*args)
        return losses[:1] * len(losses)


@wrong_shared("an early and a late piece")
class SharedContiguously(Shared):
    """Right numbers, but the last rank has most of the work."""

    def cut(self, tokens):
        return context_parallel.contiguous(tokens, self.n)


@wrong_shared("for its own tokens only")
class SharedComputesTheWholeText(Shared):
    def train(self, network, text, targets, steps, learning_rate):
        self.whole = text
        return super().train(network, text, targets, steps, learning_rate)

    def cut(self, tokens):
        return [torch.arange(tokens)] * self.n

    def keys(self, x):
        return rotated(self.network.key(x), self.places), self.network.value(x)

    def visible(self):
        return self.places[:, None] >= self.places

    def loss(self, logits):
        return super().loss(logits) / self.n


@wrong_shared("for its own tokens only")
class SharedComputesTwice(Shared):
    def forward(self):
        with torch.no_grad():
            super().forward()
        return super().forward()


@wrong_shared("nothing else needs to travel")
class SharedGathersTooMuch(Shared):
    def keys(self, x):
        for _ in range(3):
            self.gather(x.detach())
        return super().keys(x)


def summed_by_a_gather(gradient, rank, ranks):
    parts = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(parts, gradient.contiguous())
    return sum(parts).chunk(ranks, dim=2)[rank]


@wrong_shared("not a gather of all gradients")
class SharedGathersAllGradients(Shared):
    gather = staticmethod(gathered_with(summed_by_a_gather))


@wrong_shared("computed in 32 bits")
class SharedDividesWholeNumbers(Shared):
    """A quotient of two int64 tensors is float32, so its digits are lost."""

    def loss(self, logits):
        share = (self.own != -100).sum() / (self.targets != -100).sum()
        return F.cross_entropy(logits, self.own) * share


@right_shared
class SharedDividesWholeNumbersAsNumbers(Shared):
    def loss(self, logits):
        share = (self.own != -100).sum().item() / (self.targets != -100).sum().item()
        return F.cross_entropy(logits, self.own) * share


@wrong_shared("computed in 32 bits")
class SharedInFloat32(Shared):
    def train(self, network, *args):
        return super().train(network.float(), *args)


@wrong_shared("computed in 32 bits")
class SharedStepsInFloat32(Shared):
    """Only the gradients of the parameters lose digits."""

    def combine(self, parameters):
        super().combine(parameters)
        for parameter in parameters:
            parameter.grad = parameter.grad.float().double()


@wrong_shared("Go backward")
class SharedDetachesTheValues(Shared):
    def keys(self, x):
        key, value = super().keys(x)
        return key, value.detach() + 0 * value


@wrong_shared("Go backward|gradients of keys and values are too large")
class SharedStepsTwiceAsFar(Shared):
    def combine(self, parameters):
        super().combine(parameters)
        for parameter in parameters:
            parameter.grad *= 1.5


# ---- tiny weights, and what travels besides ----


def leaves_out(limit, name):
    def answer(blocks):
        return merged(blocks, weigh=lambda x: x.exp().masked_fill(x.exp() < limit, 0))

    answer.__name__ = name
    wrong("merge", "however small its weight")(answer)


leaves_out(1e-13, "leaves_out_weights_below_1e_13")
leaves_out(2.2e-16, "leaves_out_weights_below_epsilon")


@wrong("merge", "however small its weight|clamped")
def clamps_at_30(blocks):
    return merged(blocks, weigh=lambda x: torch.where(x == -torch.inf, 0.0, x.clamp(min=-30).exp()))


@wrong_shared("nothing else needs to travel")
class SharedGathersKeysTwice(Shared):
    def gather(self, own):
        gather = gathered_with(reduce_scattered)
        gather(own.detach())
        return gather(own)
