"""GRPO on a small SmolLM3: sample groups of completions, score them, update the policy."""
import argparse
import copy

import torch
import torch.nn.functional as F
from transformers import SmolLM3Config, SmolLM3ForCausalLM

EOS, PAD = 2, 0


def build(args):
    config = SmolLM3Config(
        vocab_size=args.vocab, hidden_size=768, intermediate_size=2048, num_hidden_layers=args.layers,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=True,
    )
    return SmolLM3ForCausalLM(config)


def make_prompts(n, max_len, vocab):
    """Left-padded prompts of different lengths."""
    lengths = torch.randint(max_len // 2, max_len + 1, (n,))
    ids = torch.randint(3, vocab, (n, max_len))
    mask = torch.arange(max_len)[None].ge(max_len - lengths[:, None])
    return ids.masked_fill(~mask, PAD), mask.long()


def reward_fn(completion):
    """Reward long completions with few repetitions (stands in for a verifier)."""
    text = completion[:completion.index(EOS)] if EOS in completion else completion
    return len(set(text)) / max(len(text), 1) + 0.5 * (sum(t % 2 == 0 for t in text) / max(len(text), 1))


def selective_log_softmax(logits, index):
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    lse = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return selected - lse


def per_token_logps(model, ids, mask, completion_len, temperature):
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False,
                   logits_to_keep=completion_len + 1).logits[:, :-1]
    logits = logits.float() / temperature
    return selective_log_softmax(logits, ids[:, -completion_len:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=32768)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--prompts", type=int, default=2)
    ap.add_argument("--group", type=int, default=8)
    ap.add_argument("--prompt-len", type=int, default=96)
    ap.add_argument("--new-tokens", type=int, default=128)
    ap.add_argument("--inner", type=int, default=2, help="optimizer steps per batch of completions")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--beta", type=float, default=0.04)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--temperature", type=float, default=0.9)
    ap.add_argument("--lr", type=float, default=1e-6)
    args = ap.parse_args()

    torch.manual_seed(5)
    policy = build(args).to("cuda")
    reference = copy.deepcopy(policy).to(torch.bfloat16).eval()
    for p in reference.parameters():
        p.requires_grad_(False)
    print(f"policy {policy.num_parameters() / 1e6:.1f}M parameters")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)

    step = 0
    for rnd in range(args.rounds):
        prompts, prompt_mask = make_prompts(args.prompts, args.prompt_len, args.vocab)
        prompts = prompts.repeat_interleave(args.group, 0).to("cuda")
        prompt_mask = prompt_mask.repeat_interleave(args.group, 0).to("cuda")

        policy.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            ids = policy.generate(input_ids=prompts, attention_mask=prompt_mask, max_new_tokens=args.new_tokens,
                                  do_sample=True, temperature=args.temperature, top_k=0, use_cache=True,
                                  pad_token_id=PAD, eos_token_id=EOS)
        policy.train()
        completion_ids = ids[:, args.prompt_len:]
        n = completion_ids.size(1)
        is_eos = completion_ids.eq(EOS).long()
        completion_mask = (is_eos.cumsum(1) - is_eos).eq(0).long()
        mask = torch.cat([prompt_mask, completion_mask], dim=1)

        rewards = torch.tensor([reward_fn(c) for c in completion_ids.tolist()], device="cuda")
        grouped = rewards.view(-1, args.group)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)

        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            ref_logps = per_token_logps(reference, ids, mask, n, args.temperature)
            old_logps = per_token_logps(policy, ids, mask, n, args.temperature)

        for _ in range(args.inner):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logps = per_token_logps(policy, ids, mask, n, args.temperature)
            ratio = torch.exp(logps - old_logps)
            adv = advantages[:, None]
            surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv)
            kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
            per_token = -(surrogate - args.beta * kl)
            m = completion_mask.float()
            loss = ((per_token * m).sum(1) / m.sum(1).clamp(min=1)).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            mean_kl = (kl.detach() * m).sum() / m.sum()
            print(f"round {rnd} step {step}: loss {loss.item():.4f} kl {mean_kl.item():.5f} "
                  f"reward {rewards.mean().item():.3f} len {m.sum(1).mean().item():.1f} norm {norm.item():.3f}")

    print(f"max memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
