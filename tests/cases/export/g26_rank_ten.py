import torch
from torch import nn


class WindowShuffle(nn.Module):
    """3-d window partition plus heads: the tensor passes through rank 10 on its way to the matmul."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        b = x.shape[0]
        v = x.view(b, 2, 2, 2, 3, 2, 2, 1, 2, 4)  # b, D/2, 2, H.., 2, W.., ...
        v = v.permute(0, 1, 3, 5, 7, 2, 4, 6, 8, 9)
        v = self.lin(v * 2.0)
        w = v.softmax(-1)
        return v.reshape(b, 8, 24, 4), w.sum((1, 3, 5)), v.amax((2, 4, 6, 8))


def make():
    ins = [((torch.arange(b * 768).view(b, 768).float() * 7919 % 1009),) for b in (1, 3)]

    def check(model, inputs, outputs):
        dims = (2, 2, 2, 3, 2, 2, 1, 2, 4)
        for (x,), (v, s, m) in zip(inputs, outputs):
            b = x.shape[0]
            assert v.shape == (b, 8, 24, 4) and s.shape == (b, 2, 1, 3, 2, 2, 4) and m.shape == (b, 2, 2, 2, 2, 4)
            flat = v.reshape(b, -1)
            new = [dims[k] for k in (0, 2, 4, 6, 1, 3, 5, 7, 8)]
            strides = [384, 192, 96, 32, 16, 8, 8, 4, 1]
            st = [strides[k] for k in (0, 2, 4, 6, 1, 3, 5, 7, 8)]
            top = torch.full((b, 2, 2, 2, 2, 4), -1.0)
            for pos in range(768):  # mixed-radix digits of the destination
                r, src, dig = pos, 0, []
                for size, step in zip(reversed(new), reversed(st)):
                    r, digit = divmod(r, size)
                    src, dig = src + digit * step, [digit] + dig
                assert torch.allclose(flat[:, pos], x[:, src] * 2), f"element {pos} came from the wrong place"
                cell = (slice(None), *dig[::2])
                top[cell] = torch.maximum(top[cell], x[:, src] * 2)
            assert torch.allclose(m, top), "maximum over axes 2, 4, 6, 8"
            assert (s.sum(-1) - 2 * 2 * 2).abs().max() < 1e-3, "reduction over axes 1, 3, 5"

    return (
        WindowShuffle().eval(),
        ins,
        dict(
            kind="rank-10 view/permute/reduce (engines stop at rank 8)",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="pytorch/TensorRT#4608",
            expected="refuse before building, or merge axes; a partition boundary must not carry rank > 8",
        ),
    )
