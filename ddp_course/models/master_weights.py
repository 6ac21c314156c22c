"""AdamW for a model in 16 bits, with master weights in 32."""

import torch


class MasterAdamW(torch.optim.AdamW):
    """AdamW that updates fp32 copies of 16-bit weights, the master weights.

    One update is often too small to change a weight of 8 significant bits; the master
    weight adds up such updates. Per parameter, the copy and Adam's two averages take 12
    bytes.
    """

    def __init__(self, parameters, **options):
        self.weights = list(parameters)
        self.master_weights = [weight.detach().float() for weight in self.weights]
        super().__init__(self.master_weights, **options)

    @torch.no_grad()
    def step(self):
        for weight, master in zip(self.weights, self.master_weights):
            master.grad = weight.grad.float()
        super().step()
        for weight, master in zip(self.weights, self.master_weights):
            weight.copy_(master)
            master.grad = None

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None
