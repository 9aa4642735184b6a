import torch
import torch.nn.functional as F
from torch import nn


class Resize(nn.Module):
    def forward(self, x):
        return (
            F.interpolate(x, size=(5, 7), mode="bilinear", antialias=True),
            F.interpolate(x, size=(5, 7), mode="bicubic", antialias=True),
            F.interpolate(x, size=(9, 6), mode="bicubic", align_corners=True),
            F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
        )


def taps(n_in, n_out, kernel, reach):
    """Row-normalised antialias weights: samples outside the image are dropped, then the rest rescaled."""
    s = n_in / n_out
    w = torch.zeros(n_out, n_in, dtype=torch.float64)
    for i in range(n_out):
        c = (i + 0.5) * s
        for j in range(n_in):
            w[i, j] = kernel(abs(j + 0.5 - c) / max(s, 1.0), reach)
    return w / w.sum(1, keepdim=True)


def tri(d, _):
    return max(0.0, 1 - d)


def keys(d, a):
    return (
        (a + 2) * d**3 - (a + 3) * d**2 + 1 if d < 1 else a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0
    )


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(1, 2, h, w),) for h, w in ((16, 20), (11, 24), (4, 10))]

    def check(model, inputs, outputs):
        for (x,), (lin, cub, ac, ne) in zip(inputs, outputs):
            h, w = x.shape[2:]
            for name, g, fn, a in (("bilinear", lin, tri, None), ("bicubic", cub, keys, -0.5)):
                ref = taps(h, 5, fn, a) @ x.double() @ taps(w, 7, fn, a).T
                assert g.shape == ref.shape and (g.double() - ref).abs().max() < 2e-4, (
                    f"antialiased {name}: off by {(g.double() - ref).abs().max():.3g}"
                )
            assert (
                ac.shape == (1, 2, 9, 6)
                and (ac[..., 0, 0] - x[..., 0, 0]).abs().max() < 1e-4
                and (ac[..., -1, -1] - x[..., -1, -1]).abs().max() < 1e-4
            ), "align_corners must keep the corners"
            oh, ow = int(h * 1.5), int(w * 1.5)
            pick = lambda n, o: [min(int((i + 0.5) / 1.5), n - 1) for i in range(o)]
            assert ne.shape == (1, 2, oh, ow) and torch.equal(ne, x[:, :, pick(h, oh)][:, :, :, pick(w, ow)]), (
                "nearest-exact"
            )

    return (
        Resize().eval(),
        ins,
        dict(
            kind="antialiased, align_corners and nearest-exact resize with dynamic H/W",
            rtol=1e-3,
            atol=2e-4,
            check=check,
            source_thread="pytorch/pytorch#183546, pytorch/pytorch#177138, microsoft/onnxruntime#25264",
            expected="same border rule (drop and renormalise) and cubic coefficient as eager; smooth test images hide it, noise shows it",
        ),
    )
