"""A reward model on Llama with eager attention: scalar head, pairwise loss, bucketed lengths, empty_cache."""
import gc

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel


class RewardModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = LlamaModel(config)
        self.dropout = nn.Dropout(0.1)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, ids, mask):
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        last = mask.sum(dim=1) - 1
        pooled = hidden[torch.arange(ids.shape[0], device=ids.device), last]
        return self.score(self.dropout(pooled)).squeeze(-1)


def pairwise_loss(chosen, rejected, margin=0.0):
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()


def buckets():
    generator = torch.Generator().manual_seed(99)
    for length in (192, 320, 448, 256, 512, 384):
        ids = torch.randint(3, 32000, (16, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (16,), generator=generator)
        yield ids, (torch.arange(length) < lengths.unsqueeze(1)).long()


def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
                         use_cache=False, num_attention_heads=12, attn_implementation="eager", attention_dropout=0.1)
    model = RewardModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98))
    for step, (ids, mask) in enumerate(buckets()):
        ids, mask = ids.cuda(), mask.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(ids, mask)
            chosen, rejected = scores[:8], scores[8:]
            loss = pairwise_loss(chosen.float(), rejected.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (chosen > rejected).float().mean()
        print(f"{step}: length {ids.shape[1]}, loss {loss.item():.3f}, accuracy {accuracy.item():.2f}")
        del scores, chosen, rejected, loss, ids, mask
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
