import torch
from torch import nn

if not hasattr(torch.ops.trapcase, "softsnap"):

    @torch.library.custom_op("trapcase::softsnap", mutates_args=())
    def softsnap(x: torch.Tensor, step: float) -> torch.Tensor:
        return torch.round(x / step) * step + 0.01 * torch.sin(x)

    @softsnap.register_fake
    def _(x, step):
        return torch.empty_like(x)


class Snap(nn.Module):
    """One operator that only torch knows, between two ordinary layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.b(torch.ops.trapcase.softsnap(self.a(x).tanh(), 0.25))


def make():
    torch.manual_seed(0)
    m = Snap().eval()
    ins = [(torch.randn(b, 6),) for b in (2, 5)]

    def check(model, inputs, outputs):
        ref = make()[0]
        for (x,), y in zip(inputs, outputs):
            with torch.no_grad():
                h = (x @ ref.a.weight.T + ref.a.bias).tanh()
                s = (h / 0.25).round() * 0.25 + 0.01 * h.sin()
                want = s @ ref.b.weight.T + ref.b.bias
            assert (y - want).abs().max() < 1e-4, "the custom operator was skipped or replaced"

    return (
        m,
        ins,
        dict(
            kind="custom operator without an ONNX or engine translation",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="pytorch/pytorch#103883",
            expected="a plain reason naming the operator; backends that can fall back run the rest, the others decline",
        ),
    )
