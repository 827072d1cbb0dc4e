"""nn.TransformerEncoder and nn.TransformerDecoder for translation, autocast as a decorator, Adagrad."""
import torch
import torch.nn as nn

torch.backends.cuda.matmul.allow_tf32 = True
SRC, TGT, D, B, S, T = 16000, 24000, 512, 32, 160, 128


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(SRC, D), nn.Embedding(TGT, D)
        self.src_pos, self.tgt_pos = nn.Embedding(S, D), nn.Embedding(T, D)
        enc = nn.TransformerEncoderLayer(D, 8, 2048, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        dec = nn.TransformerDecoderLayer(D, 8, 2048, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(enc, 4, norm=nn.LayerNorm(D), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(dec, 4, norm=nn.LayerNorm(D))
        self.generator = nn.Linear(D, TGT)

    @torch.autocast(device_type="cuda", dtype=torch.bfloat16)
    def forward(self, src, tgt, src_padding, tgt_padding):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        src_x = self.src_emb(src) + self.src_pos(torch.arange(src.size(1), device=src.device))
        tgt_x = self.tgt_emb(tgt) + self.tgt_pos(torch.arange(tgt.size(1), device=tgt.device))
        memory = self.encoder(src_x, src_key_padding_mask=src_padding)
        out = self.decoder(tgt_x, memory, tgt_mask=causal, tgt_is_causal=True, tgt_key_padding_mask=tgt_padding,
                           memory_key_padding_mask=src_padding)
        return self.generator(out)


def pad_mask(batch, length, low):
    lengths = torch.linspace(low, length, batch).long()
    return torch.arange(length)[None] >= lengths[:, None]


torch.manual_seed(3)
net = Translator()
for p in net.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
net = net.cuda()
opt = torch.optim.Adagrad(net.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
net.train()
losses = []
for _i in range(6):
    src = torch.randint(0, SRC, (B, S)).cuda()
    tgt = torch.randint(0, TGT, (B, T)).cuda()
    sp, tp = pad_mask(B, S, 80).cuda(), pad_mask(B, T - 1, 60).cuda()
    logits = net(src, tgt[:, :-1], sp, tp)
    loss = loss_fn(logits.float().transpose(1, 2), tgt[:, 1:])
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.detach().cpu())
print("mean loss", torch.stack(losses).mean().item())
print("peak", torch.cuda.max_memory_allocated() / 2**20, "MiB")
