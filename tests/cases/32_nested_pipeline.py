from dataclasses import dataclass, field

import torch
from torch import nn


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.l = nn.Embedding(30, 12), nn.Linear(12, 12)

    def forward(self, ids):
        return self.l(self.e(ids)).mean(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(12, 12)

    def forward(self, h, c):
        return torch.tanh(self.l(h) + c)


@dataclass
class Extras:
    heads: dict = field(default_factory=dict)


class Pipeline:
    """Modules sit in attributes, a dict, a list, a dataclass, an inner pipeline; one is shared, one is never run."""

    def __init__(self):
        self.encoders = {"text": Enc().eval(), "alt": Enc().eval()}
        self.blocks = [Block().eval() for _ in range(3)]
        self.blocks.append(self.blocks[0])
        self.extras = Extras({"cls": nn.Linear(12, 3).eval(), "unused": nn.Linear(12, 900).eval()})
        self.inner = None
        self.name = "demo"
        self._self = self

    def __call__(self, ids, use_alt=False):
        c = self.encoders["alt" if use_alt else "text"](ids)
        h = torch.zeros_like(c)
        for b in self.blocks:
            h = b(h, c=c)
        if self.inner is not None:
            h = h + self.inner(ids, use_alt=True)["h"]
        return {"h": h, "y": self.extras.heads["cls"](h)}


def make():
    torch.manual_seed(0)
    p = Pipeline()
    p.inner = Pipeline()
    ins = [dict(ids=torch.randint(0, 30, (2, 5))), dict(ids=torch.randint(0, 30, (2, 5)), use_alt=True)]
    return (
        p,
        ins,
        dict(
            kind="nested pipeline, modules in dict/list/dataclass/inner object, shared + unused module, self reference",
            targets=["encoders.text", "blocks.1", "extras.heads.cls", "inner.blocks.0"],
            rtol=1e-4,
            atol=1e-5,
            source_thread="huggingface/diffusers#5617, ai-dynamo/aitune CHANGELOG 0.2.0",
            expected="all modules found once (no endless recursion), shared one replaced in BOTH places, unused one shown with 0 calls and not tuned",
        ),
    )
