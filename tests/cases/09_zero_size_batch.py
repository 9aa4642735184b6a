import torch
from torch import nn


class Detect(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 12)
        self.s = nn.Linear(12, 3)

    def forward(self, boxes):
        h = self.f(boxes).relu()
        s = self.s(h).softmax(-1)
        return s, h.sum(0), boxes.new_tensor(boxes.shape[0])


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(n, 6),) for n in (4, 0, 1, 7, 0)]
    return (
        Detect().eval(),
        ins,
        dict(
            kind="zero-size batch among ordinary ones",
            source_thread="pytorch/pytorch#183721, pytorch/pytorch#197095",
            expected="empty in -> empty out with right trailing dims/dtype; latency of empty calls not averaged in",
        ),
    )
