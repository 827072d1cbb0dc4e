"""Distills a 12-layer GPT-2 into one of 4 layers: soft targets with a temperature, hidden states, a student in EMA."""
import argparse
import copy

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

ap = argparse.ArgumentParser()
ap.add_argument("--temperature", default=2.0, type=float)
ap.add_argument("--alpha_ce", default=0.5, type=float)
ap.add_argument("--alpha_cos", default=0.1, type=float)
ap.add_argument("--batch_size", default=4, type=int)
ap.add_argument("--length", default=512, type=int)
ap.add_argument("--n_iter", default=6, type=int)
args = ap.parse_args()


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.model = copy.deepcopy(model).eval()
        for p in self.model.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=False):
            ours.mul_(self.decay).add_(theirs.detach(), alpha=1 - self.decay)


device = torch.device("cuda", 0)
teacher = GPT2LMHeadModel(GPT2Config(n_layer=12, use_cache=False)).to(device).eval()
student = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)).to(device).train()
ema = EMA(student)
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, eps=1e-6, betas=(0.9, 0.98))
T = args.temperature
for it in range(args.n_iter):
    ids = torch.randint(0, 50257, (args.batch_size, args.length)).to(device)
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            t = teacher(ids, output_hidden_states=True)
        s = student(ids, labels=ids, output_hidden_states=True)
        s_logits, t_logits = s.logits[:, :-1], t.logits[:, :-1]
        loss_ce = F.kl_div(F.log_softmax(s_logits / T, dim=-1), F.softmax(t_logits / T, dim=-1),
                           reduction="batchmean") * T**2 / args.length
        s_hidden, t_hidden = s.hidden_states[-1].view(-1, 768), t.hidden_states[-1].view(-1, 768)
        loss_cos = F.cosine_embedding_loss(s_hidden, t_hidden, torch.ones(len(s_hidden), device=device))
        loss = args.alpha_ce * loss_ce + (1 - args.alpha_ce) * s.loss + args.alpha_cos * loss_cos
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
    optimizer.step()
    ema.update(student)
    print(f"{it}: ce {loss_ce.item():.3f} lm {s.loss.item():.3f} cos {loss_cos.item():.3f}")
