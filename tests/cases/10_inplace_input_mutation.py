import torch
from torch import nn


class Scratch(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, table, idx):
        before = x.sum()
        x.mul_(0.5)
        table[idx] = self.l(x)
        table[:, ::2].add_(1.0)
        return before, table.sum(), x + 1


def make():
    torch.manual_seed(0)
    ins = [
        (torch.randn(3, 8), torch.zeros(6, 8), torch.tensor([0, 2, 5])),
        (torch.randn(3, 8), torch.ones(6, 8), torch.tensor([1, 3, 4])),
    ]

    def check(model, inputs, outputs):
        for (x, table, _), (_, tsum, xp1) in zip(inputs, outputs):
            assert torch.allclose(x + 1, xp1, atol=1e-5), "caller's x was not updated in place"
            assert torch.allclose(table.sum(), tsum, atol=1e-3), "caller's table was not updated in place"

    return (
        Scratch().eval(),
        ins,
        dict(
            kind="in-place mutation of inputs (whole, indexed, strided view)",
            source_thread="pytorch/pytorch#138908, pytorch/pytorch#198101",
            check=check,
            expected="mutation visible to the caller once per call; recorded samples are cloned BEFORE the call; benchmarks restore inputs",
        ),
    )
