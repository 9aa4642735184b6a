import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            n = h.float().softmax(-1)
        return self.b(h), n, h.dtype == torch.bfloat16


class Pipe:
    def __init__(self):
        self.net = Block().eval()

    def __call__(self, x, amp):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            y, n, low = self.net(x)
        return y, n, low, str(y.dtype)


def make():
    torch.manual_seed(0)
    ins = [dict(x=torch.randn(4, 32), amp=a) for a in (True, False, True)]
    return (
        Pipe(),
        ins,
        dict(
            kind="same module called under autocast and outside it",
            targets=["net"],
            rtol=2e-2,
            atol=2e-2,
            source_thread="pytorch/pytorch#124901, pytorch/pytorch#112260",
            expected="autocast state is part of the recorded signature and restored when building/benchmarking/comparing",
        ),
    )
