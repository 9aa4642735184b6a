import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(10, 10)

    def forward(self, x, /, shift, *extra, gain, mask=None, **more):
        y = self.w(x) * gain + shift
        for e in extra:
            y = y + e
        if mask is not None:
            y = y.masked_fill(~mask, 0.0)
        for k in sorted(more):
            y = y - more[k]
        return y


def make():
    torch.manual_seed(0)
    r = torch.randn
    ins = [
        ((r(3, 10), r(10)), dict(gain=r(3, 1), mask=torch.rand(3, 10) > 0.3)),
        ((r(3, 10), r(10), r(3, 10)), dict(gain=r(3, 1), bias_b=r(10), bias_a=r(10))),
        ((r(3, 10),), dict(shift=r(10), gain=r(3, 1))),
    ]
    return (
        Net().eval(),
        ins,
        dict(
            kind="positional-only + *args + keyword-only + **kwargs, different per call",
            source_thread="pytorch/torchdynamo#1997",
            expected="bind by signature; one graph per call form or a clear 'unsupported', never a mis-bound input",
        ),
    )
