import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=400, d=32):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.mid = nn.Linear(d, d)
        self.head = nn.Linear(d, v, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.mid(self.emb(ids)).tanh())


def make():
    torch.manual_seed(0)
    m = LM().eval()
    ins = [(torch.randint(0, 400, (2, 6)),) for _ in range(2)]

    def check(model, inputs, outputs):
        if isinstance(model, nn.Module):
            inner = getattr(model, "_orig_mod", model)
            assert inner.emb.weight is inner.head.weight, "tie broken: embedding and head no longer share one parameter"

    return (
        m,
        ins,
        dict(
            kind="tied embedding / output head",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="huggingface/optimum#1326, ROCm/vllm#1213",
            expected="one copy of the weight in memory and in the checkpoint; quantising one side must be reported, not silently untie",
        ),
    )
