import torch
from torch import nn


class Streaming(nn.Module):
    """Causal convolution with a rolling window, a slot-addressed cache and a step counter, all buffers."""

    def __init__(self, d=4, k=3, slots=5):
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, k + 1))
        self.register_buffer("win", torch.zeros(1, d, k))
        self.register_buffer("cache", torch.zeros(1, slots, d))
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.win.copy_(torch.cat([self.win[:, :, 1:], x.unsqueeze(-1)], -1))
        slot = self.step % self.cache.shape[1]
        self.cache.index_copy_(1, slot, x.unsqueeze(1))
        self.step += 1
        return (self.win * self.w).sum(-1), self.cache.sum(1), self.step.clone()


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(1, 4).round(decimals=2),) for _ in range(8)]

    def check(model, inputs, outputs):
        xs = [x[0].double() for (x,) in inputs]
        zero = torch.zeros(4, dtype=torch.float64)
        for t, (y, c, n) in enumerate(outputs):
            past = [xs[t - k] if t >= k else zero for k in (2, 1, 0)]
            want = sum(p * w for p, w in zip(past, (1.0, 2.0, 3.0)))
            assert (y[0].double() - want).abs().max() < 1e-4, (
                f"call {t}: rolling window lost (state dropped or written twice)"
            )
            assert (c[0].double() - sum(xs[max(0, t - 4) : t + 1])).abs().max() < 1e-4, f"call {t}: cache slots"
            assert n.tolist() == [t + 1], f"call {t}: counter says {n.tolist()}"

    return (
        Streaming().eval(),
        ins,
        dict(
            kind="three kinds of state: rolling window, index_copy cache, counter",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="pytorch/TensorRT#4459, pytorch/TensorRT#4251, microsoft/onnxruntime-genai#1604",
            expected="state survives between calls and is not disturbed by recording/warm-up, or the module is declined; one call proves nothing",
        ),
    )
