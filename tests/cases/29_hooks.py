import torch
from torch import nn

CALLS = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return self.b(self.a(x).relu()) * scale


def make():
    torch.manual_seed(0)
    CALLS.clear()
    m = Net().eval()
    m.register_forward_pre_hook(lambda mod, args, kw: ((args[0] + 1.0,), {**kw, "scale": 2.0}), with_kwargs=True)
    m.register_forward_hook(lambda mod, args, out: {"wrapped": out})
    m.a.register_forward_hook(lambda mod, args, out: out * 3.0)
    m.b.register_forward_pre_hook(lambda mod, args: CALLS.append(len(CALLS)))
    ins = [(torch.randn(2, 8),) for _ in range(3)]

    def check(model, inputs, outputs):
        assert all(isinstance(o, dict) and "wrapped" in o for o in outputs), "top-level forward hook was dropped"

    return (
        m,
        ins,
        dict(
            kind="pre-hooks/hooks that rewrite args, kwargs and outputs, on root and child",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="pytorch/pytorch#117758, pytorch/pytorch#196819, ai-dynamo/aitune CHANGELOG 0.4.0",
            expected="hooks run exactly once per call in the same order; never both inside the graph and around it",
        ),
    )
