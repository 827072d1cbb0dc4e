"""Text embeddings with a bidirectional Gemma-3 encoder and GradCache (Gao et al., 2021).

A large contrastive batch is encoded in chunks without a graph, the loss gives gradients with respect to the embeddings,
and every chunk is encoded again to backpropagate them. Matryoshka loss, hard negatives, an EMA of the weights.
"""
import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma3TextConfig, Gemma3TextModel, get_constant_schedule_with_warmup

DEVICE = "cuda"
QUERIES, CHUNK = 64, 32
QUERY_LEN, PASSAGE_LEN = 64, 384
MATRYOSHKA = (768, 256, 128)
TEMPERATURE = 0.02
STEPS = 3


class EmbeddingModel(nn.Module):
    def __init__(self, config: Gemma3TextConfig, dim_out: int = 768):
        super().__init__()
        self.encoder = Gemma3TextModel(config)
        self.dense1 = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.dense2 = nn.Linear(4 * config.hidden_size, dim_out, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return self.dense2(self.dense1(pooled)).float()


def contrastive_loss(queries: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    passages = torch.cat([positives, negatives])
    target = torch.arange(queries.size(0), device=queries.device)
    loss = queries.new_zeros(())
    for dim in MATRYOSHKA:
        q, p = F.normalize(queries[:, :dim], dim=-1), F.normalize(passages[:, :dim], dim=-1)
        scores = q @ p.T / TEMPERATURE
        loss = loss + F.cross_entropy(scores, target)
        loss = loss + F.cross_entropy(scores[:, : q.size(0)].T, target)
    return loss / (2 * len(MATRYOSHKA))


class GradCache:
    def __init__(self, model: nn.Module, chunk_size: int):
        self.model, self.chunk_size = model, chunk_size

    def chunks(self, batch: dict[str, Tensor]):
        for ids, mask in zip(*(t.split(self.chunk_size) for t in batch.values()), strict=True):
            yield {"input_ids": ids, "attention_mask": mask}

    def encode(self, batch: dict[str, Tensor], with_graph: bool = False):
        with nullcontext() if with_graph else torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
            return self.model(**batch)

    def step(self, *batches: dict[str, Tensor]) -> Tensor:
        embeddings = [torch.cat([self.encode(c) for c in self.chunks(b)]) for b in batches]
        leaves = [e.detach().requires_grad_() for e in embeddings]
        loss = contrastive_loss(*leaves)
        loss.backward()
        for batch, leaf in zip(batches, leaves, strict=True):
            for chunk, cached in zip(self.chunks(batch), leaf.grad.split(self.chunk_size), strict=True):
                surrogate = torch.dot(self.encode(chunk, with_graph=True).flatten(), cached.flatten())
                surrogate.backward()
        return loss.detach()


def texts(count: int, max_len: int, generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(max_len // 4, max_len + 1, (count, 1), generator=generator)
    lengths[0] = max_len
    mask = (torch.arange(max_len)[None] < lengths).long()
    ids = torch.randint(4, 48000, (count, max_len), generator=generator) * mask
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)


def main() -> None:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(5)
    config = Gemma3TextConfig(vocab_size=48000, hidden_size=640, intermediate_size=1792, num_hidden_layers=10,
                              num_attention_heads=5, num_key_value_heads=1, head_dim=128, sliding_window=256,
                              query_pre_attn_scalar=128, use_bidirectional_attention=True, use_cache=False)
    model = EmbeddingModel(config).to(DEVICE)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.99), foreach=True)
    scheduler = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=2)
    cache = GradCache(model, CHUNK)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {QUERIES} queries per step")

    model.train()
    for step in range(STEPS):
        batch = [texts(QUERIES, QUERY_LEN, generator), texts(QUERIES, PASSAGE_LEN, generator),
                 texts(QUERIES, PASSAGE_LEN, generator)]
        optimizer.zero_grad(set_to_none=True)
        loss = cache.step(*batch)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        update_ema(ema, model, decay=0.99)
        print(f"step {step}: loss {loss:.4f} grad norm {norm:.3f}")

    evaluator = GradCache(ema, 2 * CHUNK)
    q, p = (torch.cat([evaluator.encode(c) for c in evaluator.chunks(texts(64, n, generator))])
            for n in (QUERY_LEN, PASSAGE_LEN))
    ranks = (F.normalize(q) @ F.normalize(p).T).argsort(dim=1, descending=True)
    mrr = (1.0 / (ranks == torch.arange(64, device=DEVICE)[:, None]).float().argmax(dim=1).add(1)).mean()
    print(f"MRR on random pairs: {mrr.item():.3f}")


if __name__ == "__main__":
    main()
