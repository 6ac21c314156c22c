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
        )  # each process starts with its own random numbers
        returned = unwrapped(
            train(Diary, Numbered(samples, seed), epochs, batch_size, seed)
        )
        return diary_of(returned)


@question(
    "Add three lines, and change two others a little: which rank sees which samples, in which order in each epoch, and "
    "what averages the gradients?",
    "DistributedSampler(train_set) takes the ranks from the process group. A DataLoader has either a sampler or "
    "shuffle. Tell the sampler which epoch it is. Call the wrapped model in the loop.",
    "model = DistributedDataParallel(make_model()); sampler = DistributedSampler(train_set, seed=seed); DataLoader(..., "
    "sampler=sampler); at the start of each epoch sampler.set_epoch(epoch); at the end return model.module.",
)
def check_train(answer, draw):
    """The ranks must divide the samples and end with the parameters of one process on
    the joined batches.
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
