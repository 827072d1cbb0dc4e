"""Unsupervised SimCSE with a MoCo-style momentum encoder and negative queue."""
import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.attn_drop, self.drop = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5 + bias
        probs = self.attn_drop(scores.softmax(dim=-1))
        y = (probs @ v).transpose(1, 2).reshape(b, t, d)
        return self.norm(x + self.drop(self.out(y)))


class Layer(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        self.attention = SelfAttention(dim, heads, p)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm, self.drop = nn.LayerNorm(dim, eps=1e-12), nn.Dropout(p)

    def forward(self, x, bias):
        x = self.attention(x, bias)
        return self.norm(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len, p=0.1):
        super().__init__()
        self.word = nn.Embedding(vocab, dim, padding_idx=0)
        self.position = nn.Embedding(max_len, dim)
        self.norm, self.drop = nn.LayerNorm(dim, eps=1e-12), nn.Dropout(p)
        self.layers = nn.ModuleList(Layer(dim, heads, p) for _ in range(layers))
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, ids, mask):
        pos = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.norm(self.word(ids) + self.position(pos)))
        bias = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, bias)
        return self.pooler(x[:, 0])


class MoCoSimCSE(nn.Module):
    def __init__(self, encoder, dim, queue_size, momentum, temperature):
        super().__init__()
        self.q = encoder
        self.k = copy.deepcopy(encoder)
        for p in self.k.parameters():
            p.requires_grad = False
        self.m, self.t, self.queue_size = momentum, temperature, queue_size
        self.register_buffer("queue", F.normalize(torch.randn(dim, queue_size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_momentum_encoder(self):
        for pq, pk in zip(self.q.parameters(), self.k.parameters()):
            pk.data = pk.data * self.m + pq.data * (1.0 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        n = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.queue_size % n == 0
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.queue_size

    def forward(self, ids, mask):
        z1 = F.normalize(self.q(ids, mask).float(), dim=-1)
        with torch.no_grad():
            self.update_momentum_encoder()
            z2 = F.normalize(self.k(ids, mask).float(), dim=-1)
        in_batch = z1 @ z2.T
        negatives = z1 @ self.queue.clone().detach()
        logits = torch.cat([in_batch, negatives], dim=1) / self.t
        labels = torch.arange(ids.size(0), device=ids.device)
        loss = F.cross_entropy(logits, labels)
        self.enqueue(z2)
        return loss, (logits.argmax(dim=1) == labels).float().mean()


def sentences(n, max_len, vocab):
    """Random sentences of different lengths, padded to max_len; 1 is [CLS]."""
    lengths = torch.randint(8, max_len + 1, (n,))
    ids = torch.randint(2, vocab, (n, max_len))
    ids[:, 0] = 1
    mask = torch.arange(max_len)[None] < lengths[:, None]
    return ids * mask, mask.long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=128)
    ap.add_argument("--max-len", type=int, default=64)
    ap.add_argument("--vocab", type=int, default=30522)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--dim", type=int, default=768)
    ap.add_argument("--queue", type=int, default=32768)
    ap.add_argument("--steps", type=int, default=5)
    args = ap.parse_args()

    torch.manual_seed(0)
    encoder = Encoder(args.vocab, args.dim, args.dim // 64, args.layers, 512)
    model = MoCoSimCSE(encoder, args.dim, args.queue, momentum=0.995, temperature=0.05).cuda()
    print(f"encoder: {sum(p.numel() for p in model.q.parameters()) / 1e6:.1f}M parameters, queue {args.queue}")
    opt = torch.optim.AdamW(model.q.parameters(), lr=3e-5, weight_decay=0.01)
    ids, mask = sentences(args.batch_size * args.steps, args.max_len, args.vocab)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, mask), batch_size=args.batch_size,
                                         shuffle=True, drop_last=True)
    model.train()
    total = 0.0
    for step, (x, m) in enumerate(loader):
        x, m = x.cuda(), m.cuda()
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, acc = model(x, m)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.q.parameters(), 1.0)
        opt.step()
        total += loss.item()
        print(f"step {step}: loss {total / (step + 1):.4f} acc {acc.item():.3f} ptr {model.queue_ptr.item()}")

    model.eval()
    with torch.no_grad():
        emb = torch.cat([F.normalize(model.q(ids[i:i + 64].cuda(), mask[i:i + 64].cuda()), dim=-1).cpu()
                         for i in range(0, 256, 64)])
    align = (emb[:128] - emb[128:256]).norm(dim=1).pow(2).mean()
    print("embeddings", tuple(emb.shape), f"distance {align.item():.3f}")


if __name__ == "__main__":
    main()
