"""Question 3: random states for dropout on a mesh of data ranks and tensor ranks."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex17.dropout_claims import claims
from ddp_course.checks.ex17.places import SEEDS, places_to_try
from ddp_course.checks.ex17.streams import collisions, numbers_of_streams, overlaps
from ddp_course.checks.salted import salted_hash
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

NUMBERS = 64  # of a mask: two are the same by chance once in 2 ** 64


class Planned(Exception):
    """Raised in a block on purpose."""


def mask():
    return "".join(map(str, (F.dropout(torch.ones(NUMBERS)) > 0).int().tolist()))


def observe_masks(kind, seed, shape):
    """The masks on this rank of a mesh, from several runs. shape: (data, tensor) ranks."""
    seen = {}
    with process_group(timeout=5) as (rank, _), salted_hash(rank) as hashed:
        data, tensor = divmod(rank, shape[1])

        def begin(before=0):
            torch.manual_seed(1000 + 7 * rank + before)  # what was drawn before must not matter
            return kind(seed, data, tensor)

        with trying(f"a run on data rank {data}, tensor rank {tensor}"):
            states = begin()
            seen["before"] = mask()
            with states.sharded():
                first = mask()
                more = [mask() for _ in range(1 + tensor)]
            seen["between"] = mask()
            with states.sharded():
                second = mask()
            try:
                with states.sharded():
                    third = mask()
                    raise Planned
            except Planned:
                seen["raised"] = True
            seen["after"] = mask()
            with states.sharded():
                fourth = mask()
        seen["sharded"] = [first, *more, second, third, fourth]
        begin(before=500)
        seen["without"] = [mask(), mask(), mask()]
        states = begin()
        with states.sharded():
            seen["at_once"] = [mask() for _ in seen["sharded"]]
        states = begin()
        with kind((seed + 1) % SEEDS, data, tensor).sharded():
            mask()
        with states.sharded():
            seen["beside"] = mask()
        seen["hashed"] = bool(hashed)
        dist.barrier()
    return seen


@question(
    "Two streams of random numbers per rank: one for the replicated region, which is the default generator, and one for "
    "the sharded region. Which of the three numbers (seed, data rank, tensor rank) may the seed of each depend on?",
    "In __init__, seed the default generator for the sharded region, keep torch.get_rng_state(), and then seed it for the "
    "replicated region. sharded() is a @contextmanager: it exchanges the default generator's state for the kept one, and "
    "exchanges them back in a finally. Each stream needs a seed of its own, below 2 ** 32, and a sum of the numbers is not "
    "one: (1, 2) and (2, 1) have the same sum.",
    "stream = (seed * 64 + data_rank) * 9; torch.manual_seed(stream + 1 + tensor_rank); self.state = "
    "torch.get_rng_state(); torch.manual_seed(stream). sharded: outside = torch.get_rng_state(); "
    "torch.set_rng_state(self.state); try: yield; finally: self.state = torch.get_rng_state(); "
    "torch.set_rng_state(outside).",
)
def check_dropout_states(answer, draw):
    """Masks of the replicated region are the same in a tensor group, those of the sharded
    one differ on all ranks; both regions go on as if the other were not there.
    """
    seed = draw.randrange(SEEDS)
    for shape in [(2, 2), draw.choice([(1, 3), (3, 1)])]:
        of_ranks = answer.on_ranks(observe_masks, seed, shape, nproc=shape[0] * shape[1], timeout=10)
        on_every_rank(partial(claims, f"seed {seed}, {shape[0]} × {shape[1]} ranks (data × tensor)", shape), of_ranks)
    [[streams, repeated]] = answer.on_ranks(numbers_of_streams, places_to_try(seed, draw), timeout=20)
    hold(collisions(streams))
    hold(overlaps(repeated))
