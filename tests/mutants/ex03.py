"""Exercise 03: averaging gradients."""

import time

import torch
import torch.distributed as dist
from ddp_course import lesson03
from torch import nn

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
    for gradient, mean in zip(gradients_of(module), flat.split([g.numel() for g in gradients_of(module)])):
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


@wrong("average_gradients", "needs only their sum: use dist.all_reduce")
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


@wrong("average_gradients", "torch's dispatcher was not told of", status="your code raised")
def asks_the_backend(module):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for gradient in gradients_of(module):
        backend.allreduce([gradient]).wait()
        gradient /= dist.get_world_size()
    in_one_message(module)


@wrong("average_gradients", "each gradient is sent alone")
def divides_before_it_sums(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


@wrong("average_gradients", "a tied weight has two names")
def sends_a_tied_weight_twice(module):
    named = module.named_parameters(remove_duplicate=False)
    gradients = [each.grad for _, each in named if each.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))


@right("average_gradients")
def sends_zeros_for_what_is_frozen(module):
    """As many numbers as there are parameters, some of them for nothing."""
    parameters = list(module.parameters())
    flat = torch.cat([(0 * p if p.grad is None else p.grad).detach().flatten() for p in parameters])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for parameter, mean in zip(parameters, flat.split([p.numel() for p in parameters])):
        if parameter.grad is not None:
            parameter.grad.copy_(mean.view_as(parameter))


@wrong("average_gradients", "until work.wait.. has returned")
def does_not_wait(module):
    flat = torch.cat([gradient.flatten() for gradient in gradients_of(module)])
    work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    for gradient in gradients_of(module):
        gradient.copy_(flat[: gradient.numel()].view_as(gradient))
        flat = flat[gradient.numel() :]


@wrong("average_gradients", "got[^$]*2: reduce, broadcast|one tensor, and all-reduce")
def to_rank_zero_and_back(module):
    flat = nn.utils.parameters_to_vector(gradients_of(module))
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)
    for gradient in gradients_of(module):
        gradient.copy_(flat[: gradient.numel()].view_as(gradient) / dist.get_world_size())
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


@wrong("average_gradients", "lost digits on their way")
def in_a_buffer_of_the_default_dtype(module):
    gradients = gradients_of(module)
    buffer = torch.zeros(sum(map(torch.numel, gradients)))
    for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients])):
        part.copy_(gradient.flatten())
    dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
    for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


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


@wrong("average_gradients", "changes? parameter.grad, and leaves the parameters|must change only parameter.grad")
def averages_the_parameters(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size() + 1


@wrong("average_gradients", "NoneType[^$]*None without a gradient, as for a frozen", status="your code raised")
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


@wrong("average_gradients", "do all ranks call the same collectives", status="your code raised")
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


@wrong("overlapped", "the sum over the ranks, not the mean|divide by the number of ranks")
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


@wrong("overlapped", "must change only parameter.grad")
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


@wrong("overlapped", "register_post_accumulate_grad_hook after", status="your code raised")
class HooksTooEarly(CountsForEachParameter):
    def __init__(self, module, every=1):
        nn.Module.__init__(self)
        self.module, self.works = module, []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, parameter=parameter: dist.all_reduce(parameter.grad))


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


class SendsWhatIsWaiting(CountsForEachParameter):
    """Collects gradients, and sends them when enough of them are ready."""

    enough = 2

    def __init__(self, module, every=1):
        super().__init__(module, every)
        self.waiting = []
        self.trained = sum(p.requires_grad for p in module.parameters())
        self.ready = 0

    def gradient_is_ready(self, parameter):
        self.calls[parameter] = self.calls.get(parameter, 0) + 1
        if self.calls[parameter] % self.every == 0:
            self.ready += 1
            self.waiting.append(parameter)
            if len(self.waiting) >= self.enough or self.ready == self.trained:
                for each in self.waiting:
                    self.send(each)
                self.waiting.clear()

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.ready = 0


@wrong("overlapped", "gradients wait until others are ready")
class SendsAllInTheLastHook(SendsWhatIsWaiting):
    enough = 100


@wrong("overlapped", "gradients wait until others are ready")
class SendsThreeAtATime(SendsWhatIsWaiting):
    enough = 3


@wrong("overlapped", "gradients wait until others are ready")
class SendsOneBucketInTheLastHook(SendsWhatIsWaiting):
    """A single message for all gradients, once the last of them is ready."""

    enough = 100

    def send(self, parameter):
        if parameter is self.waiting[-1]:
            self.flat = torch.cat([p.grad.flatten() for p in self.waiting])
            self.flat /= self.parts()
            self.members = list(self.waiting)
            self.works.append(dist.all_reduce(self.flat, async_op=True))

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.members:
            parameter.grad.copy_(self.flat[: parameter.numel()].view_as(parameter))
            self.flat = self.flat[parameter.numel() :]


@right("overlapped")
class HooksOnGraphNodes(CountsForEachParameter):
    """Hooks on the nodes that add to a gradient, as in the days before
    register_post_accumulate_grad_hook: they run after all hooks of the parameter.
    """

    def __init__(self, module, every=1):
        nn.Module.__init__(self)
        self.module, self.every = module, every
        self.calls, self.works, self.nodes = {}, [], []
        self.begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, p=parameter: self.gradient_is_ready(p))
                self.nodes.append(node)

    def send(self, parameter):
        with torch.no_grad():
            super().send(parameter)


@wrong("overlapped", "lost digits on their way")
class SendsIn32Bits(CountsForEachParameter):
    def send(self, parameter):
        narrow = parameter.grad.float() / self.parts()
        self.works.append((parameter, narrow, dist.all_reduce(narrow, async_op=True)))

    def finish_gradient_synchronization(self):
        for parameter, narrow, work in self.works:
            work.wait()
            parameter.grad.copy_(narrow)
        self.works.clear()


@wrong("overlapped", "a frozen parameter cannot have a hook", status="your code raised")
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
class KeepsErrors(nn.Module):
    """As in the solution; the parts of the wrong ones below."""

    wire = torch.bfloat16

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__()
        self.module, self.sent, self.buckets, self.bucket_of = module, [], [], {}
        for value in module.state_dict().values():
            dist.broadcast(value, 0)
        self.fill(bucket_size_mb * 2**20)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.errors = [0] * len(self.buckets)

    def trained(self):
        return reversed([p for p in self.module.parameters() if p.requires_grad])

    def fill(self, size):
        room = 0
        for parameter in self.trained():
            if room <= 0:
                self.buckets.append([])
                room = size
            self.buckets[-1].append(parameter)
            self.bucket_of[parameter] = len(self.buckets) - 1
            room -= parameter.nbytes
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_is_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if self.missing[index] == 0:
            self.send(index, self.joined(index))

    def joined(self, index):
        gradients = [member.grad.flatten() for member in self.buckets[index]]
        return torch.cat(gradients) / dist.get_world_size()

    def send(self, index, total):
        total = total + self.errors[index]
        message = total.to(self.wire)
        self.errors[index] = total - message
        self.start(index, message)

    def start(self, index, message):
        work = dist.all_reduce(message, async_op=True)
        self.sent.append((index, message, work))

    def mean(self, message):
        return message.float()

    def finish_gradient_synchronization(self):
        for index, message, work in self.sent:
            work.wait()
            bucket = self.buckets[index]
            parts = self.mean(message).split([member.numel() for member in bucket])
            for parameter, part in zip(bucket, parts):
                parameter.grad.copy_(part.view_as(parameter))
        self.begin_again()

    def begin_again(self):
        self.sent.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


@right("bucketed")
class DividesTheSum(KeepsErrors):
    """Keeps the errors of the gradients, not of their n-th part."""

    def joined(self, index):
        return torch.cat([member.grad.flatten() for member in self.buckets[index]])

    def mean(self, message):
        return message.float() / dist.get_world_size()


@right("bucketed")
class ErrorsOfEachParameter(KeepsErrors):
    """Adds the kept error to the gradient itself, one parameter after the other, into
    buckets that are never over their size; new gradients are put in place.
    """

    def fill(self, size):
        self.buckets, used, self.kept = [[]], 0, {}
        for parameter in self.trained():
            if self.buckets[-1] and used + parameter.nbytes > size:
                self.buckets.append([])
                used = 0
            self.buckets[-1].append(parameter)
            used += parameter.nbytes
            self.bucket_of[parameter] = len(self.buckets) - 1
            self.kept[parameter] = torch.zeros_like(parameter, requires_grad=False)
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def send(self, index, _):
        messages = []
        for parameter in self.buckets[index]:
            parameter.grad += self.kept[parameter]
            messages.append(parameter.grad.bfloat16())
            self.kept[parameter] = parameter.grad - messages[-1].float()
        print("bucket", index)
        self.start(index, torch.cat([message.view(-1) for message in messages]))

    def mean(self, message):
        return message.to(torch.float32) / dist.get_world_size()


@wrong("bucketed", "travel in 32 bits")
class TheLessonsOwnBuckets(lesson03.BucketedDDP):
    pass


@wrong("bucketed", "the hook waits for its all-reduce|loses the same digits")
class TorchsWithItsHook(nn.parallel.DistributedDataParallel):
    """torch's compression hook rounds as well, but forgets the errors."""

    def __init__(self, module, bucket_size_mb=25.0):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        super().__init__(module, bucket_cap_mb=bucket_size_mb)
        self.register_comm_hook(None, default_hooks.bf16_compress_hook)

    def finish_gradient_synchronization(self):
        pass


@wrong("bucketed", "every step loses the same digits again")
class ForgetsTheErrors(KeepsErrors):
    def send(self, index, total):
        self.start(index, total.bfloat16())


@wrong("bucketed", "every step loses the same digits again")
class ForgetsThemAfterEachStep(KeepsErrors):
    def begin_again(self):
        super().begin_again()
        self.errors = [0] * len(self.buckets)


@wrong("bucketed", "rounding errors do not cancel|loses the same digits")
class KeepsOnlyTheLastError(KeepsErrors):
    """The error of this gradient alone, without the one that was added to it."""

    def send(self, index, total):
        message = (total + self.errors[index]).bfloat16()
        self.errors[index] = total - total.bfloat16()
        self.start(index, message)


@wrong("bucketed", "rounding errors do not cancel|loses the same digits")
class TheWrongSign(KeepsErrors):
    def send(self, index, total):
        total = total + self.errors[index]
        message = total.bfloat16()
        self.errors[index] = message.float() - total
        self.start(index, message)


@wrong("bucketed", "rounding errors do not cancel|loses the same digits")
class KeepsErrorsInSixteenBits(KeepsErrors):
    """Rounds the difference of two numbers that are already rounded: it is zero."""

    def send(self, index, total):
        total = (total + self.errors[index]).bfloat16()
        self.errors[index] = total - total.bfloat16()
        self.start(index, total)


@wrong("bucketed", "the kept errors have lost digits: keep them in float32")
class StoresErrorsInSixteenBits(KeepsErrors):
    def send(self, index, total):
        super().send(index, total)
        self.errors[index] = self.errors[index].bfloat16()


@wrong("bucketed", "later ones are not|do not cancel|loses the same")
class ErrorOfTheMean(KeepsErrors):
    """Takes the difference to what comes back, the gradients of others among it."""

    def send(self, index, total):
        total = total + self.errors[index]
        self.errors[index] = total
        self.start(index, total.bfloat16())

    def mean(self, message):
        index = next(i for i, other, _ in self.sent if other is message)
        self.errors[index] = self.errors[index] - message.float()
        return message.float()


@wrong("bucketed", "divide in 32 bits|loses the same digits")
class DividesInSixteenBits(DividesTheSum):
    def mean(self, message):
        return (message / dist.get_world_size()).float()


@wrong("bucketed", "float16 cannot hold these numbers")
class TheOtherSixteenBits(KeepsErrors):
    wire = torch.float16


@wrong("bucketed", "it is the sum over the ranks")
class SumsTheBuckets(DividesTheSum):
    def mean(self, message):
        return message.float()


@wrong("bucketed", "every gradient is sent alone")
class OneByOne(KeepsErrors):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, 0)


@wrong("bucketed", "bucket_size_mb is ignored")
class OneForAll(KeepsErrors):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, 1e6)


@wrong("bucketed", "reverse order")
class FillsFromTheFirstLayer(KeepsErrors):
    def trained(self):
        return [p for p in self.module.parameters() if p.requires_grad]


@wrong("bucketed", "in 32 bits, have reached bucket_size_mb")
class CountsTheBytesThatTravel(KeepsErrors):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb * 2)


@wrong("bucketed", "mean was not copied back")
class ForgetsToPutBack(KeepsErrors):
    def finish_gradient_synchronization(self):
        for _, _, work in self.sent:
            work.wait()
        self.begin_again()


@wrong("bucketed", "the hook waits for its all-reduce")
class WaitsForEachBucket(KeepsErrors):
    def start(self, index, message):
        super().start(index, message)
        self.sent[-1][-1].wait()


@wrong("bucketed", "start the all-reduce in a hook")
class SendsAtTheEnd(KeepsErrors):
    def gradient_is_ready(self, parameter):
        pass

    def finish_gradient_synchronization(self):
        for index in range(len(self.buckets)):
            self.send(index, self.joined(index))
        super().finish_gradient_synchronization()


@wrong("bucketed", "full buckets wait: start the all-reduce of a bucket in the hook")
class SendsAllBucketsInTheLastHook(KeepsErrors):
    def gradient_is_ready(self, parameter):
        self.missing[self.bucket_of[parameter]] -= 1
        if not any(self.missing):
            for index in range(len(self.buckets)):
                self.send(index, self.joined(index))


@wrong("bucketed", "full buckets wait: start the all-reduce of a bucket in the hook")
class SendsABucketWhenTheNextIsFull(KeepsErrors):
    """And the last two in the last hook."""

    def gradient_is_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if self.missing[index] == 0 and index > 0:
            self.send(index - 1, self.joined(index - 1))
        if not any(self.missing):
            self.send(index, self.joined(index))


@right("bucketed")
class HooksForEachGroup(KeepsErrors):
    """One hook for all gradients of a bucket, which torch calls after the last one."""

    def fill(self, size):
        super().fill(size)
        self.bucket_of.clear()
        for index, bucket in enumerate(self.buckets):
            nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in bucket]
            for node in nodes:
                node.register_hook(lambda *_, i=index: self.one_is_ready(i))
            self.bucket_of[index] = nodes

    def gradient_is_ready(self, parameter):
        pass

    @torch.no_grad()
    def one_is_ready(self, index):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            self.send(index, self.joined(index))


@wrong("bucketed", "in MiB, which have 2..20 bytes, not 10..6")
class AMillionBytes(KeepsErrors):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb * 10**6 / 2**20)


@wrong("bucketed", "in MiB, which have 2..20 bytes, not 10..6")
class AMillionBytesAndNeverMore(ErrorsOfEachParameter):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, bucket_size_mb * 10**6 / 2**20)


@wrong("bucketed", "NoneType|exactly|complete", status="failed|your code raised")
class SendsWithTheFirstOfItsBucket(KeepsErrors):
    def gradient_is_ready(self, parameter):
        index = self.bucket_of[parameter]
        if self.missing[index] == len(self.buckets[index]):
            self.send(index, self.joined(index))
        self.missing[index] -= 1


@wrong("bucketed", "starts? from the same parameters")
class DoesNotBroadcastAtAll(KeepsErrors):
    def __init__(self, module, bucket_size_mb):
        nn.Module.__init__(self)
        self.module, self.sent, self.buckets, self.bucket_of = module, [], [], {}
        self.fill(bucket_size_mb * 2**20)
        self.errors = [0] * len(self.buckets)
        self.begin_again()


# ---- traffic ----


def buckets_needed(sizes, bucket_size, bytes_of=4):
    buckets, room = 0, 0
    for size in sizes:
        if room <= 0:
            buckets, room = buckets + 1, bucket_size
        room -= bytes_of * size
    return buckets


@right("traffic")
def with_formulas(sizes, bucket_size, world_size):
    buckets, rounds = buckets_needed(sizes[::-1], bucket_size), 2 * (world_size - 1)
    return buckets, buckets * rounds, 4 * sum(sizes) * rounds // world_size


@right("traffic")
def asks_the_lessons_class(sizes, bucket_size, world_size):
    """Builds the buckets, and follows each piece through the ring."""
    network = nn.ParameterList(torch.zeros(size) for size in sizes)
    model = lesson03.BucketedDDP(network, bucket_size / 2**20)
    messages = [
        sum(parameter.nbytes for parameter in bucket) / world_size
        for bucket in model.buckets
        for _ in range(2 * world_size - 2)
    ]
    return torch.tensor([len(model.buckets), len(messages), sum(messages)])


@right("traffic")
def with_numpys_numbers(sizes, bucket_size, world_size):
    import numpy

    buckets, messages, sent = with_formulas(sizes, bucket_size, world_size)
    return numpy.int64(buckets), numpy.int32(messages), numpy.float64(sent)


@wrong("traffic", "begins with the last parameters")
def from_the_first(sizes, bucket_size, world_size):
    return with_formulas(sizes[::-1], bucket_size, world_size)


@wrong("traffic", "the parameter that exceeds it still goes in")
def never_over_the_size(sizes, bucket_size, world_size):
    buckets, used = 1, 0
    for size in reversed(sizes):
        if used and used + 4 * size > bucket_size:
            buckets, used = buckets + 1, 0
        used += 4 * size
    _, _, sent = with_formulas(sizes, bucket_size, world_size)
    return buckets, buckets * 2 * (world_size - 1), sent


@wrong("traffic", "is in bytes, and a float32 has 4")
def buckets_of_numbers(sizes, bucket_size, world_size):
    buckets = buckets_needed(sizes[::-1], bucket_size, bytes_of=1)
    return buckets, *with_formulas(sizes, bucket_size, world_size)[1:]


@wrong("traffic", "never divided between two buckets")
def divides_the_total(sizes, bucket_size, world_size):
    buckets = -(-4 * sum(sizes) // bucket_size)
    return buckets, *with_formulas(sizes, bucket_size, world_size)[1:]


@wrong("traffic", "an all-reduce is not one message")
def one_message_per_bucket(sizes, bucket_size, world_size):
    buckets, _, sent = with_formulas(sizes, bucket_size, world_size)
    return buckets, buckets, sent


@wrong("traffic", "the ring goes round twice")
def once_round(sizes, bucket_size, world_size):
    buckets, messages, sent = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages // 2, sent // 2


@wrong("traffic", "numbers, not bytes")
def in_numbers(sizes, bucket_size, world_size):
    buckets, messages, sent = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages, sent // 4


@wrong("traffic", "each message is one piece, an n-th")
def whole_buckets_go_round(sizes, bucket_size, world_size):
    buckets, messages, _ = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages, 4 * sum(sizes) * 2 * (world_size - 1)


@wrong("traffic", "only one rank's messages count")
def of_all_ranks(sizes, bucket_size, world_size):
    buckets, messages, sent = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages, sent * world_size


@wrong("traffic", "a little less than twice as many")
def about_twice(sizes, bucket_size, world_size):
    buckets, messages, _ = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages, 2 * 4 * sum(sizes)


@wrong("traffic", "return three numbers")
def only_the_bytes(sizes, bucket_size, world_size):
    return with_formulas(sizes, bucket_size, world_size)[2]


@right("traffic")
def in_fractions_of_the_whole(sizes, bucket_size, world_size):
    """As the formula of lesson 2 is written, with its rounding errors."""
    buckets, messages, _ = with_formulas(sizes, bucket_size, world_size)
    return [buckets, messages, 2 * (world_size - 1) / world_size * 4 * sum(sizes)]


@wrong("traffic", "exactly its size is full")
def full_once_it_is_exceeded(sizes, bucket_size, world_size):
    buckets, used = 1, 0
    for size in reversed(sizes):
        if used > bucket_size:
            buckets, used = buckets + 1, 0
        used += 4 * size
    return buckets, *with_formulas(sizes, bucket_size, world_size)[1:]


@wrong("traffic", "a single byte of it is free")
def full_without_room_for_a_number(sizes, bucket_size, world_size):
    buckets, room = 1, bucket_size
    for size in reversed(sizes):
        if room < 4:
            buckets, room = buckets + 1, bucket_size
        room -= 4 * size
    return buckets, *with_formulas(sizes, bucket_size, world_size)[1:]


@wrong("traffic", "no parameter is left")
def begins_one_after_the_last(sizes, bucket_size, world_size):
    buckets, used = 1, 0
    for size in reversed(sizes):
        used += 4 * size
        if used >= bucket_size:
            buckets, used = buckets + 1, 0
    return buckets, *with_formulas(sizes, bucket_size, world_size)[1:]


@wrong("traffic", "holds several parameters")
def one_message_per_gradient(sizes, bucket_size, world_size):
    """What lesson 3's OverlappedDDP would send."""
    rounds = 2 * (world_size - 1)
    sent = 4 * sum(sizes) * rounds // world_size
    return len(sizes), len(sizes) * rounds, sent


@wrong("traffic", "n - 1 times, not n times")
def as_many_steps_as_ranks(sizes, bucket_size, world_size):
    buckets, _, _ = with_formulas(sizes, bucket_size, world_size)
    return buckets, buckets * 2 * world_size, 2 * 4 * sum(sizes)


@wrong("traffic", "n times too many")
def a_tree_instead_of_a_ring(sizes, bucket_size, world_size):
    import math

    buckets, _, _ = with_formulas(sizes, bucket_size, world_size)
    rounds = 2 * math.ceil(math.log2(world_size))
    return buckets, buckets * rounds, 4 * sum(sizes) * rounds


@wrong("traffic", "but a ring sends")
def as_many_bytes_as_gradients(sizes, bucket_size, world_size):
    buckets, messages, _ = with_formulas(sizes, bucket_size, world_size)
    return buckets, messages, 4 * sum(sizes)


@wrong("traffic", "return three numbers")
def prints_them(sizes, bucket_size, world_size):
    print(*with_formulas(sizes, bucket_size, world_size))


@wrong("traffic", "return three numbers")
class HandsInTheLessonsClass(lesson03.BucketedDDP):
    def __init__(self, sizes, bucket_size, world_size):
        super().__init__(nn.ParameterList(torch.zeros(n) for n in sizes), bucket_size)


@wrong("overlapped", "start the all-reduce in a hook")
class HalfAtTheEnd(nn.Module):
    """the first ready gradient is sent at once, the others in finish"""

    def __init__(self, module, every=1):
        super().__init__()
        self.module, self.every, self.works, self.calls, self.later = (module, every, [], {}, [])
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_is_ready(self, parameter):
        self.calls[parameter] = self.calls.get(parameter, 0) + 1
        if self.calls[parameter] % self.every == 0:
            parameter.grad /= dist.get_world_size() * self.every
            if self.works or self.later:
                self.later.append(parameter)
            else:
                self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for p in self.later:
            dist.all_reduce(p.grad)
        for w in self.works:
            w.wait()
        self.works.clear()
        self.later.clear()


@wrong("bucketed", "start the all-reduce in a hook")
class OverlapsOnlyTheFirst(nn.Module):
    """only the first bucket is sent during backward; the others wait for its end"""

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__()
        self.module, self.sent, self.buckets, self.of = module, [], [], {}
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach(), src=0)
        room = 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if room <= 0:
                self.buckets.append([])
                room = bucket_size_mb * 2**20
            self.buckets[-1].append(p)
            self.of[p] = len(self.buckets) - 1
            room -= p.numel() * 4
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.missing = [len(b) for b in self.buckets]
        self.errors = [torch.zeros(sum(p.numel() for p in b)) for b in self.buckets]

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_is_ready(self, parameter):
        i = self.of[parameter]
        self.missing[i] -= 1
        if self.missing[i] == 0 and i == 0:
            self.send(i)

    def send(self, i):
        flat = torch.cat([p.grad.flatten() for p in self.buckets[i]]) / dist.get_world_size() + self.errors[i]
        message = flat.bfloat16()
        self.errors[i] = flat - message.float()
        self.sent.append((self.buckets[i], message, dist.all_reduce(message, async_op=True)))

    def finish_gradient_synchronization(self):
        for i in range(1, len(self.buckets)):
            self.send(i)
        for bucket, message, work in self.sent:
            work.wait()
            for p, piece in zip(bucket, message.float().split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))
        self.sent.clear()
        self.missing = [len(b) for b in self.buckets]


# ---- train_by_hand ----


class ByHand:
    """What the answers below share: all right."""

    def __call__(self, network, batches, learning_rate, max_norm, decay):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.network, self.max_norm, self.decay = network, max_norm, decay
        self.parameters = list(network.parameters())
        self.begin()
        for inputs, targets in batches:
            self.whole = len(inputs)
            self.backward(*self.parts(inputs, targets))
            self.combine()
            self.step(learning_rate)
        self.end()
        return self.averages

    def begin(self):
        self.broadcast()
        self.copy()

    def broadcast(self):
        for tensor in self.network.state_dict().values():
            dist.broadcast(tensor, src=0)

    def copy(self):
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    def parts(self, *tensors):
        return [tensor.tensor_split(self.n)[self.rank] for tensor in tensors]

    def backward(self, x, y):
        (self.share(len(x)) * (self.network(x) - y).pow(2).mean()).backward()

    def share(self, samples):
        return samples / self.whole

    def combine(self):
        self.add_up()
        self.clip()

    def add_up(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)

    def divide(self):
        for parameter in self.parameters:
            parameter.grad /= self.n

    def clip(self):
        nn.utils.clip_grad_norm_(self.parameters, self.max_norm)

    @torch.no_grad()
    def step(self, learning_rate):
        for parameter in self.parameters:
            parameter -= learning_rate * parameter.grad
            parameter.grad = None
        self.follow()

    @torch.no_grad()
    def follow(self):
        for parameter, average in zip(self.parameters, self.averages):
            average.mul_(self.decay).add_((1 - self.decay) * parameter)

    def end(self):
        pass


def by_hand(kind):
    """As a function, which is what the question asks for."""

    def train_by_hand(network, batches, learning_rate, max_norm, decay):
        return kind()(network, batches, learning_rate, max_norm, decay)

    train_by_hand.__name__, train_by_hand.__module__ = kind.__name__, kind.__module__
    return train_by_hand


def right_by_hand(kind):
    right("train_by_hand")(by_hand(kind))
    return kind


def wrong_by_hand(*given, **options):
    def register(kind):
        wrong("train_by_hand", *given, **options)(by_hand(kind))
        return kind

    return register


def with_bugs(*bugs):
    """A repaired program in which some of the given bugs are left."""

    class Rest(ByHand):
        def begin(self):
            if "copy" in bugs:
                self.copy()
                self.broadcast()
            else:
                super().begin()

        def share(self, samples):
            return 1.0 if "mean" in bugs else self.n * samples / self.whole

        def combine(self):
            if "clip" in bugs:
                self.clip()
            self.add_up()
            self.divide()
            if "clip" not in bugs:
                self.clip()

    return Rest


LOCAL, EQUAL, OWN_START = (
    "each rank clips the gradient of its own part",
    "a mean of the ranks' means",
    "had before training",
)


@wrong("train_by_hand", LOCAL)
def train_as_given(network, batches, learning_rate, max_norm, decay):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    averages = [parameter.detach().clone() for parameter in network.parameters()]
    for tensor in [*network.parameters(), *network.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    for inputs, targets in batches:
        x, y = (whole.tensor_split(world_size)[rank] for whole in (inputs, targets))
        loss = (network(x) - y).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        for parameter in network.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        with torch.no_grad():
            for parameter, average in zip(network.parameters(), averages):
                parameter -= learning_rate * parameter.grad
                parameter.grad = None
                average.lerp_(parameter, 1 - decay)
    return averages


@wrong_by_hand(LOCAL)
class ByHandClipsItsOwn(with_bugs("clip")):
    pass


@wrong_by_hand(EQUAL)
class ByHandMeanOfMeans(with_bugs("mean")):
    pass


@wrong_by_hand(OWN_START)
class ByHandAveragesFromItsOwn(with_bugs("copy")):
    pass


@wrong_by_hand(LOCAL)
class ByHandClipsItsOwnMean(with_bugs("clip", "mean")):
    pass


@wrong_by_hand(LOCAL)
class ByHandOnlySharesRepaired(with_bugs("clip", "copy")):
    pass


@wrong_by_hand(EQUAL)
class ByHandOnlyClippingRepaired(with_bugs("mean", "copy")):
    pass


@right_by_hand
class ByHandRepaired(ByHand):
    pass


@right_by_hand
class ByHandSharesThatSumToTheRanks(with_bugs()):
    pass


@right_by_hand
class ByHandSumsOfSquares(ByHand):
    """Every n-th sample; the sum of the squares is divided when all is summed."""

    def parts(self, *tensors):
        return [tensor[self.rank :: self.n] for tensor in tensors]

    def backward(self, x, y):
        loss = (self.network(x) - y).pow(2).sum() / (self.whole * y.shape[1])
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters)):
            parameter.grad = gradient


@right_by_hand
class ByHandWeighsGradientsInOneMessage(ByHand):
    """And clips by itself, without the millionth."""

    def backward(self, x, y):
        (self.network(x) - y).pow(2).mean().backward()
        self.part = len(x)

    def combine(self):
        flat = nn.utils.parameters_to_vector(p.grad for p in self.parameters) * self.part / self.whole
        dist.all_reduce(flat)
        flat *= min(1.0, self.max_norm / flat.norm().item())
        for parameter, mean in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            parameter.grad = mean.view_as(parameter)


@right_by_hand
class ByHandCountsSamplesOnTheWay(ByHand):
    """Sums and samples travel, and are divided afterwards; all-reduces that are waited for."""

    def share(self, samples):
        self.count = torch.tensor(float(samples))
        return samples

    def add_up(self):
        works = [dist.all_reduce(each.grad, async_op=True) for each in self.parameters]
        dist.all_reduce(self.count)
        for work in works:
            work.wait()
        for parameter in self.parameters:
            parameter.grad /= self.count.item()


@right_by_hand
class ByHandBroadcastsAveragesToo(with_bugs("copy")):
    """The copies are made first, and get rank 0's numbers as well."""

    def begin(self):
        super().begin()
        for average in self.averages:
            dist.broadcast(average, src=0)

    def end(self):
        self.averages = tuple(self.averages)


@wrong_by_hand("the shares of the ranks already sum to 1")
class ByHandWeighsAndDivides(ByHand):
    def add_up(self):
        super().add_up()
        self.divide()


@wrong_by_hand("n times too large")
class ByHandSharesOfTheRanksNotDivided(ByHand):
    def share(self, samples):
        return self.n * samples / self.whole


@wrong_by_hand("the sum of the ranks' means")
class ByHandSums(with_bugs("mean")):
    def divide(self):
        pass


@wrong_by_hand("clipped, and divided afterwards")
class ByHandClipsTheSum(with_bugs()):
    def combine(self):
        self.add_up()
        self.clip()
        self.divide()


@wrong_by_hand("is not clipped, though")
class ByHandWithoutClipping(ByHand):
    def clip(self):
        pass


@wrong_by_hand("only ever makes a gradient shorter")
class ByHandNormalises(ByHand):
    def clip(self):
        norm = torch.cat([each.grad.flatten() for each in self.parameters]).norm()
        for parameter in self.parameters:
            parameter.grad *= self.max_norm / norm


@wrong_by_hand("Compare the gradient with that|is not clipped, though")
class ByHandClipsEachParameter(ByHand):
    def clip(self):
        for parameter in self.parameters:
            nn.utils.clip_grad_norm_(parameter, self.max_norm)


@wrong_by_hand("trained from its own parameters")
class ByHandWithoutBroadcast(ByHand):
    def broadcast(self):
        for buffer in self.network.buffers():
            dist.broadcast(buffer, src=0)


@wrong_by_hand("need the buffers of rank 0")
class ByHandWithoutBuffers(ByHand):
    def broadcast(self):
        for parameter in self.network.parameters():
            dist.broadcast(parameter.detach(), src=0)


@wrong_by_hand("take those of after it")
class ByHandAveragesBeforeTheStep(ByHand):
    def step(self, learning_rate):
        self.follow()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= learning_rate * parameter.grad
                parameter.grad = None


@wrong_by_hand("the other way round")
class ByHandSwapsDecay(ByHand):
    def follow(self):
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.averages):
                average.lerp_(parameter, self.decay)


@wrong_by_hand("an average begins as the parameter")
class ByHandAveragesFromZero(ByHand):
    def copy(self):
        self.averages = [torch.zeros_like(parameter) for parameter in self.parameters]


@wrong_by_hand("its own part of a batch only")
class ByHandComputesEverything(ByHand):
    """On all ranks, where sums of equal gradients are divided again."""

    def parts(self, *tensors):
        return tensors

    def share(self, samples):
        return 1 / self.n


@wrong_by_hand("neither samples nor parameters need to travel")
class ByHandSendsParameters(ByHand):
    def follow(self):
        self.broadcast()
        super().follow()


@wrong_by_hand("until work.wait.. has returned")
class ByHandDoesNotWait(ByHand):
    def add_up(self):
        works = [dist.all_reduce(each.grad, async_op=True) for each in self.parameters]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)


@wrong_by_hand("a list with the moving average")
class ByHandReturnsNothing(ByHand):
    def end(self):
        self.averages = None


@wrong_by_hand("Compare the gradient with that")
class ByHandKeepsGradients(ByHand):
    """Those of earlier steps are added up."""

    @torch.no_grad()
    def step(self, learning_rate):
        for parameter in self.parameters:
            parameter -= learning_rate * parameter.grad
        self.follow()
