import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(50, d)
        self.att = nn.MultiheadAttention(d, 4, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d))

    def forward(self, ids, attention_mask):
        h = self.emb(ids)
        a, _ = self.att(h, h, h, key_padding_mask=attention_mask == 0, need_weights=False)
        h = h + a
        return h + self.ff(h)


def make():
    torch.manual_seed(0)
    ins = []
    for b, s in [(2, 5), (4, 9), (1, 7), (2, 1), (1, 1), (3, 17), (8, 3), (2, 33), (5, 12), (2, 20)]:
        ids = torch.randint(0, 50, (b, s))
        mask = torch.ones(b, s, dtype=torch.long)
        if s > 2:
            mask[:, -1] = 0
        ins.append(dict(ids=ids, attention_mask=mask))
    return (
        Tiny().eval(),
        ins,
        dict(
            kind="batch and sequence length vary, including 1",
            rtol=1e-3,
            atol=1e-4,
            source_thread="pytorch/pytorch#133653, NVIDIA/TensorRT-LLM#6142",
            expected="one dynamic artifact (or profiles) serves all shapes incl. size 1; recompiles are counted and excluded from timing",
        ),
    )
