import torch
from torch import nn


class Alias(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x, y):
        return torch.tensor(1.0), x, x.view(-1)[:6], self.l(y), y


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(3, 6), torch.randn(3, 6)) for _ in range(2)]

    def check(model, inputs, outputs):
        for (x, y), o in zip(inputs, outputs):
            assert torch.equal(o[1], x) and torch.equal(o[4], y), "pass-through output has the wrong VALUES"
        x, o = inputs[0][0], outputs[0]
        assert o[1].data_ptr() == x.data_ptr(), "pass-through output is a copy, not the input (aliasing lost)"

    return (
        Alias().eval(),
        ins,
        dict(
            kind="outputs that are an input, a view of an input, a constant",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="pytorch/pytorch#167848, microsoft/onnxruntime#26339",
            expected="values must be right; lost aliasing at least reported",
        ),
    )
