import torch
from torch import nn


class Att(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        s = self.q(x) @ x.transpose(1, 2)
        p = s.masked_fill(~mask[:, None, :], float("-inf")).softmax(-1)
        return p @ self.v(x), p


def make():
    torch.manual_seed(0)
    m = torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])
    ins = [(torch.randn(3, 4, 8), m), (torch.randn(3, 4, 8), m.flip(0))]

    def check(model, inputs, outputs):
        for (_, m), (y, p) in zip(inputs, outputs):
            bad = ~m.any(-1)
            assert torch.isnan(p[bad]).all(), "fully masked rows should be NaN as in eager"
            assert not torch.isnan(p[~bad]).any(), "NaN leaked into valid rows"

    return (
        Att().eval(),
        ins,
        dict(
            kind="all-masked rows give NaN in eager itself",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="NVIDIA/TensorRT#3450",
            expected="NaN at the same places counts as equal (and is reported); NaN elsewhere is a failure",
        ),
    )
