import torch
from torch import nn


class Pick(nn.Module):
    """The indices are inputs and may count from the end."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(30.0).view(10, 3))

    def forward(self, x, i, j):
        picked = x[i, :, j]  # separated advanced indices: the index dim moves to the front
        written = x.clone()
        written[:, j] = -1.0
        return self.table[i], x[:, j], picked, x[..., -1], x[-2:, ::2], written


def make():
    torch.manual_seed(0)
    ins = []
    for n in (4, 6):
        x = torch.randn(n, 5, 5)
        ins.append((x, torch.tensor([0, -1, n - 1, -n]), torch.tensor([-1, 2, -5, 4])))

    def check(model, inputs, outputs):
        for (x, i, j), (t, c, p, last, tail, w) in zip(inputs, outputs):
            n, I, J = x.shape[0], i.tolist(), j.tolist()
            assert torch.equal(t, torch.stack([torch.arange(30.0).view(10, 3)[k % 10] for k in I])), (
                "negative row of the constant table"
            )
            assert torch.equal(c, torch.stack([x[:, k % 5] for k in J], 1)), "negative column"
            assert p.shape == (4, 5) and torch.equal(p, torch.stack([x[a % n, :, b % 5] for a, b in zip(I, J)])), (
                "paired negative indices"
            )
            assert torch.equal(last, x[:, :, 4]) and torch.equal(tail, x[n - 2 :, 0:5:2]), "slices from the end"
            hit = sorted({k % 5 for k in J})
            assert (w[:, hit] == -1).all(), "indexed write through a negative index missed"
            rest = [k for k in range(5) if k not in hit]
            assert torch.equal(w[:, rest], x[:, rest]), "indexed write damaged other columns"

    return (
        Pick().eval(),
        ins,
        dict(
            kind="negative indices that arrive at run time",
            check=check,
            rtol=1e-5,
            atol=1e-6,
            source_thread="NVIDIA/TensorRT#1229, pytorch/TensorRT#1274, NVIDIA/TensorRT#4774",
            expected="negative indices wrap as in torch; an engine that clamps or reads zeros must be caught by value",
        ),
    )
