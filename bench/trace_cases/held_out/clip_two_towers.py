"""A CLIP of two towers by hand: image patches by convolution, text with a causal mask, a learned temperature."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu",
                                                               batch_first=True, norm_first=True)
                                    for _ in range(layers))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return x


class CLIP(nn.Module):
    def __init__(self, embed=512, context=77, vocab=49408):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 768, kernel_size=16, stride=16, bias=False)
        self.class_embedding = nn.Parameter(768**-0.5 * torch.randn(768))
        self.positional_embedding = nn.Parameter(768**-0.5 * torch.randn(197, 768))
        self.visual, self.ln_post = Tower(768, 8, 12), nn.LayerNorm(768)
        self.visual_projection = nn.Parameter(768**-0.5 * torch.randn(768, embed))
        self.token_embedding = nn.Embedding(vocab, 512)
        self.text_positions = nn.Parameter(0.01 * torch.randn(context, 512))
        self.text, self.ln_final = Tower(512, 8, 8), nn.LayerNorm(512)
        self.text_projection = nn.Parameter(512**-0.5 * torch.randn(512, embed))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu_(1), persistent=False)

    def encode_image(self, image):
        x = self.conv1(image).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1)
        x = self.visual(x + self.positional_embedding.to(x.dtype))
        return self.ln_post(x[:, 0]) @ self.visual_projection

    def encode_text(self, text):
        x = self.token_embedding(text) + self.text_positions
        x = self.ln_final(self.text(x, self.mask))
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image, text):
        image, text = (F.normalize(each, dim=-1) for each in (self.encode_image(image), self.encode_text(text)))
        logits = self.logit_scale.exp() * image @ text.t()
        return logits, logits.t()


torch.manual_seed(0)
device = torch.device("cuda")
model = CLIP().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
for step in range(5):
    images = torch.randn(64, 3, 224, 224).to(device, non_blocking=True)
    texts = torch.randint(1, 49407, (64, 77)).to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        per_image, per_text = model(images, texts)
        truth = torch.arange(len(images), device=device)
        loss = (F.cross_entropy(per_image, truth) + F.cross_entropy(per_text, truth)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, np.log(100))
    print(step, loss.item())
