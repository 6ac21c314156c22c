"""What the jobs of question 5 compute, right or with faults, in one process."""

from itertools import combinations

import torch
from torch import nn

from ddp_course.checks.training import fill, state

ONE_FOR_ALL = (
    "this rank goes on with rank 0's random state, and draws its dropout masks from here on: save the state of each rank, "
    "and let each rank load its own"
)
CAUSES = {  # of each fault
    "one for all": ONE_FOR_ALL,
    "skips again": "this job has begun in the middle of an epoch, and leaves out as many batches in each later epoch: only "
    "the epoch that was interrupted has batches that are done",
    "counts the job": "the file says how many updates its job has done, and not how many the run has: with a second file, "
    "the position is wrong. Add those that were done before",
    "no velocities": "the velocities start with zeros in this job: they belong into the file, and have to be loaded",
    "no random states": "the dropout masks are not those with which the run would have gone on: save and load the state of "
    "torch's global generator, of each rank",
    "another draw": "more random numbers were drawn from torch's global generator than the masks need, so these masks are "
    "others: draw an order from a generator of its own",
    "order of epoch 0": "each epoch has the order of epoch 0: the seed of the shuffle is the number of the epoch",
    "one batch late": "the job begins one batch too late: the file's count is one too high, or the skip is",
    "one batch early": "the job does the last update of the job before it once more: the file's count is one too low, or "
    "the skip is",
    "from the start": "the job begins with the batch with which the interrupted epoch began: leave out the batches that are "
    "done, in the order of that epoch",
}
PLANTED = ["one for all", "skips again", "counts the job"]


def fault_sets():
    """Those of one fault first."""
    planted = [set(some) for size in (1, 2, 3) for some in combinations(PLANTED, size)]
    others = [{name} for name in CAUSES if name not in PLANTED]
    return planted[:3] + others + planted[3:]


def network_of(case, job):
    """The network with which a job starts: each job has other parameters before it loads."""
    width = case["width"]
    network = nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, width))
    fill(network, case["seed"] + job)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter /= 3
    return network


def batches_of(case, rank):
    generator = torch.Generator().manual_seed(case["seed"] + 100 + rank)
    make = lambda size: torch.randn(size, case["width"], generator=generator, dtype=torch.float64)  # noqa: E731
    return [make(size) for size in case["sizes"]]


def random_seed(case, job, rank):
    """That of torch's global generator, with which a job starts on a rank."""
    return case["seed"] + 10 * job + rank + 1


def simulated(case, faults=frozenset()):
    """What each job gives: a list of {"losses": of each rank, "parameters": the same on all
    ranks}.
    """
    with torch.random.fork_rng(devices=[]):
        jobs, file = [], None
        for job, stop in enumerate(case["stops"]):
            result, file = a_job(case, job, stop, file, faults)
            jobs.append(result)
        return jobs


def a_job(case, job, stop, file, faults):
    """(what it gives, its file)."""
    network, ranks = network_of(case, job), range(case["ranks"])
    batches = [batches_of(case, rank) for rank in ranks]
    velocities = [torch.zeros_like(parameter) for parameter in network.parameters()]
    random, done, losses = [], 0, [[] for _ in ranks]
    for rank in ranks:
        torch.manual_seed(random_seed(case, job, rank))
        random.append(torch.get_rng_state())
    if file:
        network.load_state_dict(file["network"])
        done = file["done"] + ("one batch late" in faults) - ("one batch early" in faults)
        if "no velocities" not in faults:
            velocities = file["velocities"]
        if "no random states" not in faults:
            random = file["random"][:1] * len(ranks) if "one for all" in faults else file["random"]
    number, (epoch, skipped) = len(case["sizes"]), divmod(done, len(case["sizes"]))
    if "from the start" in faults:
        skipped = 0
    while done + len(losses[0]) < stop:
        shuffle = torch.Generator().manual_seed(0 if "order of epoch 0" in faults else epoch)
        order = torch.randperm(number, generator=shuffle).tolist()
        if "another draw" in faults:
            random = [state_after(random[rank], lambda: torch.randperm(number)) for rank in ranks]
        for place in order[skipped:][: stop - done - len(losses[0])]:
            random = update(network, [own[place] for own in batches], velocities, random, losses)
        skipped, epoch = skipped if "skips again" in faults else 0, epoch + 1
    count = len(losses[0]) + (0 if "counts the job" in faults else done)
    kept = {"network": state(network), "velocities": velocities, "random": random, "done": count}
    return {"losses": losses, "parameters": state(network)}, kept


def state_after(random, draw):
    """torch's random state, after something was drawn from it."""
    torch.set_rng_state(random)
    draw()
    return torch.get_rng_state()


def update(network, batches, velocities, random, losses):
    """One update, with a batch of each rank; append its losses; return the random states."""
    after = []
    network.zero_grad()
    for batch, own, lost in zip(batches, random, losses):
        torch.set_rng_state(own)
        loss = network(batch).square().mean()
        (loss / len(batches)).backward()
        lost.append(loss.item())
        after.append(torch.get_rng_state())
    with torch.no_grad():
        for parameter, velocity in zip(network.parameters(), velocities):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter -= 0.02 * velocity
    return after
