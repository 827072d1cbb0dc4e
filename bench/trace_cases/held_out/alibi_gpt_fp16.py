"""GPT with ALiBi as a float mask, float16 autocast with GradScaler, reentrant checkpointing, SGD with momentum."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Config:
    vocab, width, heads, layers, context = 50257, 768, 12, 10, 1024
    batch, steps, lr, dropout = 6, 6, 0.05, 0.1


def alibi_bias(heads, context, device):
    slopes = torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)], device=device)
    distance = torch.arange(context, device=device)[None, :] - torch.arange(context, device=device)[:, None]
    bias = slopes[:, None, None] * distance[None].float()
    return bias.masked_fill(distance[None] > 0, float("-inf"))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width),
                                 nn.Dropout(c.dropout))
        self.heads, self.dropout = c.heads, c.dropout

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype),
                                           dropout_p=self.dropout if self.training else 0.0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class AlibiGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        self.register_buffer("bias", alibi_bias(c.heads, c.context, "cpu")[None], persistent=False)

    def forward(self, idx):
        x = self.embed(idx)
        t = idx.shape[1]
        for layer in self.layers:
            x = checkpoint(layer, x, self.bias[:, :, :t, :t], use_reentrant=True)
        return self.head(self.ln_f(x))


def train():
    c = Config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = AlibiGPT(c).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=c.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for step in range(c.steps):
        tokens = torch.randint(0, c.vocab, (c.batch, c.context + 1), device=device)
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.view(-1, c.vocab), tokens[:, 1:].reshape(-1))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        print(step, loss.item(), norm.item(), scaler.get_scale())


if __name__ == "__main__":
    train()
