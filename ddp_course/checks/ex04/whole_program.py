"""Question 3: a program for one process, turned into DDP."""

import torch

from ddp_course.checks.ex04.diary import Diary, diary_of, judge_training
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import unwrapped
from ddp_course.ranks.environment import process_group
from ddp_course.school.judge import question


def a_training(train, samples, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(
            1000 + rank
        )  # processes begin with random numbers of their own
        returned = unwrapped(
            train(Diary, Numbered(samples, seed), epochs, batch_size, seed)
        )
        return diary_of(returned)


@question(
    "Three lines are new, and two others change a little: who sees which samples, in which order in each epoch, and who "
    "averages the gradients?",
    "DistributedSampler(train_set) takes the ranks from the process group. A DataLoader has either a sampler or shuffle. "
    "The sampler has to be told in which epoch it is. The model that is called in the loop must be the wrapped one.",
    "model = DistributedDataParallel(make_model()); sampler = DistributedSampler(train_set, seed=seed); DataLoader(..., "
    "sampler=sampler); at the start of each epoch sampler.set_epoch(epoch); at the end return model.module.",
)
def check_train(answer, draw):
    """Ranks that share the samples and end alike, where one process with the joined
    batches would end.
    """
    for n in (2, 3):
        batch_size, steps, epochs, seed = (
            draw.randint(3, 5),
            draw.randint(5, 7),
            3,
            draw.randrange(10**6),
        )
        samples = n * batch_size * steps
        diaries = answer.on_ranks(
            a_training, samples, epochs, batch_size, seed, nproc=n
        )
        checked = f"train with {samples} samples, epochs={epochs}, batch_size={batch_size} on {n} ranks"
        judge_training(checked, diaries, samples, epochs, batch_size, seed)
