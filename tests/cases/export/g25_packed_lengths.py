import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Reader(nn.Module):
    """Bidirectional recurrent layer over padded sequences with per-sample lengths."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5, bidirectional=True, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, (h, _) = self.rnn(packed)
        y, n = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1], padding_value=-9.0)
        return y, h, n


def make():
    torch.manual_seed(0)
    m = Reader().eval()
    ins = [
        (torch.randn(len(l), t, 4), torch.tensor(l))
        for t, l in ((6, [6, 2, 4]), (6, [1, 6, 3]), (5, [5, 5]), (4, [2, 3, 1, 4]))
    ]

    def check(model, inputs, outputs):
        ref = make()[0].rnn
        for (x, lengths), (y, h, n) in zip(inputs, outputs):
            assert n.tolist() == lengths.tolist(), "lengths were frozen from the sample"
            for k, t in enumerate(lengths.tolist()):
                with torch.no_grad():
                    want, (hw, _) = ref(x[k : k + 1, :t])  # each sequence on its own, without padding
                assert (y[k, :t] - want[0]).abs().max() < 1e-4, f"sequence {k}: backward pass started in the padding"
                assert (y[k, t:] == -9).all(), f"sequence {k}: padding value"
                assert (h[:, k] - hw[:, 0]).abs().max() < 1e-4, f"sequence {k}: last state taken from the padding"

    return (
        m,
        ins,
        dict(
            kind="packed bidirectional LSTM with lengths as an input",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="pytorch/pytorch#28423, microsoft/onnxruntime#11830, pytorch/pytorch#62240",
            expected="other lengths at the same shape must be tried: an export that drops packing passes on full-length samples",
        ),
    )
