import torch
from torch import nn


class Out(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.l1, self.l2 = nn.Linear(d, d), nn.Linear(d, d)
        with torch.no_grad():
            self.l1.weight[3] *= 4000
            self.l1.weight[77] *= 4000
            self.l2.weight[:, 3] = 0
            self.l2.weight[:, 77] = 0

    def forward(self, x):
        return self.l2(self.l1(x))


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(32, 128),) for _ in range(2)]
    return (
        Out().eval(),
        ins,
        dict(
            kind="two outlier activation channels crush per-token int8 activations",
            rtol=1e-3,
            atol=1e-3,
            int8_must_fail=True,
            source_thread="microsoft/onnxruntime#9599, pytorch/executorch#22432",
            expected="the correctness gate rejects int8 dynamic (and names the layer); weight-only int8 may pass; never win on speed alone",
        ),
    )
