"""Question 4: an all-reduce that shares the network between the machines."""

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

KINDS = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "int64": torch.int64, "int32": torch.int32,
}  # fmt: skip
LARGEST = {"float16": 300, "float32": 10**5, "int32": 10**7}  # so that the sum of six ranks is exact; of others, 10**12
TWICE = ("allreduce", "allreduce_coalesced")  # a reduce-scatter and an all-gather


class LinkWatch(CheckedWatch):
    """A CheckedWatch whose log says of each communication which ranks take part."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = len(self.log)
        returned = super().__torch_dispatch__(function, types, args, kwargs)
        for entry in self.log[before:]:
            entry["ranks"] = ranks_of([*args, *(kwargs or {}).values()])
            entry["width"] = max((each.element_size() for each in tensors_in(args)), default=0)
        return returned


def ranks_of(arguments):
    """The ranks of the process group among the arguments of a communication."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except (RuntimeError, TypeError):
                continue  # a reduction, such as SUM
            return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group.group_name))
        if isinstance(argument, str) and argument in map(str, dist.distributed_c10d._world.pg_names.values()):
            return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument))
    return list(range(dist.get_world_size()))


def tensors_in(values):
    """The tensors in nested lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [each for value in values for each in tensors_in(value)] if isinstance(values, list | tuple) else []


def crossing(entry, machine, rank):
    """The bytes that a rank sends to other machines in a communication: in a ring, to the
    next rank of its group; in a send, to the receiver. machine: that of each rank.
    """
    ranks = entry["ranks"]
    if entry["name"] == "send":
        return entry["bytes"] * (machine[ranks[entry["peer"]]] != machine[rank])
    if entry["name"].startswith(("recv", "barrier", "monitored")):
        return 0
    follower = ranks[(ranks.index(rank) + 1) % len(ranks)]
    share = entry["whole"] * (len(ranks) - 1) / len(ranks)
    return share * (1 + (entry["name"] in TWICE)) * (machine[follower] != machine[rank])


def reduced(all_reduce, machine, cases):
    """What the answer makes of each tensor on this rank, and what the rank sends."""
    seen = []
    with process_group() as (rank, n):
        machines = sorted(set(machine))
        of_machine = [[r for r in range(n) if machine[r] == m] for m in machines]
        columns = [list(column) for column in zip(*of_machine)]
        [inside] = [g for r, g in zip(of_machine, [dist.new_group(ranks) for ranks in of_machine]) if rank in r]
        [across] = [g for r, g in zip(columns, [dist.new_group(ranks) for ranks in columns]) if rank in r]
        for case in cases:
            tensor = tensor_of(case, rank)
            dist.barrier()
            with trying(described(case)), LinkWatch() as watch, noting_works() as works:
                returned = all_reduce(tensor, inside, across)
            same = returned is None or isinstance(returned, torch.Tensor)
            across_machines = [entry for entry in watch.log if len({machine[r] for r in entry["ranks"]}) > 1]
            seen.append({
                "got": tensor.clone().contiguous(),
                "returned": None if same else type(returned).__name__,
                "elsewhere": isinstance(returned, torch.Tensor) and returned.data_ptr() != tensor.data_ptr(),
                "sent": float(sum(crossing(entry, machine, rank) for entry in watch.log)),
                "names": [entry["name"] for entry in across_machines],
                "width": max((entry["width"] for entry in across_machines), default=0),
                "world": any(len(entry["ranks"]) == n for entry in watch.log if not entry["name"].startswith("barrier")),
                "forgotten": sum(not work.waited for work in works),
            })  # fmt: skip
            dist.barrier()
    return seen


def tensor_of(case, rank):
    """This rank's tensor: whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(case["seed"] + rank)
    most, shape, view = LARGEST.get(case["kind"], 10**12), case["shape"], case["view"]
    tensor = torch.randint(-most, most + 1, shape, generator=generator).to(KINDS[case["kind"]])
    if view == "transposed" or view == "of each rank" and rank % 2:
        return tensor.T.contiguous().T
    if view == "of each rank":
        return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]
    return tensor


VIEWS = {
    None: "", "transposed": ", which is a transposed view",
    "of each rank": ", which is a transposed view on odd ranks, and every second number of a larger one on even ranks",
}  # fmt: skip


def described(case):
    words = f"a tensor of shape {tuple(case['shape'])}, {case['kind']}"
    return words + VIEWS[case["view"]]


@question(
    "In the lesson's hierarchy, one leader per machine sends everything, and the network cards of the other ranks have "
    "nothing to do. Which part of the sum does each rank of a machine need to send, if they divide the work?",
    "Three steps: a reduce-scatter inside the machine gives each rank the sum of one n-th; an all-reduce across the "
    "machines adds up these parts; an all-gather inside the machine puts them together. If n does not divide the number of "
    "elements, append zeros first. Copy the result into the given tensor.",
    "n = dist.get_world_size(inside); flat = F.pad(tensor.reshape(-1), (0, -tensor.numel() % n)); part = "
    "torch.empty_like(flat[: len(flat) // n]); dist.reduce_scatter_tensor(part, flat, group=inside); "
    "dist.all_reduce(part, group=across); dist.all_gather_into_tensor(flat, part, group=inside); "
    "tensor.copy_(flat[: tensor.numel()].view_as(tensor)).",
)
def check_all_reduce(answer, draw):
    """On three machines with two ranks each, and on two with three, whose ranks are dealt
    like cards: the sum, and the bytes that each rank sends to the other machines.
    """
    for machines, n in [(3, 2), (2, 3)]:
        machine = [place // n if n == 2 else place % machines for place in range(machines * n)]
        cases = cases_of(draw, n, machines)
        of_ranks = answer.on_ranks(reduced, machine, cases, nproc=machines * n, timeout=15)
        for number, case in enumerate(cases):
            totals = sum(tensor_of(case, rank) for rank in range(machines * n)).contiguous()
            on_every_rank(claims(case, totals, machine, n), [seen[number] for seen in of_ranks])


def cases_of(draw, n, machines):
    """Tensors with a number of elements that n divides and does not, tiny ones, and one
    that is not contiguous.
    """
    size = n * machines * draw.randrange(20, 40)
    shapes = [[size], [size + 1], [draw.randrange(9, 15), n * 12 + 1], [1], [7, 5], [size + 1], [size + 1]]
    kinds = ["float32", *draw.sample(["float64", "float16", "int64", "int32"], 4)]
    kinds += [kinds[1], "float32"]  # of that size, one of that kind again, and another
    views, cases = {2: "transposed", 4: "of each rank"}, []
    for place, (shape, kind) in enumerate(zip(shapes, kinds)):
        cases.append({"shape": shape, "kind": kind, "view": views.get(place), "seed": draw.randrange(10**6)})
    return cases


def claims(case, total, machine, n):
    """That each rank has the sum, in the given tensor, and sends its share at most."""
    machines, size = len(set(machine)), total.numel()
    layout = f"{machines} machines with {n} ranks each (machine of each rank: {machine}), {described(case)}"
    padded = -(-size // (n * machines)) * n * machines
    most = 2 * (machines - 1) / machines * padded * total.element_size() / n
    whole = 2 * (machines - 1) / machines * size * total.element_size()

    def of_rank(rank, of_ranks):
        seen = of_ranks[rank]
        yield Claim(
            layout, seen["returned"], None, "change the given tensor in place, and return nothing, or this tensor",
        )  # fmt: skip
        yield Claim(
            f"{layout}: operations without a wait()", seen["forgotten"], 0,
            "async_op=True only starts an operation: wait for the work that it returns",
        )  # fmt: skip
        mates = [r for r in range(len(machine)) if machine[r] == machine[rank]]
        column = mates.index(rank)
        parts = lambda ranks: sum(tensor_of(case, r) for r in ranks).contiguous()  # noqa: E731
        mistakes = lambda: [  # noqa: E731
            (tensor_of(case, rank).contiguous(), in_place_or_not(seen)),
            (parts(mates), "this is the sum over the ranks of this machine: the other machines are missing"),
            (parts([r for r in range(len(machine)) if place_of(r, machine) == column]),
             "this is the sum over one rank per machine: the other ranks of each machine are missing"),
            (total * n, "each part was added up twice: once inside the machine is enough"),
            (total * machines, "each part was added up too often: once across the machines is enough"),
            (total / (n * machines) if total.is_floating_point() else None, "this is the mean: the sum is asked for"),
        ]  # fmt: skip
        yield Claim(
            layout, seen["got"], total, lambda: cause_of(seen, total), mistakes, digits=14,
        )  # fmt: skip
        yield Claim(
            f"{layout}: bytes from this rank to other machines", seen["sent"], Between(0, most + 0.5),
            lambda: cause_of_bytes(seen, total.element_size(), whole),
            told=f"at most {most:,.0f}", shown=f"{seen['sent']:,.0f} ({', '.join(seen['names'])[:80]})",
        )  # fmt: skip

    return of_rank


def place_of(rank, machine):
    """The place of a rank among those of its machine."""
    return [r for r in range(len(machine)) if machine[r] == machine[rank]].index(rank)


def in_place_or_not(seen):
    if seen["elsewhere"]:
        return "the given tensor is unchanged: copy the result into it, tensor.copy_(...)"
    return (
        "the given tensor is unchanged: reshape(-1) and F.pad may make a copy, so write the result back, tensor.copy_()"
    )


def cause_of(seen, total):
    got = seen["got"]
    if got.shape != total.shape or got.dtype != total.dtype:
        return "the tensor keeps its shape and its dtype"
    if (got.double() - total.double()).abs().max() < 0.01 * total.double().abs().max():
        return "digits are lost: send and add up in the tensor's own dtype"
    if (got == total).double().mean() > 0.3:
        return (
            "a part of the numbers is right: are all parts put together, in the order of the ranks, without the zeros?"
        )
    return (
        "are the parts in the right places? The order of reshape(-1) is not that of memory where a view is transposed"
    )


def cause_of_bytes(seen, width, whole):
    """Why a rank sends more than its share. width: bytes per number; whole: bytes of an
    all-reduce of the whole tensor across the machines.
    """
    if seen["world"]:
        return "a ring of all ranks leads everything across: use the groups, and go across with one part per rank"
    if seen["width"] > width:
        return "the numbers are sent with more bytes than the tensor has for each: keep its dtype"
    if seen["sent"] > 1.9 * whole:
        return "more than a whole all-reduce goes across: reduce inside the machine first, and send what this rank has of it"
    if sum(name in TWICE for name in seen["names"]) > 1:
        return "this rank takes part in several all-reduces across: one, of its part, is enough"
    if seen["sent"] > 0.98 * whole:
        return "this rank sends the whole tensor across: the n ranks of a machine can each send an n-th of it"
    if "allgather" in seen["names"] and "reduce_scatter" not in seen["names"]:
        return "an all-gather sends each part to every machine, m - 1 times; an all-reduce sends it 2 (m - 1) / m times"
    return "this rank sends more than an n-th of the tensor: pad by less than n elements"
