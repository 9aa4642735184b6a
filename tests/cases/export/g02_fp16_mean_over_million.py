import torch
from torch import nn


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.gn = nn.GroupNorm(2, 4, affine=False)
        self.inn = nn.InstanceNorm2d(4)

    def forward(self, x):
        total = x.sum((2, 3)) / (x.shape[2] * x.shape[3])  # a mean spelled as sum / count
        return x.mean((1, 2, 3)), total, self.gn(x)[:, :, ::64, ::64], self.inn(x)[:, :, ::64, ::64]


def make():
    g = torch.Generator().manual_seed(0)
    ins = [(torch.rand(1, 4, s, 512, generator=g) * 2,) for s in (512, 300)]

    def check(model, inputs, outputs):
        for (x,), (m, t, gn, i) in zip(inputs, outputs):
            d = x.double()
            assert (m.double() - d.mean((1, 2, 3))).abs().max() < 5e-3, (
                f"mean of a million values is {m.tolist()}, about 1 expected"
            )
            assert (t.double() - d.mean((2, 3))).abs().max() < 5e-3, f"sum/count gives {t.tolist()}"
            two = d.view(1, 2, -1)
            ref = ((two - two.mean(-1, keepdim=True)) / two.std(-1, unbiased=False, keepdim=True)).view_as(d)[
                :, :, ::64, ::64
            ]
            assert (gn.double() - ref).abs().max() < 2e-2, "GroupNorm over half a million values drifts"
            ch = (d - d.mean((2, 3), keepdim=True)) / d.std((2, 3), unbiased=False, keepdim=True)
            assert (i.double() - ch[:, :, ::64, ::64]).abs().max() < 2e-2, "InstanceNorm over a big plane drifts"

    return (
        Pool().eval(),
        ins,
        dict(
            kind="fp16: sums over >65504 elements overflow or stall",
            dtype="float16",
            rtol=1e-2,
            atol=1e-2,
            check=check,
            source_thread="NVIDIA/TensorRT#2691, pytorch/pytorch#12115",
            expected="accumulate in fp32; sum/count is a sum that does not fit fp16, so the whole island has to stay fp32",
        ),
    )
