import torch
from torch import nn


class Detect(nn.Module):
    """Threshold, keep, list, and count: every output has a length that depends on the data."""

    def forward(self, boxes, scores, cls):
        keep = scores > 0.5
        kept, idx = boxes[keep], keep.nonzero().squeeze(1)
        area = ((kept[:, 2] - kept[:, 0]) * (kept[:, 3] - kept[:, 1])).clamp(min=0)
        labels, counts = torch.unique(cls, sorted=True, return_counts=True)
        return kept, idx, area, labels, counts, scores[keep], keep.sum()


def make():
    g = torch.Generator().manual_seed(0)
    ins = []
    for n, bias in ((8, 0.0), (8, -2.0), (8, 2.0), (5, 0.1)):  # some, none, all, another length
        b = torch.rand(n, 4, generator=g)
        ins.append((b, (torch.rand(n, generator=g) + bias), torch.randint(0, 4, (n,), generator=g)))

    def check(model, inputs, outputs):
        for (b, s, c), o in zip(inputs, outputs):
            want = [k for k, v in enumerate(s.tolist()) if v > 0.5]
            assert o[1].dtype == torch.int64 and o[1].tolist() == want, f"indices {o[1].tolist()} instead of {want}"
            assert o[0].shape == (len(want), 4), f"kept {tuple(o[0].shape)}: padded or baked length"
            for r, k in zip(o[0], want):
                assert torch.equal(r, b[k])
            ref = [max(0.0, (q[2] - q[0]) * (q[3] - q[1])) for q in b.double()[want].tolist()]
            assert o[2].shape == (len(want),) and all(abs(x - y) < 1e-5 for x, y in zip(o[2].tolist(), ref)), "areas"
            assert o[3].tolist() == sorted(set(c.tolist())) and o[4].tolist() == [
                c.tolist().count(v) for v in sorted(set(c.tolist()))
            ], "unique"
            assert o[5].tolist() == [s.tolist()[k] for k in want] and int(o[6]) == len(want), "kept scores / count"

    return (
        Detect().eval(),
        ins,
        dict(
            kind="boolean indexing, nonzero, unique with varying (also zero) counts",
            check=check,
            rtol=1e-5,
            atol=1e-6,
            source_thread="NVIDIA/TensorRT#4010, pytorch/pytorch#143222",
            expected="right lengths for none/some/all kept, or a clean refusal; never a length frozen from the sample",
        ),
    )
