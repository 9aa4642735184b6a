import torch
from torch import nn


class Scans(nn.Module):
    """Several scans in one graph, over different axes and directions."""

    def forward(self, x, keep):
        down, across = x.cumsum(0), x.cumsum(1)
        back = x.flip(1).cumsum(1).flip(1)
        excl = across - x
        pos = keep.cumsum(-1) - 1  # bool -> int64 running index
        return down, across, back, excl, pos, x.exp().cumsum(1).log()


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(n, m).round(decimals=1), torch.rand(n, m) > 0.4) for n, m in ((4, 2), (3, 7))]

    def check(model, inputs, outputs):
        for (x, keep), o in zip(inputs, outputs):
            R, K = x.double().tolist(), keep.tolist()
            n, m = x.shape
            T = lambda f: torch.tensor([[f(i, j) for j in range(m)] for i in range(n)], dtype=torch.float64)
            want = dict(
                down=T(lambda i, j: sum(R[k][j] for k in range(i + 1))),
                across=T(lambda i, j: sum(R[i][: j + 1])),
                back=T(lambda i, j: sum(R[i][j:])),
                excl=T(lambda i, j: sum(R[i][:j])),
                pos=T(lambda i, j: sum(K[i][: j + 1]) - 1),
            )
            for (name, w), g in zip(want.items(), o):
                assert (g.double() - w).abs().max() < 1e-4, f"{name}: scan over the wrong axis or direction"
            assert o[4].dtype == torch.int64, "integer scan narrowed"
            assert (o[5].double() - x.double().exp().cumsum(1).log()).abs().max() < 1e-4, "log of a running sum"

    return (
        Scans().eval(),
        ins,
        dict(
            kind="cumulative ops over several axes and directions in one graph",
            rtol=1e-4,
            atol=1e-5,
            check=check,
            source_thread="NVIDIA/TensorRT#4551, NVIDIA/TensorRT#4513",
            expected="each scan keeps its own axis/direction; non-square inputs so that a swapped axis shows",
        ),
    )
