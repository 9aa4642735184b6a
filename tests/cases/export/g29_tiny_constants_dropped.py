import torch
from torch import nn


class Guarded(nn.Module):
    """Safety constants so small that a graph optimiser may take them for 0 or 1."""

    def forward(self, p, x):
        y = x
        for _ in range(200):
            y = y * (1 - 2e-6)  # slow decay: 200 steps make 4e-4
        return torch.log(p + 1e-9), x / (x.norm(dim=-1, keepdim=True) + 1e-8), 1.0 / ((1 - p) + 1e-12), y


def make():
    torch.manual_seed(0)
    ins = []
    for b in (2, 4):
        p = torch.rand(b, 3).round(decimals=2)
        p[0] = torch.tensor([0.0, 1.0, 0.5])
        x = torch.randn(b, 3) * 10
        x[-1] = 0
        ins.append((p, x))

    def check(model, inputs, outputs):
        for (p, x), (lg, unit, inv, y) in zip(inputs, outputs):
            assert all(torch.isfinite(o).all() for o in (lg, unit, inv)), (
                "a guard constant vanished: inf or NaN at p=0, p=1 or x=0"
            )
            assert (lg.double() - (p.double() + 1e-9).log()).abs().max() < 1e-3, "log with floor"
            n = x.double().norm(dim=-1, keepdim=True) + 1e-8
            assert (unit.double() - x.double() / n).abs().max() < 1e-5, "guarded division"
            assert (inv.double() / (1 / ((1 - p).double() + 1e-12)) - 1).abs().max() < 1e-4, "guarded reciprocal"
            want = x.double() * (1 - 2e-6) ** 200
            assert ((y.double() - want).abs() / want.abs().clamp_min(1e-9)).max() < 1e-4, (
                "200 factors of 0.999998 were dropped"
            )

    return (
        Guarded().eval(),
        ins,
        dict(
            kind="epsilons <= 1e-8 and factors within 1e-5 of one",
            rtol=1e-4,
            atol=1e-5,
            check=check,
            source_thread="ROCm/AMDMIGraphX#2659, pytorch/pytorch#86580, tensorflow/tensorflow#52045",
            expected="constants survive the export optimiser; probe zeros/ones, since random inputs never reach the guard",
        ),
    )
