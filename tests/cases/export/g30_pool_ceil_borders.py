import torch
import torch.nn.functional as F
from torch import nn

CFG = [(3, 2, 1, True, True), (3, 2, 1, True, False), (2, 3, 0, True, True), (3, 3, 1, False, True)]


class Pools(nn.Module):
    def forward(self, x):
        av = tuple(F.avg_pool2d(x, k, s, p, ceil_mode=c, count_include_pad=i) for k, s, p, c, i in CFG)
        mx, at = F.max_pool2d(x, 3, 2, 1, dilation=2, ceil_mode=True, return_indices=True)
        return av, mx, at


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(1, 2, h, w),) for h, w in ((4, 4), (6, 9), (7, 5))]

    def size(n, k, s, p, ceil):
        o = (n + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        return (
            o - 1 if ceil and (o - 1) * s >= n + p else o
        )  # a window must start inside the picture or its left padding

    def check(model, inputs, outputs):
        for (x,), (av, mx, at) in zip(inputs, outputs):
            h, w = x.shape[2:]
            X = x[0].double()
            for (k, s, p, c, inc), g in zip(CFG, av):
                oh, ow = size(h, k, s, p, c), size(w, k, s, p, c)
                assert g.shape == (1, 2, oh, ow), f"avg {k, s, p, c, inc}: {tuple(g.shape)}"
                for i in range(oh):
                    for j in range(ow):
                        a, b = i * s - p, j * s - p
                        win = X[:, max(a, 0) : min(a + k, h), max(b, 0) : min(b + k, w)]
                        n = (min(a + k, h + p) - a) * (min(b + k, w + p) - b) if inc else win[0].numel()
                        assert (g[0, :, i, j].double() - win.sum((1, 2)) / n).abs().max() < 1e-4, (
                            f"avg {k, s, p, c, inc} at {i, j}: wrong divisor"
                        )
            assert (
                mx.shape == at.shape == (1, 2, size(h, 5, 2, 1, True), size(w, 5, 2, 1, True))
                and at.dtype == torch.int64
            )
            for i in range(mx.shape[2]):
                for j in range(mx.shape[3]):
                    win = [
                        r * w + q
                        for r in (2 * i - 1, 2 * i + 1, 2 * i + 3)
                        for q in (2 * j - 1, 2 * j + 1, 2 * j + 3)
                        if 0 <= r < h and 0 <= q < w
                    ]
                    for ch in range(2):
                        best = max(win, key=lambda t: float(x[0, ch].flatten()[t]))
                        assert int(at[0, ch, i, j]) == best and mx[0, ch, i, j] == x[0, ch].flatten()[best], (
                            f"max pool at {i, j}: index is per plane"
                        )

    return (
        Pools().eval(),
        ins,
        dict(
            kind="ceil_mode, count_include_pad, dilated max pool with indices",
            rtol=1e-4,
            atol=1e-5,
            check=check,
            source_thread="pytorch/pytorch#183528, onnx/onnx-tensorrt#663, microsoft/onnxruntime#16203",
            expected="divisor at the right/bottom border as in torch; only sizes that do not divide show it",
        ),
    )
