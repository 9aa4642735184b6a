import torch
from torch import nn


class Qat(nn.Module):
    """Quantise-dequantise nodes already in the model: asymmetric activations, per-channel weights on axis 0 and 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.3, 1.7, 24).view(4, 6))
        self.register_buffer("s0", torch.tensor([0.01, 0.02, 0.005, 0.0125]))
        self.register_buffer("s1", torch.tensor([0.25, 0.5, 0.125, 1.0, 0.0625, 0.03125]))
        self.register_buffer("z", torch.zeros(4, dtype=torch.int32))
        self.register_buffer("z1", torch.tensor([3, -5, 0, 7, 1, -1], dtype=torch.int32))

    def forward(self, x):
        xq = torch.fake_quantize_per_tensor_affine(x, 0.25, 10, 0, 255)  # ties at odd multiples of 0.125
        wq = torch.fake_quantize_per_channel_affine(self.w, self.s0, self.z, 0, -128, 127)
        xc = torch.fake_quantize_per_channel_affine(x, self.s1, self.z1, 1, -128, 127)
        return xq, wq, xc, xq @ wq.T


def make():
    g = torch.Generator().manual_seed(0)
    ins = [(torch.randint(-40, 600, (b, 6), generator=g).float() / 8,) for b in (3, 8)]
    ins[0][0][0] = torch.tensor([0.125, 0.375, -0.125, -3.0, 70.0, -0.375])

    def check(model, inputs, outputs):
        s0, s1, z1 = [0.01, 0.02, 0.005, 0.0125], [0.25, 0.5, 0.125, 1.0, 0.0625, 0.03125], [3, -5, 0, 7, 1, -1]
        w = torch.linspace(-1.3, 1.7, 24).view(4, 6).tolist()
        q = lambda v, s, z, lo, hi: (min(max(round(v / s) + z, lo), hi) - z) * s
        wref = torch.tensor([[q(v, s0[r], 0, -128, 127) for v in row] for r, row in enumerate(w)])
        for (x,), (xq, wq, xc, y) in zip(inputs, outputs):
            xref = torch.tensor([[q(v, 0.25, 10, 0, 255) for v in r] for r in x.tolist()])
            assert torch.allclose(xq, xref, atol=1e-6), (
                f"per-tensor: {xq[0].tolist()} (ties to even, zero point 10, range 0..255)"
            )
            assert torch.allclose(wq, wref, atol=1e-4), "per-channel weights, axis 0"
            cref = torch.tensor([[q(v, s1[c], z1[c], -128, 127) for c, v in enumerate(r)] for r in x.tolist()])
            assert torch.allclose(xc, cref, atol=1e-6), "per-channel with zero points, axis 1"
            assert torch.allclose(y, xref @ wref.T, rtol=1e-3, atol=1e-3), "matmul of quantised operands"

    return (
        Qat().eval(),
        ins,
        dict(
            kind="quantise-dequantise nodes with ties, zero points and saturation",
            check=check,
            rtol=1e-3,
            atol=1e-3,
            source_thread="NVIDIA/TensorRT#1374, NVIDIA/TensorRT#1362",
            expected="nodes kept with their scales, axis and rounding, or declined; engines limited to zero point 0 must refuse, not ignore",
        ),
    )
