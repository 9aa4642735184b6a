import torch
from torch import nn


class Rank(nn.Module):
    """Bucket sort by key, where equal keys keep their order; and int64 top-k positions."""

    def forward(self, key, score):
        v, order = torch.sort(key, stable=True)
        down = torch.sort(key, descending=True, stable=True).indices
        inv = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=key.device))
        top, at = score.topk(3)
        return v, order, down, score[order], inv, top, at, score.argmax()


def make():
    g = torch.Generator().manual_seed(0)
    ins = [(torch.randint(0, 4, (n,), generator=g), torch.randperm(n, generator=g).float() / 7) for n in (40, 300)]

    def check(model, inputs, outputs):
        for (key, score), o in zip(inputs, outputs):
            K, S = key.tolist(), score.tolist()
            up = sorted(range(len(K)), key=lambda i: K[i])
            assert o[0].tolist() == sorted(K) and o[1].dtype == torch.int64
            assert o[1].tolist() == up, f"ties reordered: {o[1].tolist()[:8]} instead of {up[:8]}"
            assert o[2].tolist() == sorted(range(len(K)), key=lambda i: -K[i]), (
                "descending stable order (ties keep first-come order)"
            )
            assert o[3].tolist() == [S[i] for i in up], "payload permuted by an unstable order"
            assert [o[4].tolist()[i] for i in up] == list(range(len(K))), "inverse permutation"
            best = sorted(range(len(S)), key=lambda i: -S[i])[:3]
            assert (
                o[6].tolist() == best
                and o[6].dtype == torch.int64
                and int(o[7]) == best[0]
                and o[5].tolist() == [S[i] for i in best]
            )

    return (
        Rank().eval(),
        ins,
        dict(
            kind="stable sort with many ties, payload, int64 positions",
            check=check,
            rtol=1e-5,
            atol=1e-6,
            source_thread="microsoft/onnxscript#3053, pytorch/pytorch#95613, NVIDIA/TensorRT#2259",
            expected="order among ties is part of the answer when stable=True; 300 elements, since short sorts are stable by luck",
        ),
    )
