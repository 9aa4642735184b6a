import torch
from torch import nn

D, S = 256, 6


class MaskedAttention(nn.Module):
    """Additive mask built with a constant outside fp16, and raw scores outside fp16 before the 1/sqrt(d)."""

    def forward(self, q, k, v, keep):
        s = torch.matmul(q, k.transpose(1, 2)) / D**0.5
        s = s + (1.0 - keep[:, None, :].to(s.dtype)) * -1e12
        p = s.softmax(-1)
        return p, p @ v


def make():
    torch.manual_seed(0)
    ins = []
    for b in (2, 3):
        base = torch.randn(b, 1, D) * 20
        q, k = base + torch.randn(b, S, D) * 0.05, base + torch.randn(b, S, D) * 0.05
        keep = torch.ones(b, S, dtype=torch.int64)
        keep[0, 4:] = 0
        # values exactly representable in fp16, so that only the arithmetic is on trial
        ins.append((q.half().float(), k.half().float(), torch.randn(b, S, 8).half().float(), keep))

    def check(model, inputs, outputs):
        for (q, k, v, keep), (p, y) in zip(inputs, outputs):
            p = p.double()
            assert torch.isfinite(p).all(), "0 * (-1e12 as fp16) or an overflowed score gave NaN"
            assert (p.sum(-1) - 1).abs().max() < 1e-2, "attention rows do not sum to one"
            hidden = (keep == 0)[:, None, :].expand_as(p)
            assert p[hidden].abs().max() < 1e-6, "a masked token got attention"
            s = (q.double() @ k.double().transpose(1, 2) / D**0.5).masked_fill(hidden, float("-inf"))
            ref = s.softmax(-1)
            assert (p - ref).abs().max() < 0.05, f"weights off by {(p - ref).abs().max():.3f}"
            assert (y.double() - ref @ v.double()).abs().max() < 0.1, "mixed values"

    return (
        MaskedAttention().eval(),
        ins,
        dict(
            kind="fp16: mask constant -1e12 and scores of 1e5",
            dtype="float16",
            rtol=5e-2,
            atol=5e-2,
            check=check,
            source_thread="NVIDIA/TensorRT#2466, NVIDIA/TensorRT#3101",
            expected="keep the mask/score island in fp32 or reject fp16; NaN or leaked attention must be caught",
        ),
    )
