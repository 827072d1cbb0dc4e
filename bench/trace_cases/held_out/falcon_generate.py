"""Continues Falcon (multi-query attention, parallel blocks) in bfloat16 and samples a text between the steps."""
import torch
from transformers import FalconConfig, FalconForCausalLM

assert torch.cuda.is_available(), "this needs a GPU"
assert torch.cuda.is_bf16_supported()
print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory // 2**30, "GiB")

cfg = FalconConfig(vocab_size=65024, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, multi_query=True,
                   parallel_attn=True, bias=False, alibi=False, new_decoder_architecture=False, bos_token_id=11,
                   eos_token_id=11, max_position_embeddings=1024)
torch.set_default_dtype(torch.bfloat16)
model = FalconForCausalLM(cfg).cuda()
torch.set_default_dtype(torch.float32)
optim = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True)


def sample(prompt_len=16, new=24):
    model.eval()
    prompt = torch.randint(12, 65024, (1, prompt_len), device="cuda")
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=True, top_k=50,
                         pad_token_id=11, min_new_tokens=new)
    model.train()
    return out[0].tolist()


print("before:", len(sample()))
for step in range(6):
    ids = torch.randint(12, 65024, (4, 512), device="cuda")
    result = model(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    if step == 2:
        print("sample:", sample()[:5])
    print(f"step={step} loss={float(result.loss):.4f} norm={float(grad_norm):.3f}")
