import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.big = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        y = self.big(x) if x.mean() > 0 else self.small(x)
        n = 0
        while y.norm() > 1.0 and n < 10:
            y = y * 0.5
            n += 1
        keep = y[y.abs().sum(-1) > 0.2]
        return y, keep, keep.shape[0]


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(5, 8) + 2,), (torch.randn(5, 8) - 2,), (torch.randn(5, 8) * 0.01,)]
    return (
        Router().eval(),
        ins,
        dict(
            kind="branch, while loop and boolean selection that depend on data",
            source_thread="pytorch/pytorch#93579, pytorch/pytorch#153955",
            rtol=1e-4,
            atol=1e-5,
            expected="AOT/ONNX rejected with the source line; every branch in the data set is checked, not the first sample only; JIT with graph breaks allowed",
        ),
    )
