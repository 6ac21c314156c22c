"""NaN and infinity: in which step, on which rank, in which layer first."""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError


class NanGuard:
    """Stops all ranks in the same step if one has a NaN or an infinite gradient.

    It looks at the output of each layer, and at the gradient of each parameter before
    the ranks average it, because then all ranks have it. An infinite output alone does
    not stop them: attention masks contain -inf. Raises UsageError before the
    optimizer's step, with the rank and what went wrong first there; layers whose output
    has been infinite before are not taken for the cause. On a mesh, too: of a DTensor,
    each rank looks at its part. Not for fp16 with a GradScaler, which raises the scale
    until gradients overflow, and skips those steps.
    """

    def __init__(self, model, optimizer, timeout=60):
        # of its own: collectives in one group are not confused with those in another
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.step, self.names, self.infinite, self.bad = 0, [], [], []
        self.often_infinite = set()
        model = model.module if isinstance(model, DistributedDataParallel) else model
        for name, layer in model.named_modules():
            if not list(layer.children()):
                layer.register_forward_hook(partial(self.look_at_output, name))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.look_at_gradient, name))
        optimizer.register_step_pre_hook(self.before_step)

    def look_at_output(self, name, layer, inputs, output):
        if torch.is_grad_enabled():
            for part in output if isinstance(output, tuple) else [output]:
                if isinstance(part, torch.Tensor):
                    part = local(part)
                    nan, infinite = part.isnan().any(), part.isinf().any()
                    self.note(f"output of {name}", infinite, bad=nan)

    def look_at_gradient(self, name, gradient):
        bad = ~local(gradient).isfinite().all()
        self.note(f"gradient of {name}", bad, bad)

    def note(self, name, infinite, bad):
        self.names.append(name)
        self.infinite.append(infinite)
        self.bad.append(bad)

    def before_step(self, *_):
        self.step += 1
        first = self.first_fault() if self.names else None
        self.names, self.infinite, self.bad = [], [], []
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, first, self.group)
        found = enumerate(of_ranks)
        places = [f"in the {name} on rank {rank}" for rank, name in found if name]
        if places:
            first = ", and ".join(places)
            raise UsageError(f"NaN or infinity in step {self.step}, first {first}")

    def first_fault(self):
        """What went wrong first on this rank, or None."""
        infinite, bad = torch.stack([*self.infinite, *self.bad]).view(2, -1).tolist()
        unusual = [
            name
            for name, is_infinite, is_bad in zip(self.names, infinite, bad)
            if is_bad or is_infinite and name not in self.often_infinite
        ]
        if any(bad):
            return unusual[0]
        self.often_infinite.update(unusual)


def local(tensor):
    """The part of a DTensor that is on this rank; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
