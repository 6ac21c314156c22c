"""Question 1: an update that sends too many messages."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ddp_course.checks.differences import near, parted
from ddp_course.checks.ex16.work import Work
from ddp_course.checks.training import Chain, a_batch, state
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

WIDTH, LAYERS, UPDATES = 10, 6, 2
MOST = 2  # collectives: one for the gradients, one for the losses


def make_model(seed):
    """Some layers of which one is frozen, in 64 bits."""
    model = Chain(WIDTH, LAYERS, seed)
    next(model.parameters()).requires_grad_(False)
    return model


def micro_batches(count, size, seed):
    inputs = [a_batch(size, WIDTH, seed + 10 * place) for place in range(count)]
    labels = [(x.sum(1) * 10).long().abs() % WIDTH for x in inputs]
    return list(zip(inputs, labels))


def make_optimizer(model, n):
    """SGD on two ranks. AdamW on three: there, the mean of updated parameters is not the
    update by the mean gradient, and a gradient of zeros moves parameters.
    """
    if n == 2:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def observed(update, count, size, seed):
    """Two updates of this rank: the parameters and losses, and what the second sent."""
    with process_group() as (rank, n):
        model = make_model(seed)
        optimizer, losses, fetched = make_optimizer(model, n), [], []
        for number in range(UPDATES):
            mine = micro_batches(count, size, seed + 1000 * (rank + 1) + 100 * number)
            fetched.clear()
            with Watch() as watch, Work() as work, trying(f"update {number + 1}"):
                note = lambda *_: fetched.append(work.fetched)
                hook = model.register_forward_pre_hook(note)
                losses.append(as_list(update(model, mine, optimizer)))
                hook.remove()
        dist.barrier()
        return {
            "parameters": flat(model), "losses": losses, "sizes": sizes_of(watch.log),
            "fetched": max(fetched, default=0),
        }  # fmt: skip


def sizes_of(log):
    return [entry["bytes"] for entry in log if entry["name"] != "barrier"]


def as_list(losses):
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError):
        return repr(losses)


def flat(model):
    return torch.cat([value.flatten() for value in state(model).values()])


def alone(n, count, size, seed, scale=1.0, keep=False):
    """One process with the micro-batches of all ranks: its parameters, and losses.

    scale: of the gradients; keep: do not reset them. Both are mistakes that are made.
    """
    model = make_model(seed)
    optimizer, losses = make_optimizer(model, n), []
    for number in range(UPDATES):
        if number == 0 or not keep:
            optimizer.zero_grad()
        of_ranks = [
            micro_batches(count, size, seed + 1000 * (rank + 1) + 100 * number)
            for rank in range(n)
        ]
        means = []
        for parts in zip(*of_ranks):
            each = [F.cross_entropy(model(x), y) for x, y in parts]
            mean = sum(each) / n
            (mean * scale / count).backward()
            means.append(mean.item())
        losses.append(means)
        optimizer.step()
    return flat(model), losses


@question(
    "Write down what an update sends: how many all-reduces, and when? Count them with watch.count_collectives, or look "
    "at the trace. Which of them are needed?",
    "Gradients add up over the micro-batches in .grad by themselves, without any message. So loss.backward() for each "
    "micro-batch, and one average at the end of the update. And many small tensors can travel as one: torch.cat.",
    "After the loop: flat = torch.cat([p.grad.flatten() for p in trained]); dist.all_reduce(flat); divide by world_size "
    "* len(micro_batches), and copy the pieces back with flat.split([...]). Keep each loss.detach() in a list, stack "
    "them, all_reduce the stack once, and call .tolist() at the very end.",
)
def check_update(answer, draw):
    """Parameters and losses are those of one process; collectives are counted."""
    for n in (2, 3):
        case = draw.randint(3, 5), draw.randint(3, 6), draw.randrange(10**5)
        of_ranks = answer.on_ranks(observed, *case, nproc=n, timeout=12)
        for rank, seen in enumerate(of_ranks):
            judge_update(seen, n, *case, f"{rank} of {n}")


def judge_update(seen, n, count, size, seed, where):
    parameters, losses = alone(n, count, size, seed)
    checked = f"{UPDATES} updates of {count} micro-batches on {n} ranks"
    if not near(seen["parameters"], parameters, 1e-9):
        expected, got = parted(parameters, seen["parameters"])
        cause = cause_of_parameters(seen["parameters"], n, count, size, seed)
        raise Wrong(f"{checked}: the parameters", rank=where, expected=expected,
                    got=got, cause=cause)  # fmt: skip
    for of_update, expected in zip(seen["losses"], losses):
        if isinstance(of_update, str) or len(of_update) != count:
            raise Wrong(f"{checked}: the losses", rank=where, expected=f"{count} numbers",
                        got=of_update, cause="return a list with the mean loss of each micro-batch")  # fmt: skip
        got, true = torch.tensor(of_update).double(), torch.tensor(expected).double()
        if not near(got, true, 1e-6):
            cause = "each loss is the mean over the ranks: sum it over them, and divide"
            raise Wrong(f"{checked}: the losses", rank=where, expected=true, got=got, cause=cause)  # fmt: skip
    judge_work(seen, checked, count, where)


def judge_work(seen, checked, count, where):
    sizes, trained = seen["sizes"], LAYERS - 1
    if len(sizes) > MOST:
        cause = cause_of_messages(sizes, count, trained)
        raise Wrong(f"{checked}: how many collectives an update calls", rank=where,
                    expected=f"at most {MOST}", got=len(sizes), cause=cause)  # fmt: skip
    size = trained * WIDTH * WIDTH * 8
    if sum(sizes) > 1.1 * size + 8 * count:
        raise Wrong(f"{checked}: the bytes of the collectives", rank=where,
                    expected=f"about {size:,}: each gradient once", got=f"{sum(sizes):,}",
                    cause="one collective is enough, but it must not hold the gradients of each micro-batch, or of "
                    "frozen parameters")  # fmt: skip
    if seen["fetched"]:
        raise Wrong(f"{checked}: numbers fetched before the last forward", rank=where,
                    expected="0", got=seen["fetched"],
                    cause="item() waits until a GPU has computed everything so far, and then it has nothing to do: fetch "
                    "the losses at the end of the update")  # fmt: skip


def cause_of_messages(sizes, count, trained):
    """The likely cause, from the bytes of the collectives of an update."""
    one = WIDTH * WIDTH * 8
    alone, joined = sizes.count(one), sum(size > 2 * one for size in sizes)
    if alone >= count * trained:
        return "each gradient travels alone, for each micro-batch: add up first, and send once per update"
    if alone >= trained:
        return "the gradients are added up first, but each of them travels alone: put them into one tensor"
    if joined > 1 and len(sizes) >= 2 * count:
        return "gradients and loss travel once per micro-batch: both can wait until the end of the update"
    if joined > 1:
        return "the gradients travel once per micro-batch: add them up, and send them at the end of the update"
    return "the loss travels once per micro-batch: the losses can wait until the end of the update, too"


def cause_of_parameters(got, n, count, size, seed):
    mistakes = [
        ({"scale": n}, "that is the sum over the ranks: divide by their number"),
        ({"scale": count}, "that is the sum over the micro-batches: divide by their number"),
        ({"scale": n * count}, "that is a sum: divide by the number of ranks and of micro-batches"),
        ({"scale": 1 / count}, "divided by the number of micro-batches twice"),
        ({"scale": 1 / n}, "divided by the number of ranks twice"),
        ({"keep": True}, "the gradients of the update before are still there: zero_grad()"),
    ]  # fmt: skip
    for mistake, cause in mistakes:
        if near(got, alone(n, count, size, seed, **mistake)[0], 1e-9):
            return cause
    return "the update must take the mean gradient over all micro-batches of all ranks, as the slow program does"
