"""Question 5: find the bugs in a loop over epochs that accumulates gradients."""

from functools import partial

from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex06.epochs_cases import a_network, draw_case, epochs_of, rate_of
from ddp_course.checks.ex06.epochs_claims import claims
from ddp_course.checks.ex06.no_sync import sent
from ddp_course.checks.ex06.watching import changed, copies_of, follow
from ddp_course.checks.training import a_batch, state
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(train_epochs, case):
    """What a rank has after training, what it has sent, and what one backward sends."""
    with process_group() as (rank, _):
        layer = 8 * case["width"] ** 2  # its bytes
        model = DistributedDataParallel(a_network(case), bucket_cap_mb=1.5 * layer / 2**20)
        for _ in range(2):  # DDP knows the order of the gradients only after its first step
            loss = model(a_batch(2, case["width"], 0)).sum()
            with CheckedWatch() as watch:
                loss.backward()
        model.zero_grad()
        once, events, epochs = sent(watch), follow(model), epochs_of(case, rank)
        batches = sum(epochs, [])
        before = copies_of(batches)
        with CheckedWatch() as watch:
            train_epochs(model, epochs, case["every"], lambda update: rate_of(case, update))
        return {
            "once": once, "sent": sent(watch), "events": events, "changed": changed(batches, before, model),
            "state": state(model.module),
        }  # fmt: skip


@question(
    "Take every=3 and two epochs of 4 micro-batches. Write down, for each micro-batch, whether it is sent, into which "
    "update it goes, and with which learning rate that update is made. What should be there?",
    "What happens to the fourth micro-batch? How many times has `step` grown when the second update is made? And when does "
    "DDP decide whether it sends: in forward, or in backward? (Lesson 6, Break it, 2.)",
    "A micro-batch sends if number % every == 0 or number == len(batches). Divide by the number of micro-batches that this "
    "update has. Forward and backward are both inside of no_sync. step grows by 1 where the parameters change.",
)
def check_train_epochs(answer, draw):
    """Parameters after some epochs are those of one process, and each update has sent the
    gradients once.
    """
    for n, every in ((2, draw.choice([3, 4])), (3, draw.choice([3, 4])), (2, 1)):
        case = draw_case(draw, n, every)
        on_every_rank(partial(claims, case), answer.on_ranks(observe, case, nproc=n))
