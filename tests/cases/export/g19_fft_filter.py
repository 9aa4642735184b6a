import torch
from torch import nn


class Shift(nn.Module):
    """A Fourier layer whose filter is an exact circular shift, so the answer is known."""

    def __init__(self, n=9, by=2):
        super().__init__()
        k = torch.arange(n // 2 + 1, dtype=torch.float64)
        self.register_buffer("w", torch.polar(torch.ones_like(k), -2 * torch.pi * k * by / n).to(torch.complex64))
        self.n = n

    def forward(self, x):
        f = torch.fft.rfft(x, dim=-1)
        y = torch.fft.irfft(f * self.w, n=self.n, dim=-1)
        z = torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho"), s=x.shape[-2:], norm="ortho")
        return y, z, f.abs(), torch.view_as_real(f)


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(b, 4, 9),) for b in (2, 3)]

    def check(model, inputs, outputs):
        n = 9
        j = torch.arange(n, dtype=torch.float64)
        k = torch.arange(n // 2 + 1, dtype=torch.float64)
        ang = 2 * torch.pi * torch.outer(j, k) / n
        for (x,), (y, z, mag, ri) in zip(inputs, outputs):
            assert y.shape == x.shape and (y - x.roll(2, -1)).abs().max() < 1e-4, (
                "filtered signal is not the shifted one (odd length lost?)"
            )
            assert z.shape == x.shape and (z - x).abs().max() < 1e-4, "rfft2/irfft2 round trip"
            re, im = x.double() @ ang.cos(), -(x.double() @ ang.sin())
            assert mag.shape == (x.shape[0], 4, 5) and (mag.double() - (re**2 + im**2).sqrt()).abs().max() < 1e-4, (
                "spectrum"
            )
            assert (ri.double() - torch.stack([re, im], -1)).abs().max() < 1e-4, "sign of the imaginary part"

    return (
        Shift().eval(),
        ins,
        dict(
            kind="rfft/irfft of odd length with a complex weight",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="pytorch/pytorch#188496, pytorch/pytorch#119360",
            expected="run these nodes outside the engine or refuse before building; exporting successfully proves nothing",
        ),
    )
