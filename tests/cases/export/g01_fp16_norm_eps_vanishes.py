import torch
from torch import nn


class TinyRms(nn.Module):
    """Root-mean-square norm written out by hand, with the tiny epsilon many BERT-like configs carry."""

    def __init__(self, d=64):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, d))
        self.ln = nn.LayerNorm(d, eps=1e-12)

    def forward(self, x):
        mean_sq = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_sq + 1e-12) * self.gain, self.ln(x)


def make():
    torch.manual_seed(0)
    d = 64
    ins = []
    for k in range(2):
        x = torch.randn(6, d)
        scale = torch.tensor([1.0, 0.0, 2e-4, 300.0, 1e-3, 30.0])[:, None]  # zero row, faint rows, loud row
        ins.append((x.roll(k, 1) * scale,))

    def check(model, inputs, outputs):
        gain = torch.linspace(0.5, 1.5, d)
        for (x,), (r, n) in zip(inputs, outputs):
            r, n = r.float(), n.float()
            assert torch.isfinite(r).all() and torch.isfinite(n).all(), "inf/NaN after a norm of ordinary values"
            live = x.abs().sum(-1) > 0
            rms = (r / gain).pow(2).mean(-1).sqrt()
            assert (rms[live] - 1).abs().max() < 0.02, f"row RMS should be 1, got {rms.tolist()}"
            assert r[~live].abs().max() == 0 and n[~live].abs().max() == 0, "a zero row must stay zero"
            assert (n[live].std(-1, unbiased=False) - 1).abs().max() < 0.02, "LayerNorm row std should be 1"

    return (
        TinyRms(d).eval(),
        ins,
        dict(
            kind="fp16: squares overflow at 300 and eps 1e-12 rounds to zero",
            dtype="float16",
            rtol=2e-2,
            atol=2e-2,
            check=check,
            source_thread="microsoft/onnxruntime#12726, NVIDIA/TensorRT#2564",
            expected="norm statistics stay in fp32, or the fp16 candidate is rejected; a loud row must not become all zeros, a zero row not NaN",
        ),
    )
