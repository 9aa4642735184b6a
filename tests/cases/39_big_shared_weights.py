import torch
from torch import nn


class Albert(nn.Module):
    def __init__(self, d=1024, n=12):
        super().__init__()
        shared = nn.Linear(d, d)
        self.layers = nn.ModuleList([shared] * n)
        self.n = nn.LayerNorm(d)

    def forward(self, x):
        for l in self.layers:
            x = self.n(x + l(x).relu())
        return x


def make():
    torch.manual_seed(0)
    m = Albert().eval()
    ins = [(torch.randn(2, 1024),), (torch.randn(2, 1024),)]

    def check(model, inputs, outputs):
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.Module):
            n = len({id(l.weight) for l in inner.layers})
            assert n == 1, f"{n} copies of the shared weight"

    return (
        m,
        ins,
        dict(
            kind="one 4 MiB layer referenced 12 times",
            check=check,
            rtol=1e-3,
            atol=1e-4,
            max_artifact_mb=8,
            source_thread="pytorch/pytorch#51343, onnx/onnx#3278",
            expected="size counted once (4 MiB, not 50); artifact/checkpoint not multiplied; no extra full copy per tried backend kept alive",
        ),
    )
