import threading

import torch
from torch import nn


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.act = lambda t: t.clamp_min(0)
        self.lock = threading.Lock()
        self.src = (i for i in range(3))

    def forward(self, x):
        with self.lock:
            return self.act(self.l(x))


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(2, 8),) for _ in range(2)]
    return (
        Held().eval(),
        ins,
        dict(
            kind="module that deepcopy and pickle refuse (lambda, lock, generator)",
            rtol=1e-4,
            atol=1e-5,
            source_thread="pytorch/pytorch#101107",
            expected="tuning works without deepcopy; saving says which attribute blocks it and offers weights + graph only, before hours of tuning, not after",
        ),
    )
