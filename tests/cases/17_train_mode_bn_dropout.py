import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8, momentum=0.5)
        self.d = nn.Dropout(0.0)

    def forward(self, x):
        return self.d(self.bn(self.c(x)))


def make():
    torch.manual_seed(0)
    m = Net().train()
    ins = [(torch.randn(4, 3, 10, 10) + i,) for i in range(3)]

    def check(model, inputs, outputs):
        if isinstance(model, nn.Module):
            inner = getattr(model, "_orig_mod", model)
            assert inner.training, "tool silently called eval()"
            assert int(inner.bn.num_batches_tracked) == len(outputs), (
                f"running stats advanced {int(inner.bn.num_batches_tracked)}x for {len(outputs)} calls"
            )

    return (
        m,
        ins,
        dict(
            kind="module left in train mode (BatchNorm statistics move)",
            check=check,
            rtol=1e-3,
            atol=1e-4,
            source_thread="pytorch/pytorch#158643",
            expected="warn 'training mode'; same numbers as eager train mode or refuse; profiling must not move running stats",
        ),
    )
