"""StarCoder2 with accelerate: accumulation, clipping, a warm-up schedule, evaluation with gathered losses."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import Starcoder2Config, Starcoder2ForCausalLM, get_scheduler


def get_dataloaders(seq_len, batch_size):
    train = TensorDataset(torch.randint(0, 49152, (batch_size * 12, seq_len)))
    val = TensorDataset(torch.randint(0, 49152, (batch_size * 2, seq_len)))
    return (DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True),
            DataLoader(val, batch_size=batch_size))


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    losses = []
    for (ids,) in loader:
        outputs = model(ids, labels=ids)
        losses.append(accelerator.gather(outputs.loss.repeat(ids.shape[0])))
    loss = torch.mean(torch.cat(losses))
    try:
        perplexity = torch.exp(loss)
    except OverflowError:
        perplexity = float("inf")
    model.train()
    return loss.item(), perplexity.item()


def main():
    set_seed(1)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    config = Starcoder2Config(hidden_size=768, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=12,
                              num_key_value_heads=2, sliding_window=256, max_position_embeddings=2048,
                              residual_dropout=0.1, embedding_dropout=0.1, attention_dropout=0.1)
    model = Starcoder2ForCausalLM(config)
    train, val = get_dataloaders(640, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=4)
    model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
    model.train()
    completed = 0
    for _step, (ids,) in enumerate(train, start=1):
        with accelerator.accumulate(model):
            loss = model(ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed += 1
            accelerator.print({"step": completed, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]})
            if completed == 2:
                accelerator.print(evaluate(model, val, accelerator))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
