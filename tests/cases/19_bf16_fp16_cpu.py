import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32).to(torch.bfloat16)
        self.b = nn.Linear(32, 8).to(torch.float16)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        h = self.a(x.to(torch.bfloat16)).relu()
        y = self.b(h.to(torch.float16))
        return h, y, self.n(y.float())


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(4, 32),), (torch.randn(9, 32),)]

    def check(model, inputs, outputs):
        for h, y, z in outputs:
            assert (h.dtype, y.dtype, z.dtype) == (torch.bfloat16, torch.float16, torch.float32), "dtypes changed"

    return (
        Mixed().eval(),
        ins,
        dict(
            kind="bf16 + fp16 + fp32 layers in one model on CPU",
            check=check,
            rtol=2e-2,
            atol=2e-2,
            source_thread="microsoft/onnxruntime#28768, microsoft/onnxruntime#26311",
            expected="tolerance chosen per output dtype; output dtypes kept; ORT CPU bf16 'not implemented' reported plainly",
        ),
    )
