import torch
from torch import nn


class Stats(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.l(x)
        return y, y.shape[0], float(y.max()), y.argmax().item() >= 0, "ok", self.calls, y.shape, y.dtype


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(b, 8),) for b in (2, 5, 3)]

    def check(model, inputs, outputs):
        for n, ((x,), o) in enumerate(zip(inputs, outputs), 1):
            assert type(o[1]) is int and o[1] == x.shape[0], f"batch int became {o[1]!r}"
            assert type(o[2]) is float and type(o[3]) is bool and o[4] == "ok"
            assert o[5] == n, f"Python call counter is {o[5]}, want {n}"
            assert isinstance(o[6], torch.Size)

    return (
        Stats().eval(),
        ins,
        dict(
            kind="int/float/bool/str/torch.Size outputs and a Python attribute counter",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="pytorch/pytorch#136179",
            expected="Python leaves re-computed per call, never frozen; else backend rejected",
        ),
    )
