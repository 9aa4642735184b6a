import torch
import torch.nn.functional as F
from torch import nn

CASES = [
    (m, p, a)
    for m in ("bilinear", "nearest", "bicubic")
    for p in ("zeros", "border", "reflection")
    for a in (True, False)
]


class Warp(nn.Module):
    """Sample exactly on pixel centres, some outside the picture, so all modes share one known answer."""

    def forward(self, x, rows, cols):
        h, w = x.shape[2], x.shape[3]
        outs = []
        for mode, pad, ac in CASES:
            gy, gx = (
                (2 * rows / (h - 1) - 1, 2 * cols / (w - 1) - 1)
                if ac
                else ((2 * rows + 1) / h - 1, (2 * cols + 1) / w - 1)
            )
            outs.append(F.grid_sample(x, torch.stack([gx, gy], -1), mode=mode, padding_mode=pad, align_corners=ac))
        half = F.grid_sample(x, torch.stack([(2 * cols + 2) / w - 1, (2 * rows + 1) / h - 1], -1), align_corners=False)
        return tuple(outs), half


def fold(i, n, pad, ac):
    if pad == "border":
        return min(max(i, 0), n - 1)
    if pad == "zeros":
        return i if 0 <= i < n else None
    period = 2 * (n - 1) if ac else 2 * n  # about the centre or about the edge of the border pixel
    i %= period
    return (period - i if i > n - 1 else i) if ac else (period - 1 - i if i > n - 1 else i)


def make():
    g = torch.Generator().manual_seed(0)
    ins = []
    for n, h, w in ((2, 9, 17), (3, 5, 9)):  # powers of two plus one keep the coordinates exact
        r = torch.randint(-4, h + 4, (n, 3, 5), generator=g).float()
        c = torch.randint(-4, w + 4, (n, 3, 5), generator=g).float()
        ins.append((torch.randn(n, 2, h, w, generator=g), r, c))

    def check(model, inputs, outputs):
        for (x, r, c), (outs, half) in zip(inputs, outputs):
            h, w = x.shape[2:]

            def pix(n, i, j, pad, ac):
                i, j = fold(int(i), h, pad, ac), fold(int(j), w, pad, ac)
                return torch.zeros(2) if i is None or j is None else x[n, :, i, j]

            where = [(n, a, b) for n in range(x.shape[0]) for a in range(3) for b in range(5)]
            for (mode, pad, ac), o in zip(CASES, outs):
                err = max(
                    float((o[n, :, a, b] - pix(n, r[n, a, b], c[n, a, b], pad, ac)).abs().max()) for n, a, b in where
                )
                assert err < 2e-3, f"{mode}/{pad}/align_corners={ac}: off by {err:.3g}"
            err = max(
                float(
                    (
                        half[n, :, a, b]
                        - (
                            pix(n, r[n, a, b], c[n, a, b], "zeros", False)
                            + pix(n, r[n, a, b], c[n, a, b] + 1, "zeros", False)
                        )
                        / 2
                    )
                    .abs()
                    .max()
                )
                for n, a, b in where
            )
            assert err < 2e-3, f"half-pixel bilinear with zero padding: off by {err:.3g}"

    return (
        Warp().eval(),
        ins,
        dict(
            kind="grid_sample: 3 modes x 3 paddings x align_corners, points outside",
            rtol=1e-3,
            atol=2e-3,
            check=check,
            source_thread="NVIDIA/TensorRT#4646, microsoft/onnxscript#562",
            expected="each combination checked on its own; an attribute spelled differently between opsets silently changes the mode",
        ),
    )
