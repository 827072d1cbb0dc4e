"""RLHF with PPO in one file: a GLM policy with a value head, a frozen reference, rollouts sampled with a KV cache.

The reward is a toy (it likes even token ids), the machinery is the usual one: KL penalty per token, generalized
advantage estimation, several epochs over minibatches, clipped policy and value losses.
"""
import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DynamicCache, GlmConfig, GlmModel


class ActorCritic(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = GlmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.value_head = nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.Tanh(),
                                        nn.Linear(config.hidden_size, 1))

    def forward(self, input_ids, cache=None):
        out = self.backbone(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None)
        hidden = out.last_hidden_state
        return self.lm_head(hidden), self.value_head(hidden).squeeze(-1)


@torch.no_grad()
def rollout(policy, prompts, new_tokens, temperature, top_k):
    """Samples new_tokens per prompt, one token at a time."""
    cache = DynamicCache(config=policy.backbone.config)
    sequences, step_input = prompts, prompts
    for _ in range(new_tokens):
        logits, _ = policy(step_input, cache)
        logits = logits[:, -1].float() / temperature
        kth = torch.topk(logits, top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
        step_input = torch.multinomial(logits.softmax(dim=-1), 1)
        sequences = torch.cat([sequences, step_input], dim=1)
    return sequences


def token_logprobs(logits, tokens):
    logprobs = F.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), logprobs


def advantages_and_returns(rewards, values, gamma=1.0, lam=0.95):
    advantage, reversed_advantages = 0.0, []
    for t in reversed(range(rewards.size(1))):
        next_value = values[:, t + 1] if t + 1 < rewards.size(1) else 0.0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        reversed_advantages.append(advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    returns = advantages + values
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout_batch", type=int, default=32)
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--ppo_epochs", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kl_coef", type=float, default=0.05)
    parser.add_argument("--cliprange", type=float, default=0.2)
    parser.add_argument("--vf_coef", type=float, default=0.1)
    parser.add_argument("--entropy_coef", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")

    config = GlmConfig(vocab_size=args.vocab_size, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
                       intermediate_size=2 * args.hidden_size, num_attention_heads=12, num_key_value_heads=2,
                       head_dim=64, max_position_embeddings=1024, pad_token_id=0, eos_token_id=[2])
    policy = ActorCritic(config).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr, eps=1e-5)
    autocast = torch.autocast(device_type=device.type, dtype=torch.bfloat16)

    for iteration in range(args.iterations):
        prompts = torch.randint(3, args.vocab_size, (args.rollout_batch, args.prompt_length), device=device)
        policy.eval()
        with autocast:
            sequences = rollout(policy, prompts, args.new_tokens, temperature=0.9, top_k=50)
        start = args.prompt_length - 1
        actions = sequences[:, args.prompt_length :]

        old, ref, val = [], [], []
        with torch.no_grad(), autocast:
            for chunk in sequences.split(args.minibatch):
                logits, values = policy(chunk)
                target = chunk[:, args.prompt_length :]
                old.append(token_logprobs(logits[:, start:-1], target)[0])
                val.append(values[:, start:-1].float())
                ref.append(token_logprobs(reference(chunk)[0][:, start:-1], target)[0])
                del logits
        old, ref, val = torch.cat(old), torch.cat(ref), torch.cat(val)
        kl = old - ref
        rewards = -args.kl_coef * kl
        score = (actions % 2 == 0).float().mean(dim=1)
        rewards[:, -1] += score
        advantages, returns = advantages_and_returns(rewards, val)
        torch.cuda.empty_cache()

        policy.train()
        stats = []
        for _ in range(args.ppo_epochs):
            for index in torch.randperm(args.rollout_batch, device=device).split(args.minibatch):
                with autocast:
                    logits, values = policy(sequences[index])
                new, logprobs = token_logprobs(logits[:, start:-1], actions[index])
                values = values[:, start:-1].float()
                ratio = torch.exp(new - old[index])
                adv = advantages[index]
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)).mean()
                clipped = val[index] + (values - val[index]).clamp(-args.cliprange, args.cliprange)
                vf_loss = torch.max((values - returns[index]) ** 2, (clipped - returns[index]) ** 2).mean() / 2
                entropy = -(logprobs.exp() * logprobs).sum(dim=-1).mean()
                loss = pg_loss + args.vf_coef * vf_loss - args.entropy_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                stats.append(torch.stack([pg_loss.detach(), vf_loss.detach(), entropy.detach()]))
        pg, vf, ent = torch.stack(stats).mean(dim=0).tolist()
        print(f"iteration {iteration}: reward {score.mean().item():.3f} kl {kl.sum(1).mean().item():.4f} "
              f"policy {pg:.4f} value {vf:.4f} entropy {ent:.3f}")


if __name__ == "__main__":
    main()
