"""Speech recognition with CTC: waveforms -> log-mel on the GPU -> conv subsampling -> Transformer encoder."""
import argparse
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SAMPLE_RATE = 16000


def mel_filterbank(n_mels, n_fft, fmin=20.0, fmax=SAMPLE_RATE / 2):
    def to_mel(f):
        return 2595.0 * np.log10(1.0 + f / 700.0)

    def to_hz(m):
        return 700.0 * (10.0 ** (m / 2595.0) - 1.0)

    points = to_hz(np.linspace(to_mel(fmin), to_mel(fmax), n_mels + 2))
    bins = np.linspace(0, SAMPLE_RATE / 2, n_fft // 2 + 1)
    up = (bins[None] - points[:-2, None]) / (points[1:-1] - points[:-2])[:, None]
    down = (points[2:, None] - bins[None]) / (points[2:] - points[1:-1])[:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(up, down)).astype(np.float32))


class LogMel(nn.Module):
    def __init__(self, n_mels=80, n_fft=512, win=400, hop=160):
        super().__init__()
        self.n_fft, self.win, self.hop = n_fft, win, hop
        self.register_buffer("window", torch.hann_window(win))
        self.register_buffer("fb", mel_filterbank(n_mels, n_fft))

    @torch.no_grad()
    def forward(self, wav):
        spec = torch.stft(wav, self.n_fft, self.hop, self.win, window=self.window, return_complex=True)
        power = spec.real.pow(2) + spec.imag.pow(2)
        mel = torch.matmul(self.fb, power).clamp_min(1e-10).log()
        return (mel - mel.mean(dim=-1, keepdim=True)) / (mel.std(dim=-1, keepdim=True) + 1e-5)


def spec_augment(x, freq=27, time=60):
    """One frequency and one time mask per batch."""
    f0, t0 = np.random.randint(0, x.size(1) - freq), np.random.randint(0, x.size(2) - time)
    x = x.clone()
    x[:, f0:f0 + freq] = 0
    x[:, :, t0:t0 + time] = 0
    return x


class ASR(nn.Module):
    def __init__(self, vocab, n_mels=80, dim=512, layers=12, heads=8, dropout=0.1):
        super().__init__()
        self.frontend = LogMel(n_mels)
        self.conv1 = nn.Conv1d(n_mels, dim, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.ctc = nn.Linear(dim, vocab)
        pe = torch.zeros(2000, dim)
        pos = torch.arange(2000).unsqueeze(1)
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, wav, wav_lens):
        mel = self.frontend(wav)
        if self.training:
            mel = spec_augment(mel)
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        lens = wav_lens // self.frontend.hop + 1
        lens = ((lens + 1) // 2 + 1) // 2                     # two convolutions of stride 2; stays on the CPU
        x = x + self.pe[: x.size(1)]
        pad = torch.arange(x.size(1))[None, :] >= lens[:, None]
        x = self.encoder(x, src_key_padding_mask=pad.to(x.device))
        return F.log_softmax(self.ctc(x).float(), dim=-1), lens


def get_batch(batch_size, seconds, vocab):
    n = int(seconds * SAMPLE_RATE)
    wav_lens = torch.randint(n // 2, n + 1, (batch_size,))
    wav_lens[0] = n
    wav = torch.randn(batch_size, n) * 0.1
    wav *= torch.arange(n)[None, :] < wav_lens[:, None]
    target_lens = (wav_lens // (SAMPLE_RATE // 10)).clamp(max=120)   # about ten characters per second
    targets = torch.randint(1, vocab, (batch_size, 120))
    return wav, wav_lens, targets, target_lens


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--seconds", type=float, default=15.0)
    ap.add_argument("--vocab", type=int, default=64)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--lr", type=float, default=5e-4)
    args = ap.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)

    model = ASR(args.vocab, dim=args.dim, layers=args.layers).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 100 ** -1.5))
    ctc_loss = nn.CTCLoss(blank=0, zero_infinity=True)

    for step in range(args.steps):
        wav, wav_lens, targets, target_lens = get_batch(args.batch_size, args.seconds, args.vocab)
        wav, targets = wav.cuda(non_blocking=True), targets.cuda(non_blocking=True)
        log_probs, out_lens = model(wav, wav_lens)
        loss = ctc_loss(log_probs.transpose(0, 1), targets, out_lens, target_lens)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        print(f"step {step} ctc {loss.item():.3f} grad norm {grad_norm.item():.2f}")
    print(f"peak reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
