import torch
from torch import nn


class Denoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(20, 16)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))

    def forward(self, x, t):
        return self.net(x + self.t(t))


class Pipe:
    """Plain object: no nn.Module base, loop count is a call argument."""

    def __init__(self):
        self.unet = Denoise().eval()

    def __call__(self, x, steps):
        hist = []
        for i in reversed(range(steps)):
            x = x - 0.1 * self.unet(x, torch.full((x.shape[0],), i))
            hist.append(x)
        return {"images": x, "steps": steps, "history": hist}


def make():
    torch.manual_seed(0)
    ins = [dict(x=torch.randn(2, 16), steps=s) for s in (1, 4, 9)]
    return (
        Pipe(),
        ins,
        dict(
            kind="pipeline calls the module a different number of times per run",
            targets=["unet"],
            source_thread="pytorch/pytorch#148439, ai-dynamo/aitune CHANGELOG 0.4.0 (deferred JIT)",
            rtol=1e-4,
            atol=1e-5,
            expected="record per call, cap samples per module, do not tune in the middle of a run; all 'history' tensors differ",
        ),
    )
