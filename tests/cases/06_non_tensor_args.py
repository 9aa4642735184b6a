import enum

import torch
from torch import nn


class Act(enum.Enum):
    RELU = 1
    TANH = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, times: int, scale: float, flip: bool, mode: str, act: Act):
        for _ in range(times):
            x = self.l(x)
            x = x.relu() if act is Act.RELU else x.tanh()
        x = x * scale
        if flip:
            x = x.flip(-1)
        return x.mean(0) if mode == "mean" else x.sum(0)


def make():
    torch.manual_seed(0)
    r = torch.randn
    ins = [
        (r(4, 8), 1, 0.5, False, "mean", Act.RELU),
        (r(4, 8), 3, 2.0, True, "sum", Act.TANH),
        (r(4, 8), 1, 0.25, False, "mean", Act.RELU),
    ]
    return (
        Net().eval(),
        ins,
        dict(
            kind="int/float/bool/str/Enum arguments that change between calls",
            source_thread="pytorch/pytorch#136179",
            expected="non-tensor values are part of the signature; a baked constant must never be used for another value",
        ),
    )
