"""Full fine-tuning of an OLMo-3 model in pure bfloat16 with little memory, after the ideas of torchtune.

One optimizer per parameter steps inside backward (so no gradient outlives its layer), and large activations are
offloaded to pinned CPU memory with saved-tensor hooks.
"""
import argparse

import torch
import torch.nn.functional as F
from transformers import Olmo3Config, Olmo3ForCausalLM


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Moves saved tensors above a size to the CPU; parameters stay where they are."""

    def __init__(self, min_bytes=1 << 20):
        self.min_bytes = min_bytes
        self.offloaded = 0
        super().__init__(self.pack, self.unpack)

    def pack(self, x):
        nbytes = x.numel() * x.element_size()
        if isinstance(x, torch.nn.Parameter) or nbytes < self.min_bytes or not x.is_cuda:
            return x
        self.offloaded += nbytes
        host = torch.empty(x.size(), dtype=x.dtype, layout=x.layout, pin_memory=True)
        host.copy_(x, non_blocking=True)
        return (x.device, host)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)


def attach_optimizers(model, lr, weight_decay):
    """A hook per parameter: it steps the parameter's own optimizer and drops the gradient."""
    optimizers = {}
    for p in model.parameters():
        decay = weight_decay if p.ndim > 1 else 0.0
        optimizers[p] = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    def optim_step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optim_step)
    return optimizers


def batches(steps, batch_size, seq_len, vocab_size):
    generator = torch.Generator().manual_seed(3407)
    for _ in range(steps):
        ids = torch.randint(5, vocab_size, (batch_size, seq_len), generator=generator)
        prompt = torch.randint(seq_len // 8, seq_len // 2, (batch_size, 1), generator=generator)
        labels = ids.masked_fill(torch.arange(seq_len)[None] < prompt, -100)
        yield ids.pin_memory(), labels.pin_memory()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--no_offload", action="store_true")
    args = parser.parse_args()

    config = Olmo3Config(vocab_size=50280, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
                         sliding_window=256, pad_token_id=1, eos_token_id=2, attn_implementation="sdpa")
    model = Olmo3ForCausalLM(config).to(dtype=torch.bfloat16, device="cuda")
    model.config.use_cache = False
    model.train()
    print(f"{model.num_parameters() / 1e6:.0f}M parameters, layers: {config.layer_types}")

    optimizers = attach_optimizers(model, args.learning_rate, args.weight_decay)
    for step, (ids, labels) in enumerate(batches(args.max_steps, args.batch_size, args.seq_len, config.vocab_size)):
        lr = args.learning_rate * min(1.0, (step + 1) / args.warmup_steps)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = lr
        ids, labels = ids.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)

        offload = OffloadActivations(min_bytes=1 << 62 if args.no_offload else 1 << 20)
        with offload:
            hidden = model.model(input_ids=ids).last_hidden_state
        # the head runs outside of the hooks: its logits are needed again at once
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        logits = model.lm_head(hidden)
        loss = F.cross_entropy(logits.float().view(-1, config.vocab_size), shifted.reshape(-1), ignore_index=-100)
        del logits, hidden
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        print(f"step {step} | loss {loss.item():.4f} | lr {lr:.1e} | offloaded {offload.offloaded / 2**20:.0f} MiB | "
              f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
