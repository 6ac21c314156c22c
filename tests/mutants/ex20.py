"""Exercise 20: experts."""

import math

import torch
import torch.distributed as dist
from ddp_course import lesson20
from ddp_course.models import expert_parallel, experts
from torch import nn
from torch.nn import functional as F

from mutants import right, wrong


def named(name, function):
    """A function under a name of its own, for the candidates that a program makes."""

    def answer(*args):
        return function(*args)

    answer.__name__ = name
    return answer


# Functions of the lesson, of torch and of Python, as they are: none is an answer.
GIVEN = [
    experts.choose, experts.load_of, experts.balance_loss, experts.within_capacity, experts.find_way,
    experts.AllToAll.apply, expert_parallel.with_experts, expert_parallel.layers_of, expert_parallel.share,
    expert_parallel.of_experts, expert_parallel.average_gradients, expert_parallel.clip_gradients,
    expert_parallel.auxiliary_loss, expert_parallel.move_biases, expert_parallel.gathered, lesson20.update,
    dist.all_to_all_single, dist.all_reduce, dist.all_gather, torch.topk, torch.testing.assert_close, torch.sort,
]  # fmt: skip
for question in ("test_averaging", "there_and_back", "keep"):
    for function in GIVEN:
        name = f"{getattr(function, '__module__', 'torch')}_{function.__name__}".replace(".", "_")
        wrong(question, ".", "failed|your code raised")(named(name, function))


# ---- test_averaging ----


def given_of(rank, count=4):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 3, 2, generator=generator, dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def along_data(mesh):
    return dist.get_process_group_ranks(mesh.get_group("data"))


def everywhere(mesh):
    return range(dist.get_world_size())


def a_test(
    average, mesh, tokens=lambda rank: 3 * rank, compare=close, of=given_of, frozen=(True, True), each=2,
    of_experts=along_data, of_dense=everywhere, divisor=lambda total, tokens, among: total, judged=lambda rank: True,
    lists=("experts", "dense"),
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2 * each)]
    for parameter, gradient in zip(parameters, of(rank)):
        parameter.grad = gradient.clone()
    more = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    ours, dense = parameters[:each], parameters[each:]
    given = [own + [extra] * there for own, extra, there in zip((ours, dense), more, frozen)]
    average(*given, tokens(rank), mesh)
    if not judged(rank):
        return
    total = sum(map(tokens, range(ranks)))
    for name, own, among, first in (("experts", ours, of_experts(mesh), 0), ("dense", dense, of_dense(mesh), each)):
        for place, parameter in enumerate(own if name in lists else []):
            expected = sum(of(r)[first + place] for r in among) / divisor(total, tokens, among)
            compare(parameter.grad, expected)
    assert all(parameter.grad is None for parameter in more), "frozen"


@right("test_averaging")
def from_seeds(average, mesh):
    a_test(average, mesh)


@right("test_averaging")
def gathered_before(average, mesh):
    """It knows the other ranks' gradients from an all-gather, and compares with allclose."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = int(torch.randint(1, 9, (), generator=generator)) if rank else 0
    lists = [[nn.Parameter(torch.randn(n, 2, generator=generator, dtype=torch.float64)) for n in sizes]
             for sizes in ((4, 3, 1), (2, 5, 1))]  # fmt: skip
    for values in lists:
        for value in values[:-1]:
            value.grad = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, [tokens, *[[value.grad for value in values] for values in lists]])
    average(*lists, tokens, mesh)
    total = sum(one[0] for one in everyone)
    for number, (values, among) in enumerate(zip(lists, (along_data(mesh), range(ranks)))):
        for place, value in enumerate(values):
            if everyone[rank][1 + number][place] is None:
                assert value.grad is None
                continue
            expected = sum(everyone[r][1 + number][place] for r in among) / total
            assert torch.allclose(value.grad, expected, rtol=1e-10, atol=1e-12)


@right("test_averaging")
def by_its_own_average(average, mesh):
    """It writes right code itself, and compares with what that gives."""

    def reference(values, group, total):
        for value in values:
            dist.all_reduce(value, group=group)
        return [value / total for value in values]

    rank = dist.get_rank()
    tokens, total = 2 * rank, sum(2 * r for r in range(dist.get_world_size()))
    lists = [[nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(4)] for _ in range(2)]
    expected = []
    for number, (values, group) in enumerate(zip(lists, (mesh.get_group("data"), None))):
        gradients = list(given_of(rank, 6)[3 * number : 3 * number + 3, :, 0].contiguous())
        for value, gradient in zip(values[1:], gradients):
            value.grad = gradient.clone()
        expected.append(reference(gradients, group, total))
    average(*lists, tokens, mesh)
    for values, right_ones in zip(lists, expected):
        assert values[0].grad is None
        for value, one in zip(values[1:], right_ones):
            assert (value.grad - one).abs().max() < 1e-9


@right("test_averaging")
def in_two_rounds(average, mesh):
    """Two calls with other tokens; the comparison comes after both."""
    problems = []
    for tokens in (lambda rank: 3 * rank, lambda rank: 7 if rank == 0 else rank - 1):
        try:
            a_test(average, mesh, tokens)
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, problems


@right("test_averaging")
def with_whole_numbers(average, mesh):
    """Gradients that are sums of powers of two, and a tenth."""
    a_test(average, mesh, of=lambda rank: given_of(rank) + 2.0**rank)


@right("test_averaging")
def all_ranks_agree(average, mesh):
    """All ranks raise, if one has to."""
    problem = ""
    try:
        a_test(average, mesh)
    except AssertionError as error:
        problem = str(error)
    found = torch.tensor(len(problem) > 0, dtype=torch.int64)
    dist.all_reduce(found)
    if found:
        raise AssertionError(problem or "on another rank")


def faulty(name, pattern, **change):
    def answer(average, mesh):
        return a_test(average, mesh, **change)

    wrong("test_averaging", pattern)(named(name, answer))


EXPECTS = "seems to expect this result"
faulty(
    "expects_the_mean_over_copies", f"experts over the ranks with their copies only[^$]*{EXPECTS}",
    divisor=lambda total, tokens, among: sum(map(tokens, among)),
)  # fmt: skip
faulty("expects_experts_of_the_world", f"experts over the whole world[^$]*{EXPECTS}", of_experts=everywhere)
faulty("expects_dense_along_data", f'dense parameters along "data" only[^$]*{EXPECTS}', of_dense=along_data)
faulty(
    "expects_experts_along_expert", f"along \"expert\" instead[^$]*{EXPECTS}",
    of_experts=lambda mesh: dist.get_process_group_ranks(mesh.get_group("expert")),
)  # fmt: skip
faulty("expects_experts_alone", f"adds up nothing[^$]*{EXPECTS}", of_experts=lambda mesh: [dist.get_rank()])
faulty("expects_the_sum", "is not the mean over all tokens", divisor=lambda total, tokens, among: 1)
faulty("expects_a_mean_over_ranks", "is not the mean over all tokens",
       divisor=lambda total, tokens, among: dist.get_world_size())  # fmt: skip
faulty("even_tokens", "give the ranks different numbers of tokens", tokens=lambda rank: 3)
faulty("each_rank_has_tokens", "let one rank have no tokens", tokens=lambda rank: 3 * rank + 1)
faulty("dense_only", "the sum of an expert's gradients", lists=("dense",))
faulty("experts_only", "dense parameters are on all ranks", lists=("experts",))
faulty("without_frozen_dense", "let one dense parameter have no gradient", frozen=(True, False))
faulty("without_frozen_experts", "let one expert have no gradient", frozen=(False, True))
faulty("default_tolerance", "right to 9 digits", compare=torch.testing.assert_close)
faulty("one_parameter_each", "use more than one parameter in each list", each=1, of=lambda rank: given_of(rank, 2))
faulty("of_rank_0_only", "compare on every rank", judged=lambda rank: rank == 0)
faulty("of_the_last_rank_only", "compare on every rank", judged=lambda rank: rank == dist.get_world_size() - 1)


@wrong("test_averaging", "for every code, right or wrong")
def accepts_everything(average, mesh):
    a_test(average, mesh, compare=lambda *_: None, frozen=(False, False))


@wrong("test_averaging", "for every code, right or wrong")
def never_calls(average, mesh):
    pass


@wrong("test_averaging", "fails for every code, right or wrong[^$]*is not the mean over all tokens")
def rejects_everything(average, mesh):
    a_test(average, mesh)
    raise AssertionError("no")


def larger_than(got, expected):
    if (got - expected).abs().max() > 1e-9:
        raise AssertionError("too far")


faulty("nan_is_not_larger", "fails for NaN", compare=larger_than)


def direction(got, expected):
    assert F.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 1 - 1e-12


faulty("compares_directions", "compare numbers, and not directions", compare=direction)


def norms(got, expected):
    assert math.isclose(got.norm(), expected.norm(), rel_tol=1e-10)


faulty("compares_norms", "not only their sizes or norms", compare=norms)


def first_number(got, expected):
    close(got[0, 0], expected[0, 0])


def last_number(got, expected):
    close(got[-1, -1], expected[-1, -1])


def sums(got, expected):
    close(got.sum(), expected.sum())


faulty("compares_the_first_number", "compare all numbers of a gradient", compare=first_number)
faulty("compares_the_last_number", "compare all numbers of a gradient", compare=last_number)
faulty("compares_sums", "compare number by number", compare=sums)
faulty("tolerance_of_2e_8", "right to 9 digits",
       compare=lambda got, expected: torch.testing.assert_close(got, expected, rtol=2e-8, atol=0.0))  # fmt: skip
faulty("zeros_without_tokens", "a rank without tokens can have gradients", of=lambda rank: given_of(rank) * (rank > 0))
faulty("one_rank_has_all_tokens", "give several ranks tokens", tokens=lambda rank: 5 * (rank == 1))
faulty("tokens_by_column", "have different numbers of tokens, too", tokens=lambda rank: 3 * (rank % 2))
faulty("copies_have_one_gradient", "copies of an expert have different gradients", of=lambda rank: given_of(rank % 2))
faulty("dense_gradients_are_alike", "dense parameters have different gradients on each rank",
       of=lambda rank: torch.cat([given_of(rank)[:2], given_of(9)[2:]]))  # fmt: skip


def bit_for_bit(got, expected):
    assert torch.equal(got, expected)


faulty(
    "compares_bits", "the sum in the order of the ranks: compare to 9 digits, and not bit for bit", compare=bit_for_bit
)
faulty("default_tolerance_of_large_gradients", "so set rtol and atol", compare=torch.testing.assert_close,
       of=lambda rank: 1000 * given_of(rank))  # fmt: skip
faulty("gradients_of_zeros", "all gradients that the test gives are 0", of=lambda rank: 0 * given_of(rank))
faulty("whole_numbers", "these gradients are the same in float32", tokens=lambda rank: [0, 1, 3, 4][rank],
       of=lambda rank: torch.arange(24.0, dtype=torch.float64).view(4, 3, 2) * (1 + rank * rank))  # fmt: skip


@wrong("test_averaging", "parameters and gradients are in float64")
def in_single_precision(average, mesh):
    lists = [[nn.Parameter(torch.zeros(2))] for _ in range(2)]
    for values in lists:
        values[0].grad = torch.ones(2)
    average(*lists, 2, mesh)
    close(lists[1][0].grad, torch.full((2,), 0.5))


def raising(error):
    def answer(average, mesh):
        try:
            a_test(average, mesh)
        except AssertionError as failed:
            raise error(str(failed)) from None

    wrong("test_averaging", f"{error.__name__}[^$]*another error has another meaning")(
        named(f"raises_{error.__name__}", answer)
    )


raising(ValueError)
raising(RuntimeError)


def own_numbers(average, mesh, tokens, expected_of, clone=True):
    """A test whose expected values are expected_of(its gradients, a group, this rank)."""
    rank = dist.get_rank()
    lists = [[nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(3)] for _ in range(2)]
    gradients = [given_of(rank)[:2].clone(), given_of(rank)[2:].clone()]
    for values, own in zip(lists, gradients):
        for value, gradient in zip(values, own):
            value.grad = gradient.clone() if clone else gradient
    average(*lists, tokens(rank), mesh)
    expected = [expected_of(own, group) for own, group in zip(gradients, (mesh.get_group("data"), None))]
    for values, right_ones in zip(lists, expected):
        assert values[2].grad is None
        for value, one in zip(values, right_ones):
            torch.testing.assert_close(value.grad, one, rtol=1e-9, atol=1e-12)


@wrong("test_averaging", "clone them before the call")
def adds_up_changed_gradients(average, mesh):
    """What it expects is computed after the call, from tensors that average has changed."""

    def expected(own, group):
        dist.all_reduce(own, group=group)
        return own / sum(2 * r for r in range(dist.get_world_size()))

    own_numbers(average, mesh, lambda rank: 2 * rank, expected, clone=False)


@wrong("test_averaging", "as if its loss was a mean[^$]*is a sum already")
def takes_the_loss_for_a_mean(average, mesh):
    def expected(own, group):
        own = own * 2 * dist.get_rank()
        dist.all_reduce(own, group=group)
        return own / sum(2 * r for r in range(dist.get_world_size()))

    own_numbers(average, mesh, lambda rank: 2 * rank, expected)


@wrong("test_averaging", "divides by its own tokens only[^$]*are those of this rank")
def gives_the_total_of_tokens(average, mesh):
    def expected(own, group):
        dist.all_reduce(own, group=group)
        return own / 20

    own_numbers(average, mesh, lambda rank: 20, expected)


@wrong("test_averaging", "compare copies with each other only")
def compares_copies(average, mesh):
    rank = dist.get_rank()
    lists = [[nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2)] for _ in range(2)]
    for value, gradient in zip(sum(lists, []), given_of(rank)):
        value.grad = gradient.clone()
    average(*lists, 2 + rank, mesh)
    means = []
    for values, group in zip(lists, (mesh.get_group("data"), None)):
        for value in values:
            mean = value.grad.clone()
            dist.all_reduce(mean, group=group)
            means.append(mean / dist.get_world_size(group))
    for value, mean in zip(sum(lists, []), means):
        close(value.grad, mean)


@wrong("test_averaging", "has to raise an AssertionError")
def returns_false(average, mesh):
    try:
        a_test(average, mesh)
    except AssertionError:
        return False
    return True


@wrong("test_averaging", "read the gradient from the parameter, after the call")
def keeps_the_old_gradients(average, mesh):
    rank = dist.get_rank()
    lists = [[nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(3)] for _ in range(2)]
    views, expected = [], []
    total = sum(3 * r for r in range(dist.get_world_size()))
    for number, (values, among) in enumerate(zip(lists, (along_data(mesh), everywhere(mesh)))):
        for place in range(2):
            values[place].grad = given_of(rank)[2 * number + place].clone()
            views.append(values[place].grad)
            expected.append(sum(given_of(r)[2 * number + place] for r in among) / total)
    average(*lists, 3 * rank, mesh)
    for view, one in zip(views, expected):
        close(view, one)
    assert all(values[2].grad is None for values in lists)


@wrong("test_averaging", "seems to expect this result; but ask the mesh which ranks")
def knows_the_rows(average, mesh):
    """It takes neighbours for the ranks that share experts."""
    of = mesh["expert"].size()
    a_test(average, mesh, of_experts=lambda _: [r for r in everywhere(mesh) if r % of == dist.get_rank() % of])


@wrong("test_averaging", "seems to expect|compute what|from the mesh|is not the mean")
def for_four_ranks(average, mesh):
    a_test(average, mesh, divisor=lambda total, tokens, among: total * dist.get_world_size() / 4)


@wrong("test_averaging", "is not the mean|seems to expect")
def all_have_the_same_gradients(average, mesh):
    """With the same numbers on all ranks, it takes means for what they were."""
    a_test(average, mesh, of=lambda rank: given_of(0), of_experts=lambda _: [0], of_dense=lambda _: [0],
           divisor=lambda *_: 1)  # fmt: skip


@wrong("test_averaging", ".", "your code raised|timed out")
def compares_between_two_calls(average, mesh):
    """A rank that raises leaves the others in the second call."""
    a_test(average, mesh, judged=lambda rank: rank == 0)
    a_test(average, mesh)


# ---- there_and_back ----


def travels(
    x, chosen, weights, owner, compute, group, sort_by="owner", sort_arrived=True, undo=True, mix=None, exchange=None,
    rows=lambda x, order, k, weights: x[order // k], there=None,
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    k, me, ranks = chosen.shape[1], dist.get_rank(group), dist.get_world_size(group)
    owner, flat = torch.tensor(owner), chosen.flatten()
    place = owner.argsort(stable=True).argsort() if sort_by == "owner" else torch.arange(len(owner))
    order = place[flat].argsort(stable=True) if sort_by else torch.arange(len(flat))
    counts = torch.bincount(flat, minlength=len(owner))
    theirs = (exchange or gather_counts)(counts, group)
    mine = theirs[:, owner == me]
    send = [int(counts[owner == r].sum()) for r in range(ranks)]
    receive = mine.sum(1).tolist()
    arrived = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(arrived, rows(x, order, k, weights).contiguous(), receive, send, group=group)
    numbers = torch.arange(mine.shape[1]).repeat(ranks).repeat_interleave(mine.flatten())
    by_expert = numbers.argsort(stable=True) if sort_arrived else torch.arange(len(arrived))
    own_counts = (there or (lambda mine, _: mine.sum(0).tolist()))(mine, theirs)
    results = compute(arrived[by_expert], own_counts)
    back = torch.empty_like(results)
    back[by_expert] = results
    home = x.new_empty(len(order), x.shape[1])
    dist.all_to_all_single(home, back if undo else results, send, receive, group=group)
    return (mix or added)(x, home, order, k, weights)


def gather_counts(counts, group):
    theirs = counts.new_empty(dist.get_world_size(group) * len(counts))
    dist.all_gather_into_tensor(theirs, counts, group=group)
    return theirs.view(-1, len(counts))


def added(x, home, order, k, weights):
    return torch.zeros_like(x).index_add(0, order // k, home * weights.flatten()[order, None])


@right("there_and_back")
def gathers_the_counts(*args):
    return travels(*args)


@right("there_and_back")
def gathers_a_list_of_counts(*args):
    def exchange(counts, group):
        parts = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, counts, group=group)
        return torch.stack(parts)

    return travels(*args, exchange=exchange)


@right("there_and_back")
def back_into_choices(*args):
    def mix(x, home, order, k, weights):
        choices = torch.empty_like(home)
        choices[order] = home
        return (choices.view(*weights.shape, x.shape[1]) * weights[..., None]).sum(1)

    return travels(*args, mix=mix)


@right("there_and_back")
def counts_by_all_to_all(x, chosen, weights, owner, compute, group):
    """Each rank hears of its own experts only, and loops in Python."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    mine = [e for e, r in enumerate(owner) if r == me]
    choices = sorted(((owner[e], e, t, j) for t, row in enumerate(chosen.tolist()) for j, e in enumerate(row)))
    counts = [sum(c[1] == e for c in choices) for e in range(len(owner))]
    ordered = sorted(range(len(owner)), key=lambda e: (owner[e], e))
    splits = [owner.count(r) for r in range(ranks)]
    theirs = torch.empty(ranks * len(mine), dtype=torch.int64)
    sent = torch.tensor([counts[e] for e in ordered], dtype=torch.int64)
    dist.all_to_all_single(theirs, sent, [len(mine)] * ranks, splits, group=group)
    theirs = theirs.view(ranks, len(mine)).tolist()
    send = [sum(c[0] == r for c in choices) for r in range(ranks)]
    receive = [sum(row) for row in theirs]
    arrived = x.new_empty(sum(receive), x.shape[1])
    rows = torch.stack([x[c[2]] for c in choices]) if choices else x.new_empty(0, x.shape[1])
    dist.all_to_all_single(arrived, rows, receive, send, group=group)
    places, start = [[] for _ in mine], 0
    for row in theirs:
        for number, count in enumerate(row):
            places[number] += range(start, start + count)
            start += count
    order = torch.tensor(sum(places, []), dtype=torch.int64)
    results = compute(arrived[order], [len(part) for part in places])
    back, home = torch.zeros_like(arrived), x.new_empty(len(choices), x.shape[1])
    back[order] = results
    dist.all_to_all_single(home, back, send, receive, group=group)
    out = torch.zeros_like(x)
    for row, (_, _, token, j) in zip(home, choices):
        out[token] += row * weights[token, j]
    return out


@right("there_and_back")
def all_numbers_to_all(*args):
    """An all-to-all in which each rank gets the counts of all experts."""

    def exchange(counts, group):
        ranks = dist.get_world_size(group)
        sent, theirs = counts.repeat(ranks), counts.new_empty(ranks * len(counts))
        dist.all_to_all_single(theirs, sent, group=group)
        return theirs.view(ranks, -1)

    return travels(*args, exchange=exchange)


@right("there_and_back")
def a_token_once_per_choice_in_any_order(x, chosen, weights, owner, compute, group):
    """The tokens of an expert in the opposite order."""
    flipped = [value.flip(0) for value in (x, chosen, weights)]
    return travels(*flipped, owner, compute, group).flip(0)


def detour(name, pattern, status="failed", **change):
    def answer(*args):
        return travels(*args, **change)

    wrong("there_and_back", pattern, status)(named(name, answer))


detour("sorted_by_expert_number", "are not in the order of the ranks", sort_by="expert")
detour("not_sorted", "sort the choices by the rank of their expert", sort_by=None)
detour("as_they_arrived", "are not sorted by expert: they come sorted by their source rank", sort_arrived=False)
detour("not_undone", "undo this sorting first, back", undo=False)
detour("of_the_wrong_tokens", "choice c is of token c // k|rows of other tokens",
       rows=lambda x, order, k, weights: x[order % len(x)] if len(x) else x[order])  # fmt: skip
detour("weighted_before", "have been multiplied by their weights",
       rows=lambda x, order, k, weights: x[order // k] * weights.flatten()[order, None])  # fmt: skip
detour("own_counts", "only the rank's own rows|own rows", "failed",
       there=lambda mine, _: mine[dist.get_rank() % len(mine)].tolist())  # fmt: skip
detour("counts_of_each_rank", "how many rows come from each rank|how many rows arrive",
       there=lambda mine, _: mine.sum(1).tolist())  # fmt: skip
detour("counts_of_all_experts", "the counts of all experts|how many rows arrive",
       there=lambda _, theirs: theirs.sum(0).tolist())  # fmt: skip
detour("counts_upside_down", "in ascending order", there=lambda mine, _: mine.sum(0).tolist()[::-1])
for kind, change in (("Tensor", lambda counts: counts), ("tuple of int", lambda counts: tuple(counts.tolist())),
                     ("list of Tensor", list)):  # fmt: skip
    detour(f"counts_as_a_{kind.replace(' ', '_')}", f"got +a {kind}[^$]*counts is a list of ints",
           there=lambda mine, _, change=change: change(mine.sum(0)))  # fmt: skip


@wrong("there_and_back", "right to a few digits only: send them in float64")
def rows_in_float32(x, chosen, weights, owner, compute, group):
    def in_float64(rows, counts):
        return compute(rows, counts).float()

    return travels(x.float(), chosen, weights.float(), owner, in_float64, group).double()


@wrong("there_and_back", "in descending order|in ascending order")
def experts_backwards(x, chosen, weights, owner, compute, group):
    """The rows and counts of this rank's last expert come first."""

    def backwards(rows, counts):
        parts = compute(torch.cat(rows.split(counts)[::-1]), counts[::-1]) if counts else compute(rows, counts)
        return torch.cat(parts.split(counts[::-1])[::-1]) if counts else parts

    return travels(x, chosen, weights, owner, backwards, group)


@wrong("there_and_back", "`owner` says where they are|your code raised", "failed|your code raised")
def experts_in_order(x, chosen, weights, owner, compute, group):
    ranks = dist.get_world_size(group)
    owner = [number * ranks // len(owner) for number in range(len(owner))]
    return travels(x, chosen, weights, owner, compute, group)


@wrong("there_and_back", "A barrier would be one more")
def waits_at_a_barrier(x, chosen, weights, owner, compute, group):
    dist.barrier(group=group)
    return travels(x, chosen, weights, owner, compute, group)


@wrong("there_and_back", "each row has one more number: the weights stay at home")
def weights_travel(x, chosen, weights, owner, compute, group):
    def with_weights(rows, counts):
        results = compute(rows[:, :-1].contiguous(), counts) * rows[:, -1:]
        return torch.cat([results, rows[:, -1:]], 1)

    wide = torch.cat([x, x[:, :1]], 1)

    def rows(wide, order, k, weights):
        return torch.cat([wide[order // k, :-1], weights.flatten()[order, None]], 1)

    def mix(wide, home, order, k, weights):
        return torch.zeros_like(wide).index_add(0, order // k, home)

    return travels(wide, chosen, weights, owner, with_weights, group, rows=rows, mix=mix)[:, :-1].contiguous()


def mixed(name, pattern, mix):
    detour(name, pattern, mix=mix)


def scattered(change):
    return lambda x, home, order, k, weights: torch.zeros_like(x).index_add(
        0, order // k, home * change(weights).flatten()[order, None]
    )


mixed("without_weights", "the weights are missing", scattered(torch.ones_like))
mixed("plain_mean", "plain mean of the results", scattered(lambda w: torch.full_like(w, 1 / w.shape[1])))
mixed("divided_by_the_sum", "divided by their sum", scattered(lambda w: w / w.sum(1, keepdim=True)))
mixed("divided_by_k", "by the number of experts per token", scattered(lambda w: w / w.shape[1]))
mixed("weights_twice", "applied twice", scattered(lambda w: w**2))
mixed("weights_not_sorted", "weights are still in the order of the tokens",
      lambda x, home, order, k, w: torch.zeros_like(x).index_add(0, order // k, home * w.flatten()[:, None]))  # fmt: skip
mixed("tokens_not_sorted", "belongs to token order\\[i\\] // k", lambda x, home, order, k, w: torch.zeros_like(x).index_add(
    0, torch.arange(len(order)) // k, home * w.flatten()[order, None]))  # fmt: skip
mixed("nothing_sorted_back", "neither the tokens nor the weights",
      lambda x, home, order, k, w: (home.view(*w.shape, x.shape[1]) * w[..., None]).sum(1))  # fmt: skip
mixed("sorted_once_more", "sorted once more instead of back",
      lambda x, home, order, k, w: (home[order].view(*w.shape, x.shape[1]) * w[..., None]).sum(1))  # fmt: skip
mixed("softmax_of_the_weights", "a softmax was taken", scattered(lambda w: w.softmax(1)))
mixed(
    "first_weight_for_all",
    "the weight of a token's first choice",
    scattered(lambda w: w[:, :1].expand_as(w).contiguous()),
)
mixed("weights_in_float32", "keep weights and results in float64", scattered(lambda w: w.float().double()))
mixed("adds_x", "x is added", lambda x, *rest: x + added(x, *rest))
mixed("zeros", "nothing came home", lambda x, *rest: torch.zeros_like(x))
mixed("in_float32", "in float64", lambda *args: added(*args).float())


@wrong("there_and_back", "keeps one of the results of a token")
def assigns(*args):
    def mix(x, home, order, k, weights):
        out = torch.zeros_like(x)
        for row, choice in zip(home, order.tolist()):
            out[choice // k] = row * weights.flatten()[choice]
        return out

    return travels(*args, mix=mix)


@wrong("there_and_back", "only the first choice")
def first_choice_only(*args):
    def mix(x, home, order, k, weights):
        first = order % k == 0
        return added(x, home[first], order[first], k, weights)

    return travels(*args, mix=mix)


@wrong("there_and_back", "only the last choice")
def last_choice_only(*args):
    def mix(x, home, order, k, weights):
        last = order % k == k - 1
        return added(x, home[last], order[last], k, weights)

    return travels(*args, mix=mix)


detour("counts_in_a_byte", "split sizes", "failed|your code raised",
       exchange=lambda counts, group: gather_counts(counts.to(torch.uint8), group).long())  # fmt: skip

CHOICES = {}


@wrong("there_and_back", "rows of other experts have arrived|only the rank's own rows|how many rows")
def keeps_the_first_choices(x, chosen, *rest):
    """As if a router's choices stayed."""
    key = chosen.shape, tuple(rest[1])
    return travels(x, CHOICES.setdefault(key, chosen), *rest)


@wrong("there_and_back", "pass group=group")
def in_the_world(x, chosen, weights, owner, compute, group):
    """The counts are gathered in the world, and looked up for the group."""

    def exchange(counts, group):
        theirs = gather_counts(counts, None)
        return theirs[dist.get_process_group_ranks(group)]

    return travels(x, chosen, weights, owner, compute, group, exchange=exchange)


@wrong("there_and_back", "leave the arguments as they are")
def changes_x(x, *rest):
    out = travels(x, *rest)
    return x.copy_(out)


@wrong("there_and_back", "leave the arguments as they are")
def changes_the_weights(x, chosen, weights, *rest):
    weights /= weights.sum(1, keepdim=True)
    return travels(x, chosen, weights, *rest)


@wrong("there_and_back", "leave the arguments as they are|call compute once")
def changes_the_owner(x, chosen, weights, owner, *rest):
    out = travels(x, chosen, weights, owner, *rest)
    owner.sort()
    return out


@wrong("there_and_back", "call compute once")
def each_source_alone(x, chosen, weights, owner, compute, group):
    """It calls compute for the rows of each rank."""
    width = x.shape[1]

    def many(rows, counts):
        compute(rows[:0], [0] * len(counts))
        return compute(rows, counts).view(-1, width)

    return travels(x, chosen, weights, owner, many, group)


@wrong("there_and_back", "call compute once")
def not_without_rows(x, chosen, weights, owner, compute, group):
    def some(rows, counts):
        return compute(rows, counts) if len(rows) else rows

    return travels(x, chosen, weights, owner, some, group)


@wrong("there_and_back", "one exchange of counts, one all-to-all there")
def pads_the_way(x, chosen, weights, owner, compute, group):
    """One more all-to-all for the sizes."""
    ranks = dist.get_world_size(group)
    sizes = torch.zeros(ranks, dtype=torch.int64)
    dist.all_to_all_single(torch.empty_like(sizes), sizes, group=group)
    return travels(x, chosen, weights, owner, compute, group)


@wrong(
    "there_and_back", "one exchange of counts|call compute|how many rows|rows of|one row per choice|counts for compute"
)
def all_to_all_ranks(x, chosen, weights, owner, compute, group):
    """All tokens are gathered on all ranks: nothing travels by the choices."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    every = [None] * ranks
    dist.all_gather_object(every, (x, chosen), group=group)
    mine = [e for e, r in enumerate(owner) if r == me]
    rows = [torch.cat([a[(b == e).any(1)] for a, b in every]) for e in mine]
    results = compute(torch.cat(rows) if rows else x[:0], [len(part) for part in rows])
    found = [None] * ranks
    dist.all_gather_object(found, dict(zip(mine, results.split([len(part) for part in rows]))), group=group)
    found = {e: value for part in found for e, value in part.items()}
    out = torch.zeros_like(x)
    for e, value in found.items():
        start = sum(int((b == e).sum()) for _, b in every[:me])
        token, j = (chosen == e).nonzero(as_tuple=True)
        out[token] += value[start : start + len(token)] * weights[token, j][:, None]
    return out


@wrong("there_and_back", "one exchange of counts, one all-to-all there")
def nothing_sent_without_tokens(x, chosen, weights, owner, compute, group):
    """Ranks that all have no tokens send nothing: they know it by an all-reduce."""
    number = torch.tensor(len(x))
    dist.all_reduce(number, group=group)
    if not number:
        compute(x, [0] * owner.count(dist.get_rank(group)))
        return x.clone()
    return travels(x, chosen, weights, owner, compute, group)


@wrong("there_and_back", "at most|one row per choice")
def sends_twice_as_wide(x, chosen, weights, owner, compute, group):
    wide = torch.cat([x, x], 1)
    narrow = lambda rows, counts: compute(rows[:, : x.shape[1]], counts).repeat(1, 2)  # noqa: E731
    return travels(wide, chosen, weights, owner, narrow, group)[:, : x.shape[1]]


@wrong("there_and_back", ".", "your code raised|failed|timed out")
def even_parts(x, chosen, weights, owner, compute, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return compute(out, [len(out)])


@wrong("there_and_back", "return a tensor like x")
def returns_nothing(*args):
    travels(*args)


@wrong("there_and_back", "dist.get_rank\\(\\) is the rank in the world", "failed")
def rank_of_the_world(x, chosen, weights, owner, compute, group):
    """The rank in the world, in a smaller group."""
    return of_the_world(travels, x, chosen, weights, owner, compute, group)


def of_the_world(function, *args):
    """Call a function that asks for its rank in the world instead of the group."""
    real = dist.get_rank
    dist.get_rank = lambda group=None: real()
    try:
        return function(*args)
    finally:
        dist.get_rank = real


@wrong("there_and_back", ".", "your code raised|timed out")
def silent_without_tokens(x, *rest):
    """A rank without tokens takes no part."""
    return travels(x, *rest) if len(x) else x.clone()


# ---- keep ----


def kept(
    chosen, weights, count, capacity, group, sort=lambda w: w.argsort(descending=True, stable=True), fits=None,
    dtype=torch.float64, whole_of=None, back=True, own=None, pad=0, room=lambda capacity, ranks: capacity,
):  # fmt: skip
    """What the answers below share. The arguments: what one does in another way."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    both = torch.stack([chosen.flatten().to(dtype), weights.flatten().to(dtype)])
    numbers, whole = (whole_of or gathered)(both, group, pad)
    order = sort(whole[1])
    ordered = whole[0, order].long()
    place = F.one_hot(ordered, count).cumsum(0).gather(1, ordered[:, None])[:, 0]
    found = torch.empty(len(order), dtype=torch.bool)
    limit = room(capacity, ranks)
    fitting = (fits or (lambda place, limit: place <= limit))(place, limit)
    if back:
        found[order] = fitting
    else:
        found = fitting
    if own:
        return own(found, numbers, rank).view_as(chosen)
    return found.split(numbers)[rank].view_as(chosen)


def gathered(both, group, pad):
    ranks = dist.get_world_size(group)
    number = torch.tensor([both.shape[1]])
    numbers = [torch.empty_like(number) for _ in range(ranks)]
    dist.all_gather(numbers, number, group=group)
    numbers = [int(n) for n in numbers]
    padded = F.pad(both, (0, max(numbers) - both.shape[1]), value=pad)
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return numbers, torch.cat([part[:, :n] for part, n in zip(parts, numbers)], 1)


def alone(both, group, pad):
    """Only this rank's own choices."""
    numbers = [0] * dist.get_world_size(group)
    numbers[dist.get_rank(group)] = both.shape[1]
    return numbers, both


@right("keep")
def padded_with_zeros(*args):
    return kept(*args)


@right("keep")
def padded_with_nan(*args):
    return kept(*args, pad=float("nan"))


@right("keep")
def sorted_in_python(*args):
    def sort(weights):
        values = weights.tolist()
        return torch.tensor(sorted(range(len(values)), key=lambda i: (-values[i], i)), dtype=torch.int64)

    return kept(*args, sort=sort)


@right("keep")
def by_comparing_all_pairs(chosen, weights, count, capacity, group):
    """A choice is kept if fewer than `capacity` of its expert come before it."""
    both = torch.stack([chosen.flatten().double(), weights.flatten()])
    numbers, whole = gathered(both, group, 0)
    place = torch.arange(whole.shape[1])
    same = whole[0][:, None] == whole[0]
    before = (whole[1] > whole[1][:, None]) | ((whole[1] == whole[1][:, None]) & (place < place[:, None]))
    found = (same & before).sum(1) < capacity
    return found.split(numbers)[dist.get_rank(group)].view_as(chosen)


@right("keep")
def with_a_threshold_for_each_expert(chosen, weights, count, capacity, group):
    """Expert by expert, in two all-gathers of different dtypes."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    number = torch.tensor(len(chosen))
    numbers = [torch.empty_like(number) for _ in range(ranks)]
    dist.all_gather(numbers, number, group=group)
    most, k = max(int(n) for n in numbers), chosen.shape[1]

    def all_of(values, fill):
        padded = torch.full((most, k), fill, dtype=values.dtype)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        return torch.stack(parts)

    experts_of, weights_of = all_of(chosen, -1), all_of(weights, -1.0)
    found = torch.zeros_like(experts_of, dtype=torch.bool)
    for number in range(count):
        places = (experts_of == number).nonzero().tolist()
        places.sort(key=lambda place: -weights_of[tuple(place)].item())
        for place in places[:capacity]:
            found[tuple(place)] = True
    return found[rank, : len(chosen)]


@right("keep")
def candidates_only(chosen, weights, count, capacity, group):
    """Each rank sends only what its own experts' capacity would keep; others are dropped."""
    mine = kept(chosen, weights, count, capacity, group, whole_of=alone).flatten()
    both = torch.stack([chosen.flatten().double(), weights.flatten()])[:, mine]
    numbers, whole = gathered(both, group, 0)
    order = whole[1].argsort(descending=True, stable=True)
    ordered = whole[0, order].long()
    place = F.one_hot(ordered, count).cumsum(0).gather(1, ordered[:, None])[:, 0]
    found = torch.empty(len(order), dtype=torch.bool)
    found[order] = place <= capacity
    result = torch.zeros(chosen.numel(), dtype=torch.bool)
    result[mine] = found.split(numbers)[dist.get_rank(group)]
    return result.view_as(chosen)


@right("keep")
def broadcasts_its_choices(chosen, weights, count, capacity, group):
    """Each rank is the source of a broadcast of its own choices."""

    def whole_of(both, group, pad):
        ranks, parts = dist.get_process_group_ranks(group), []
        for source in ranks:
            number = torch.tensor([both.shape[1]])
            dist.broadcast(number, source, group=group)
            part = both.clone() if source == dist.get_rank() else both.new_empty(2, int(number))
            dist.broadcast(part, source, group=group)
            parts.append(part)
        return [part.shape[1] for part in parts], torch.cat(parts, 1)

    return kept(chosen, weights, count, capacity, group, whole_of=whole_of)


def dropped(name, pattern, status="failed", **change):
    def answer(*args):
        return kept(*args, **change)

    wrong("keep", pattern, status)(named(name, answer))


def by_place(weights):
    return torch.arange(len(weights))


dropped("capacity_of_the_rank", "and not for each rank", whole_of=alone)
dropped("capacity_divided", "divided by the number of ranks. But", whole_of=alone, room=lambda c, n: c // n)
dropped("capacity_divided_up", "rounded up. But", whole_of=alone, room=lambda c, n: -(-c // n))
dropped("in_order_of_the_tokens", "the first choices in the order of the tokens", sort=by_place)
dropped("in_order_on_each_rank", "in the order of the tokens|the capacity is for the whole batch", whole_of=alone,
        sort=by_place)  # fmt: skip
dropped("smallest_first", "the smallest weights are kept", sort=lambda w: w.argsort(stable=True))
dropped(
    "ties_to_the_last",
    "the last one is kept",
    sort=lambda w: len(w) - 1 - w.flip(0).argsort(descending=True, stable=True),
)
dropped("one_too_few", "one choice too few", fits=lambda place, limit: place < limit)
dropped("one_too_many", "one choice too many", fits=lambda place, limit: place <= limit + 1)
dropped("from_zero", "one choice too many", fits=lambda place, limit: place - 1 <= limit)
dropped("upside_down", "True is for choices that are kept", fits=lambda place, limit: place > limit)
dropped("not_sorted_back", "not brought back into their order", back=False)
dropped("in_float32", "keep them in float64", dtype=torch.float32)
dropped("without_the_last_bits", "these weights are neighbours in float64",
        sort=lambda w: (w.contiguous().view(torch.int64) >> 4).argsort(descending=True, stable=True))  # fmt: skip
dropped("not_stable", "the sort by weight is not stable", sort=lambda w: w.argsort(descending=True))
dropped("divided_by_the_ranks", "the capacity was divided by the number of ranks. It", room=lambda c, n: c // n)
dropped("times_the_ranks", "the capacity was multiplied", room=lambda c, n: c * n)


def one_key(name, key):
    """A sort by one number made of expert and weight."""

    def answer(*args):
        def whole_of(both, group, pad):
            numbers, whole = gathered(both, group, pad)
            return numbers, torch.stack([whole[0], -key(*whole)])

        return kept(*args, whole_of=whole_of)

    wrong("keep", "these weights are neighbours in float64")(named(name, answer))


one_key("key_of_expert_and_share", lambda experts, w: experts * 2 - w / max([1.0, *w.tolist()]))
one_key("key_of_expert_and_weight", lambda experts, w: experts * 2 - w)
one_key("key_of_expert_and_half", lambda experts, w: experts + (1 - w) / 2)


@wrong("keep", "the sort by expert is not stable")
def second_sort_not_stable(*args):
    def whole_of(both, group, pad):
        numbers, whole = gathered(both, group, pad)
        order = whole[1].argsort(descending=True, stable=True)
        order = order[whole[0, order].long().argsort()]
        places = torch.empty_like(whole[1])
        places[order] = -torch.arange(len(order), dtype=torch.float64)
        return numbers, torch.stack([whole[0], places])

    return kept(*args, whole_of=whole_of)


@wrong("keep", "the experts no longer match the weights")
def sorts_the_chosen(chosen, *rest):
    return kept(chosen.sort(1).values, *rest)


@wrong("keep", "the weights were divided by their sum")
def compares_shares(chosen, weights, *rest):
    return kept(chosen, weights / weights.sum(1, keepdim=True), *rest)


@wrong("keep", "a threshold is not enough")
def all_above_a_threshold(*args):
    def fits(place, limit):
        return place <= limit

    def whole_of(both, group, pad):
        found.append(gathered(both, group, pad))
        return found[-1]

    found, (chosen, weights, _, capacity, _) = [], args
    kept(*args, whole_of=whole_of, fits=fits)
    experts_of, weights_of = found[0][1]
    result = torch.zeros_like(chosen, dtype=torch.bool)
    for number in experts_of.unique() if capacity else []:
        values = weights_of[experts_of == number]
        result |= (chosen == number) & (weights >= values.topk(min(capacity, len(values))).values[-1])
    return result


@wrong("keep", "topk may take any of equal weights")
def takes_topk(*args):
    def own(_, numbers, rank):
        experts_of, weights_of = found[0][1]
        result = torch.zeros(len(experts_of), dtype=torch.bool)
        for number in experts_of.unique():
            places = (experts_of == number).nonzero()[:, 0]
            result[places[weights_of[places].topk(min(args[3], len(places))).indices]] = True
        return result.split(numbers)[rank]

    def whole_of(both, group, pad):
        found.append(gathered(both, group, pad))
        return found[-1]

    found = []
    return kept(*args, whole_of=whole_of, own=own)


def in_order_of(name, pattern, keys):
    """Of equal weights, those with the smallest key come first."""

    def answer(chosen, weights, count, capacity, group):
        def whole_of(both, group, pad):
            found.append(gathered(both, group, pad))
            return found[-1]

        def sort(values):
            numbers = found[0][0]
            key = torch.cat([keys(torch.arange(n), rank, dist.get_rank(group), chosen.shape[1])
                             for rank, n in enumerate(numbers)])  # fmt: skip
            order = key.argsort(stable=True)
            return order[values[order].argsort(descending=True, stable=True)]

        found = []
        return kept(chosen, weights, count, capacity, group, whole_of=whole_of, sort=sort)

    wrong("keep", pattern)(named(name, answer))


in_order_of("own_tokens_first", "this rank's own tokens come first here",
            lambda choices, rank, me, k: torch.full_like(choices, rank != me))  # fmt: skip
in_order_of("tokens_interleaved", "are interleaved here", lambda choices, rank, me, k: choices // k)
in_order_of("choices_interleaved", "are interleaved here", lambda choices, rank, me, k: choices)


@wrong("keep", "dist.get_rank\\(\\) is the rank in the world", "failed")
def keeps_by_the_rank_of_the_world(*args):
    return of_the_world(kept, *args)


dropped("first_rows", "first rows of the batch", own=lambda found, numbers, rank: found[: numbers[rank]])
dropped("at_least_one", "a capacity of 0|capacity, which may be 0", fits=lambda place, limit: place <= max(1, limit))
dropped("zero_is_no_limit", "a capacity of 0", fits=lambda place, limit: place <= (limit or len(place)))
dropped("keeps_all", "all choices are kept", fits=lambda place, limit: place > 0)
dropped("keeps_none", "no choice is kept", fits=lambda place, limit: place < 0)


@wrong("keep", "rank 0 come first: sort the choices of all ranks together")
def sorted_on_each_rank(chosen, weights, count, capacity, group):
    order = weights.flatten().argsort(descending=True, stable=True)
    both = torch.stack([chosen.flatten().double(), weights.flatten()])[:, order]
    numbers, whole = gathered(both, group, 0)
    ordered = whole[0].long()
    place = F.one_hot(ordered, count).cumsum(0).gather(1, ordered[:, None])[:, 0]
    found = torch.empty(len(order), dtype=torch.bool)
    found[order] = (place <= capacity).split(numbers)[dist.get_rank(group)]
    return found.view_as(chosen)


@wrong("keep", "padding")
def padding_takes_room(chosen, weights, count, capacity, group):
    """Padding of expert 0 with the weight 0 is sorted along."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    both = torch.stack([chosen.flatten().double(), weights.flatten()])
    most = torch.tensor(both.shape[1])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    padded = F.pad(both, (0, int(most) - both.shape[1]))
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat(parts, 1)
    order = whole[1].argsort(descending=True, stable=True)
    ordered = whole[0, order].long()
    place = F.one_hot(ordered, count).cumsum(0).gather(1, ordered[:, None])[:, 0]
    found = torch.empty(len(order), dtype=torch.bool)
    found[order] = place <= capacity
    return found.split(int(most))[rank][: both.shape[1]].view_as(chosen) if most else torch.empty_like(chosen).bool()


@wrong("keep", "capacity of all experts together|each expert keeps")
def one_room_for_all(chosen, weights, count, capacity, group):
    return kept(torch.zeros_like(chosen), weights, count, capacity * count, group)


@wrong("keep", "a token's first choice does not come before")
def first_choices_first(chosen, weights, count, capacity, group):
    k = chosen.shape[1]

    def sort(values):
        first = values.argsort(descending=True, stable=True)
        return first[(first % k).argsort(stable=True)]

    return kept(chosen, weights, count, capacity, group, sort=sort)


@wrong("keep", "may lose others: decide for each choice")
def all_or_nothing(chosen, *rest):
    return kept(chosen, *rest).all(1, keepdim=True).expand_as(chosen).clone()


@wrong("keep", "even if others of it are kept: decide for each choice")
def tokens_that_have_a_place(chosen, *rest):
    return kept(chosen, *rest).any(1, keepdim=True).expand_as(chosen).clone()


@wrong("keep", "pickled")
def gathers_objects(chosen, weights, count, capacity, group):
    def whole_of(both, group, pad):
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, both, group=group)
        return [part.shape[1] for part in parts], torch.cat(parts, 1)

    return kept(chosen, weights, count, capacity, group, whole_of=whole_of)


@wrong("keep", "two numbers per choice are enough")
def sends_a_number_for_each_expert(chosen, weights, count, capacity, group):
    wide = torch.zeros(chosen.numel(), count + 2, dtype=torch.float64)
    number = torch.tensor([len(wide)])
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    padded = F.pad(wide, (0, 0, 0, int(number) - len(wide)))
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return kept(chosen, weights, count, capacity, group)


@wrong("keep", "pass group=group")
def numbers_of_the_world(chosen, weights, count, capacity, group):
    def whole_of(both, group, pad):
        number = torch.tensor([both.shape[1]])
        numbers = [torch.empty_like(number) for _ in range(dist.get_world_size())]
        dist.all_gather(numbers, number)
        ranks = dist.get_process_group_ranks(group)
        numbers = [int(numbers[rank]) for rank in ranks]
        padded = F.pad(both, (0, max(numbers) - both.shape[1]))
        parts = [torch.empty_like(padded) for _ in ranks]
        dist.all_gather(parts, padded, group=group)
        return numbers, torch.cat([part[:, :n] for part, n in zip(parts, numbers)], 1)

    return kept(chosen, weights, count, capacity, group, whole_of=whole_of)


@wrong("keep", "leave the arguments as they are")
def changes_the_weights_of_dropped(chosen, weights, *rest):
    found = kept(chosen, weights, *rest)
    weights *= found
    return found


@wrong("keep", "a tensor of bool")
def as_numbers(*args):
    return kept(*args).double()


@wrong("keep", "a tensor of bool")
def indices(*args):
    return kept(*args).nonzero()


@wrong("keep", "a tensor of bool")
def nothing_returned(*args):
    kept(*args)


@wrong("keep", "stable=True|each expert keeps|equal weights|weights are equal here|all weights are equal")
def unstable(*args):
    """A sort that brings equal weights into a random order."""

    def sort(weights):
        shuffled = torch.randperm(len(weights))
        return shuffled[weights[shuffled].argsort(descending=True, stable=True)]

    return kept(*args, sort=sort)


# ---- signs, widths, and neighbours in float64 ----


@wrong("there_and_back", "lose their sign")
def takes_sizes_of_weights(x, chosen, weights, *rest):
    return travels(x, chosen, weights.abs(), *rest)


@wrong("keep", "neighbours in float64")
def one_key_for_expert_and_weight(chosen, weights, count, capacity, group):
    """Sorts by expert - weight: for high numbers of experts, neighbours become equal."""
    both = torch.stack([chosen.flatten().double(), weights.flatten()])
    numbers, whole = gathered(both, group, 0)
    order = (whole[0] - whole[1] / (1 + whole[1].abs().max())).argsort(stable=True)
    ordered = whole[0, order].long()
    place = F.one_hot(ordered, count).cumsum(0).gather(1, ordered[:, None])[:, 0]
    found = torch.empty(len(order), dtype=torch.bool)
    found[order] = place <= capacity
    return found.split(numbers)[dist.get_rank(group)].view_as(chosen)


@wrong("keep", "neighbours in float64")
def sorts_square_roots(chosen, weights, *rest):
    return kept(chosen, weights.sqrt(), *rest)
