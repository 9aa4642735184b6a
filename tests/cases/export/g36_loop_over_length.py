import torch
from torch import nn


class Leaky(nn.Module):
    """A plain Python loop over the time dimension; its trip count is a dimension of the input."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        h = x.new_zeros(x.shape[1], 4)
        acc, out = x.new_zeros(x.shape[1], 3), []
        for t in range(x.shape[0]):
            acc = 0.5 * acc + x[t]
            h = self.cell(acc, h)
            out.append(h)
        return torch.stack(out), acc, torch.tensor(len(out))


def make():
    torch.manual_seed(0)
    m = Leaky().eval()
    ins = [(torch.randn(t, b, 3),) for t, b in ((5, 2), (8, 2), (2, 3), (1, 2))]

    def check(model, inputs, outputs):
        c = make()[0].cell
        for (x,), (h, acc, n) in zip(inputs, outputs):
            T = x.shape[0]
            assert int(n) == T and h.shape == (T, x.shape[1], 4), (
                f"loop ran {h.shape[0]} times, the input has {T} steps"
            )
            want = sum(x[t].double() * 0.5 ** (T - 1 - t) for t in range(T))
            assert (acc.double() - want).abs().max() < 1e-4, "accumulator stopped early or ran once more"
            s, state = torch.zeros(x.shape[1], 3), torch.zeros(x.shape[1], 4)
            for t in range(T):
                s = s / 2 + x[t]
                with torch.no_grad():
                    i, f, g = (s @ c.weight_ih.T + c.bias_ih).chunk(3, 1)
                    a, b, d = (state @ c.weight_hh.T + c.bias_hh).chunk(3, 1)
                r, z = torch.sigmoid(i + a), torch.sigmoid(f + b)
                state = (1 - z) * torch.tanh(g + r * d) + z * state
                assert (h[t] - state).abs().max() < 1e-4, f"state at step {t}"

    return (
        m,
        ins,
        dict(
            kind="Python loop whose trip count is an input dimension",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="onnx/onnx-tensorrt#891, microsoft/onnxruntime#13894",
            expected="the unrolled graph is valid for one length only: other lengths go elsewhere, never a silent 5-step answer",
        ),
    )
