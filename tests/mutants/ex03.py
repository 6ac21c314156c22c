"""Exercise 03: averaging gradients."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp_course import lesson03
from mutants import right, wrong

# ---- average_gradients ----


def gradients_of(module):
    given = [parameter.grad for parameter in module.parameters()]
    return [gradient for gradient in given if gradient is not None]


@right("average_gradients")
def in_one_message(module):
    print("averaging ...")
    flat = nn.utils.parameters_to_vector(gradients_of(module))
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient, mean in zip(
        gradients_of(module), flat.split([g.numel() for g in gradients_of(module)])
    ):
        gradient[...] = mean.reshape(gradient.shape)


@right("average_gradients")
def with_offsets_and_a_work(module):
    """Divides before it sums, in a buffer of its own."""
    gradients = gradients_of(module)
    buffer = gradients[0].new_zeros(sum(map(torch.numel, gradients)))
    end = 0
    for gradient in gradients:
        begin, end = end, end + gradient.numel()
        buffer[begin:end] = gradient.ravel() / dist.get_world_size()
    dist.all_reduce(buffer, async_op=True).wait()
    for gradient in reversed(gradients):
        gradient.view(-1).copy_(buffer[-gradient.numel() :])
        buffer = buffer[: -gradient.numel()]


@right("average_gradients")
def as_one_list(module):
    gradients = gradients_of(module)
    dist.all_reduce_coalesced(gradients)
    torch._foreach_div_(gradients, float(dist.get_world_size()))


@right("average_gradients")
def gathers(module):
    flat = torch.cat([gradient.flatten() for gradient in gradients_of(module)])
    of_all = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, flat)
    mean = torch.stack(of_all).mean(dim=0)
    for gradient in gradients_of(module):
        gradient.copy_(mean[: gradient.numel()].view_as(gradient))
        mean = mean[gradient.numel() :]


@wrong("average_gradients", "each gradient is sent alone")
def as_in_the_lesson(module):
    lesson03.average_gradients(module)


@wrong("average_gradients", "each gradient is sent alone")
def divides_before_it_sums(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


@wrong("average_gradients", "got[^$]*2: reduce, broadcast|one tensor, and all-reduce")
def to_rank_zero_and_back(module):
    flat = nn.utils.parameters_to_vector(gradients_of(module))
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)
    for gradient in gradients_of(module):
        gradient.copy_(
            flat[: gradient.numel()].view_as(gradient) / dist.get_world_size()
        )
        flat = flat[gradient.numel() :]


@wrong("average_gradients", "now another tensor: change the given one in place")
def in_new_tensors(module):
    gradients = [p for p in module.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, mean in zip(gradients, flat.split([p.numel() for p in gradients])):
        parameter.grad = mean.view_as(parameter)


@wrong("average_gradients", "now another tensor: change the given one in place")
def in_new_memory(module):
    """As many forum posts have it: vector_to_parameters replaces .data."""
    flat = nn.utils.parameters_to_vector(gradients_of(module))
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    nn.utils.vector_to_parameters(flat, gradients_of(module))


@wrong("average_gradients", "must change only parameter.grad")
def averages_buffers_as_well(module):
    in_one_message(module)
    for buffer in module.buffers():
        buffer += 1


@wrong("average_gradients", "lost digits on their way")
def in_sixteen_bits(module):
    flat = torch.cat([g.flatten() for g in gradients_of(module)]).half()
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient in gradients_of(module):
        gradient.copy_(flat[: gradient.numel()].view_as(gradient))
        flat = flat[gradient.numel() :]


@wrong("average_gradients", "each gradient exactly once|still this rank's own")
def with_the_sizes_of_the_first_call(module, plan=[]):  # noqa: B006
    """Remembers where the gradients are, from one module to the next."""
    plan.extend(gradients_of(module) if not plan else [])
    flat = torch.cat([gradient.flatten() for gradient in plan])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient in plan:
        gradient.copy_(flat[: gradient.numel()].view_as(gradient))
        flat = flat[gradient.numel() :]


@wrong("average_gradients", "each gradient exactly once")
def puts_them_back_in_reverse(module):
    gradients = gradients_of(module)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient in reversed(gradients):
        gradient.copy_(flat[: gradient.numel()].view_as(gradient))
        flat = flat[gradient.numel() :]


@wrong("average_gradients", "sum over the ranks: divide")
def forgets_to_divide(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


@wrong("average_gradients", "divided by the number of ranks twice")
def divides_twice(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@wrong(
    "average_gradients",
    "changes? parameter.grad, and leaves the parameters|must change only parameter.grad",
)
def averages_the_parameters(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size() + 1


@wrong(
    "average_gradients",
    "NoneType[^$]*None without a gradient, as for a frozen",
    status="your code raised",
)
def forgets_frozen_parameters(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("average_gradients", "rank 0's gradient")
def broadcasts(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.broadcast(parameter.grad, src=0)


@wrong("average_gradients", "still this rank's own gradient")
def works_on_a_copy(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


@wrong(
    "average_gradients",
    "do all ranks call the same collectives",
    status="your code raised",
)
def only_rank_zero(module):
    if dist.get_rank() == 0:
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


@wrong("average_gradients", "a loop does not end", status="timed out")
def never_ends(module):
    while True:
        time.sleep(0.1)


@wrong("average_gradients", "sys.exit|left with exit code", status="your code raised")
def leaves(module):
    raise SystemExit(0)


@wrong("average_gradients", "", status="not attempted")
def not_begun(module):
    raise NotImplementedError


# ---- overlapped ----


@right("overlapped")
class CountsForEachParameter(nn.Module):
    """As in the solution; the parts of the wrong ones below."""

    def __init__(self, module, every=1):
        super().__init__()
        self.module, self.every = module, every
        self.calls, self.works = {}, []
        self.begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def begin(self):
        for value in self.module.state_dict().values():
            dist.broadcast(value, 0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_is_ready(self, parameter):
        self.calls[parameter] = self.calls.get(parameter, 0) + 1
        if self.calls[parameter] % self.every == 0:
            self.send(parameter)

    def parts(self):
        return dist.get_world_size() * self.every

    def send(self, parameter):
        parameter.grad /= self.parts()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for work in self.works:
            work.wait()
        self.works.clear()


@right("overlapped")
class CountsForwards(CountsForEachParameter):
    """Knows the last backward by the forward before it, and divides at the end."""

    forwards = 0

    def forward(self, x):
        self.forwards = self.forwards % self.every + 1
        return self.module(x)

    def gradient_is_ready(self, parameter):
        if self.forwards == self.every:
            work = dist.all_reduce(parameter.grad, async_op=True)
            self.works.append((parameter, work))

    def finish_gradient_synchronization(self):
        while self.works:
            parameter, work = self.works.pop()
            work.wait()
            parameter.grad.div_(self.parts())


@right("overlapped")
class AddsUpElsewhere(CountsForEachParameter):
    """Keeps the sum in a tensor of its own, which it sends and copies back."""

    def __init__(self, module, every=1):
        super().__init__(module, every)
        self.sums, self.left = {}, {}

    def gradient_is_ready(self, parameter):
        left = self.left.get(parameter, self.every) - 1
        total = self.sums.setdefault(parameter, torch.zeros_like(parameter.grad))
        total += parameter.grad
        parameter.grad.zero_()
        self.left[parameter] = left or self.every
        if not left:
            print("sending")
            self.works.append(dist.all_reduce(total, async_op=True))

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter, total in self.sums.items():
            parameter.grad.copy_(total / self.parts())
        self.sums.clear()


@wrong("overlapped", "a second backward before the first", status="your code raised")
class TheLessons(lesson03.OverlappedDDP):
    def __init__(self, module, every=1):
        super().__init__(module)


@wrong("overlapped", "must get one gradient per step", status="your code raised")
class TheLessonsBuckets(lesson03.BucketedDDP):
    def __init__(self, module, every=1):
        super().__init__(module, 1e-6)


@wrong("overlapped", "keep the network|before the last backward|a second backward")
class TorchsOwn(nn.parallel.DistributedDataParallel):
    def __init__(self, module, every=1):
        super().__init__(module)

    def finish_gradient_synchronization(self):
        pass


@wrong("overlapped", "before the last backward of the step")
class SendsInEachBackward(CountsForEachParameter):
    def gradient_is_ready(self, parameter):
        self.send(parameter)


@wrong("overlapped", "before the last backward of the step")
class SendsInTheFirst(CountsForEachParameter):
    def gradient_is_ready(self, parameter):
        self.calls[parameter] = self.calls.get(parameter, 0) + 1
        if self.calls[parameter] % self.every == 1 % self.every:
            self.send(parameter)


@wrong("overlapped", "backwards of a step have added up, so divide")
class ForgetsToDivideByEvery(CountsForEachParameter):
    def parts(self):
        return dist.get_world_size()


@wrong(
    "overlapped", "the sum over the ranks, not the mean|divide by the number of ranks"
)
class ForgetsToDivideByTheRanks(CountsForEachParameter):
    def parts(self):
        return self.every


@wrong("overlapped", "the sum over all ranks and backwards")
class Sums(CountsForEachParameter):
    def parts(self):
        return 1


@wrong("overlapped", "once it was complete|number of")
class DividesInEachBackward(CountsForEachParameter):
    """So that the first backward of a step is divided several times."""

    def gradient_is_ready(self, parameter):
        parameter.grad /= self.every
        super().gradient_is_ready(parameter)

    def parts(self):
        return dist.get_world_size()


@wrong("overlapped", "what is left over from")
class CountsOnlyOnce(CountsForEachParameter):
    def gradient_is_ready(self, parameter):
        self.calls[parameter] = self.calls.get(parameter, 0) + 1
        if self.calls[parameter] == self.every:
            self.send(parameter)


@wrong("overlapped", "all-reduced instead of its gradient")
class SendsTheParameter(CountsForEachParameter):
    def send(self, parameter):
        self.works.append(dist.all_reduce(parameter.data, async_op=True))


@wrong("overlapped", "wait for each")
class WaitsForTheLastOne(CountsForEachParameter):
    def finish_gradient_synchronization(self):
        self.works[-1].wait()
        self.works.clear()


@wrong("overlapped", "module.parameters.. gives it once")
class SendsATiedWeightTwice(CountsForEachParameter):
    def __init__(self, module, every=1):
        super().__init__(module, every)
        for _, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is module.last.weight:
                parameter.register_post_accumulate_grad_hook(self.once_more)

    def once_more(self, parameter):
        if self.calls[parameter] % self.every == 0:
            self.send(parameter)


@wrong("overlapped", "weight that two layers share is wrong")
class HooksOnModules(CountsForEachParameter):
    """Sends the gradients of a layer when the layer's own part of backward is over."""

    def __init__(self, module, every=1):
        nn.Module.__init__(self)
        self.module, self.every, self.calls, self.works = module, every, {}, []
        self.begin()
        self.sent = set()
        for layer in module.children():
            layer.register_full_backward_hook(self.layer_is_done)

    def layer_is_done(self, layer, *_):
        self.calls[layer] = self.calls.get(layer, 0) + 1
        if self.calls[layer] % self.every == 0:
            for parameter in layer.parameters():
                if parameter.grad is not None and parameter not in self.sent:
                    self.sent.add(parameter)
                    self.send(parameter)

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self.sent:
                dist.all_reduce(parameter.grad.div_(self.parts()))
        self.sent.clear()


@wrong(
    "overlapped", "register_post_accumulate_grad_hook after", status="your code raised"
)
class HooksTooEarly(CountsForEachParameter):
    def __init__(self, module, every=1):
        nn.Module.__init__(self)
        self.module, self.works = module, []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(
                    lambda gradient, parameter=parameter: dist.all_reduce(
                        parameter.grad
                    )
                )


@wrong("overlapped", "same parameters and buffers: broadcast every parameter")
class DoesNotBroadcast(CountsForEachParameter):
    def begin(self):
        pass


@wrong("overlapped", "same parameters and buffers: broadcast every buffer")
class ForgetsBuffers(CountsForEachParameter):
    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0)


@wrong("overlapped", "the hook waits for its all-reduce")
class WaitsInTheHook(CountsForEachParameter):
    def send(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.parts()


@wrong("overlapped", "start the all-reduce in a hook")
class AveragesAfterwards(CountsForEachParameter):
    def gradient_is_ready(self, parameter):
        pass

    def finish_gradient_synchronization(self):
        lesson03.average_gradients(self.module)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.every


@wrong(
    "overlapped",
    "a frozen parameter cannot have a hook",
    status="your code raised",
)
class HooksFrozenParameters(CountsForEachParameter):
    def __init__(self, module, every=1):
        super().__init__(module, every)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)


@wrong("overlapped", "keep the network: self.module")
class CallsItNet(nn.Module):
    def __init__(self, module, every=1):
        super().__init__()
        self.net = module


@wrong("overlapped", "clear it at the end")
class NeverClears(CountsForEachParameter):
    def finish_gradient_synchronization(self):
        for work in self.works:
            work.wait()


@right("overlapped")
class ForgetsBeforeTheNextStep(NeverClears):
    """Keeps the works until the next step begins, and then drops them."""

    def forward(self, *inputs):
        if len(self.works) and all(work.is_completed() for work in self.works):
            self.works = []
        return super().forward(*inputs)


# ---- bucketed ----


@right("bucketed")
class OurBuckets(lesson03.BucketedDDP):
    pass


@right("bucketed")
class FlatBuffers(nn.Module):
    """Gradients that are views of their buckets, for good."""

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__()
        self.module, self.flat, self.missing, self.works = module, [], [], []
        for value in module.state_dict().values():
            dist.broadcast(value, 0)
        buckets = [[]]
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if sum(p.nbytes for p in buckets[-1]) >= bucket_size_mb * 2**20:
                buckets.append([])
            buckets[-1].append(parameter)
        self.buckets = buckets
        for place, bucket in enumerate(buckets):
            self.flat.append(
                torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
            )
            self.missing.append(len(bucket))
            parts = self.flat[-1].split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts):
                hook = partial(self.is_ready, place, part.view_as(parameter))
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs):
        return self.module(*inputs)

    def is_ready(self, place, view, parameter):
        parameter.grad = view.copy_(parameter.grad)
        self.missing[place] -= 1
        if not self.missing[place]:
            self.flat[place] /= dist.get_world_size()
            self.works.append(dist.all_reduce(self.flat[place], async_op=True))

    def finish_gradient_synchronization(self):
        for work in self.works:
            work.wait()
        self.works, self.missing = [], [len(bucket) for bucket in self.buckets]


@right("bucketed")
class FilledBeforeFull(nn.Module):
    """Buckets that are never over their size, and gradients that are copied back."""

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__()
        self.module, self.sent = module, []
        for value in module.state_dict().values():
            dist.broadcast(value, 0)
        self.buckets, size = [[]], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if self.buckets[-1] and size + parameter.nbytes > bucket_size_mb * 2**20:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            size += parameter.nbytes
        self.ready = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.is_ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def is_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets:
            if parameter in set(bucket) and set(bucket) <= self.ready:
                flat = torch.cat([p.grad.reshape(-1) for p in bucket])
                self.sent.append(
                    (
                        bucket,
                        flat,
                        dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True),
                    )
                )

    def finish_gradient_synchronization(self):
        for bucket, flat, work in self.sent:
            work.wait()
            begin = 0
            for parameter in bucket:
                parameter.grad.copy_(
                    flat[begin : begin + parameter.numel()].view_as(parameter)
                )
                begin += parameter.numel()
        self.sent, self.ready = [], set()


@wrong("bucketed", "send every gradient after it was complete")
class SendsWithTheLastOfItsList(FilledBeforeFull):
    def is_ready(self, parameter):
        for bucket in self.buckets:
            if bucket[-1] is parameter:
                there = [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in bucket
                ]
                flat = torch.cat([gradient.reshape(-1) for gradient in there])
                self.sent.append(
                    (
                        bucket,
                        flat,
                        dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True),
                    )
                )


@wrong("bucketed", "every gradient is sent alone")
class OneByOne(lesson03.OverlappedDDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module)


@wrong("bucketed", "bucket_size_mb is ignored|start the all-reduce in a hook")
class OneForAll(lesson03.BucketedDDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb=1e6)


@wrong("bucketed", "reverse order")
class FillsFromTheFirstLayer(lesson03.BucketedDDP):
    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__(module)
        self.buckets, self.bucket_of, room = [], {}, 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                if room <= 0:
                    self.buckets.append([])
                    room = bucket_size_mb * 2**20
                self.buckets[-1].append(parameter)
                self.bucket_of[parameter] = len(self.buckets) - 1
                room -= parameter.nbytes
        self.missing = [len(bucket) for bucket in self.buckets]


@wrong("bucketed", "copy it back to its own parameter")
class DropsTheLastBucket(lesson03.BucketedDDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb)
        self.missing[-1] += 10**6

    def finish_gradient_synchronization(self):
        self.missing = [0] * len(self.missing)
        super().finish_gradient_synchronization()
        self.missing[-1] += 10**6


@wrong("bucketed", "copy it back to its own parameter")
class ForgetsToPutBack(lesson03.BucketedDDP):
    def finish_gradient_synchronization(self):
        for work, _, _ in self.sent:
            work.wait()
        self.sent.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


@wrong("bucketed", "measured in bytes")
class CountsNumbersForBytes(lesson03.BucketedDDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb * 2)


@wrong("bucketed", "the hook waits for its all-reduce")
class WaitsForEachBucket(lesson03.BucketedDDP):
    def gradient_is_ready(self, parameter):
        before = len(self.sent)
        super().gradient_is_ready(parameter)
        for work, _, _ in self.sent[before:]:
            work.wait()


@wrong(
    "bucketed",
    r"AttributeError[^$]*\(in step 1 of training\)",
    status="your code raised",
)
class DoesNotCountAgain(lesson03.BucketedDDP):
    def gradient_is_ready(self, parameter):
        bucket = next(
            bucket
            for bucket in self.buckets
            if any(parameter is other for other in bucket)
        )
        self.ready = {*getattr(self, "ready", ()), parameter}
        if self.ready.issuperset(bucket):
            flat = (
                torch.cat([other.grad.flatten() for other in bucket])
                / dist.get_world_size()
            )
            self.sent.append((dist.all_reduce(flat, async_op=True), bucket, flat))

    def finish_gradient_synchronization(self):
        for work, bucket, flat in self.sent:
            work.wait()
            for parameter, part in zip(
                bucket, flat.split([other.numel() for other in bucket])
            ):
                parameter.grad.copy_(part.view_as(parameter))
        self.sent.clear()
