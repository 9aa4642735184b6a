import torch
from torch import nn


class Inject(nn.Module):
    """Multimodal prompt: image features are poured into the placeholder tokens, in order."""

    def __init__(self, d=6):
        super().__init__()
        self.emb, self.mix = nn.Embedding(20, d), nn.Linear(d, d)

    def forward(self, ids, feats):
        h = self.emb(ids)
        hole = (ids == 19).unsqueeze(-1)
        return self.mix(h.masked_scatter(hole, feats)), h.masked_scatter(hole.expand_as(h), feats)


def make():
    torch.manual_seed(0)
    m = Inject().eval()
    ins = []
    for b, s, holes in ((1, 8, [(0, 1), (0, 2), (0, 5)]), (2, 6, [(0, 5), (1, 0), (1, 1), (1, 4)])):
        ids = torch.randint(0, 19, (b, s))
        for i, j in holes:
            ids[i, j] = 19
        ins.append((ids, torch.arange(len(holes) * 6, dtype=torch.float32).view(-1, 6) + 100))

    def check(model, inputs, outputs):
        ref = make()[0]
        for (ids, feats), (mixed, raw) in zip(inputs, outputs):
            want = ref.emb.weight.detach()[ids].clone()
            n = 0
            for i, row in enumerate(ids.tolist()):
                for j, t in enumerate(row):
                    if t == 19:
                        want[i, j] = feats[n]
                        n += 1
            assert torch.allclose(raw, want, atol=1e-5), (
                f"features poured in the wrong order: {raw[raw >= 100][:8].tolist()}"
            )
            with torch.no_grad():
                assert torch.allclose(mixed, want @ ref.mix.weight.T + ref.mix.bias, rtol=1e-4, atol=1e-3), (
                    "broadcast mask variant differs"
                )

    return (
        m,
        ins,
        dict(
            kind="masked_scatter with a broadcast mask",
            check=check,
            rtol=1e-4,
            atol=1e-3,
            source_thread="pytorch/pytorch#186146",
            expected="row-major order over the broadcast mask; structured (not constant) features, or the error is invisible",
        ),
    )
