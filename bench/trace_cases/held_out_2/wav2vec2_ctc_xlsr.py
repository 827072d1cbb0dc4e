"""Fine-tune an XLSR-style Wav2Vec2 (300M) with CTC in float16, with the convolutional feature encoder frozen."""
import argparse
import random

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, get_linear_schedule_with_warmup

SAMPLE_RATE = 16_000
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|"] + [chr(c) for c in range(ord("a"), ord("z") + 1)]


class Speech(Dataset):
    def __init__(self, size, max_seconds, seed):
        rng = np.random.default_rng(seed)
        self.clips = []
        for _ in range(size):
            seconds = rng.uniform(0.5 * max_seconds, max_seconds)
            audio = rng.standard_normal(int(seconds * SAMPLE_RATE)).astype(np.float32)
            text = rng.integers(4, len(LETTERS), int(seconds * 8))
            self.clips.append((audio, text))

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        audio, text = self.clips[index]
        audio = (audio - audio.mean()) / np.sqrt(audio.var() + 1e-7)
        return torch.from_numpy(audio), torch.from_numpy(text)


def collate(items):
    audio, text = zip(*items)
    lengths = torch.tensor([len(a) for a in audio])
    values = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
    mask = (torch.arange(values.shape[1])[None, :] < lengths[:, None]).long()
    labels = torch.nn.utils.rnn.pad_sequence(text, batch_first=True, padding_value=-100)
    return {"input_values": values, "attention_mask": mask, "labels": labels}


def build_model(args):
    config = Wav2Vec2Config(
        vocab_size=len(LETTERS), pad_token_id=0, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        num_attention_heads=16, intermediate_size=4 * args.hidden_size, feat_extract_norm="layer",
        do_stable_layer_norm=True, conv_bias=True, attention_dropout=0.0, hidden_dropout=0.0, feat_proj_dropout=0.0,
        mask_time_prob=0.05, layerdrop=0.0, ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    return model


@torch.no_grad()
def frames_per_second(model):
    """One second through the model, on the CPU, before it moves to the GPU."""
    model.eval()
    return model(torch.zeros(1, SAMPLE_RATE)).logits.shape[1]


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total, correct, count = 0.0, 0, 0
    for batch in loader:
        batch = {key: value.to(device) for key, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            out = model(**batch)
        total += out.loss.item()
        guess = out.logits.argmax(-1).cpu()
        correct += (guess != 0).sum().item()
        count += guess.numel()
    return total / len(loader), correct / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_seconds", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args)
    print("frames per second of audio:", frames_per_second(model))
    model.to(device)

    train_loader = DataLoader(Speech(args.steps * args.batch_size, args.max_seconds, 0), args.batch_size, shuffle=True,
                              collate_fn=collate, pin_memory=device.type == "cuda")
    valid_loader = DataLoader(Speech(2 * args.batch_size, args.max_seconds, 1), args.batch_size, collate_fn=collate)

    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in trainable) / 1e6:.1f}M trainable of {model.num_parameters() / 1e6:.1f}M parameters")
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.005)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    for step, batch in enumerate(train_loader):
        model.train()
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(trainable, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}, norm {float(norm):.2f}, seconds {batch['input_values'].shape[1] / SAMPLE_RATE:.1f}")
        if (step + 1) % 2 == 0:
            print("validation loss, share of letters:", evaluate(model, valid_loader, device))


if __name__ == "__main__":
    main()
