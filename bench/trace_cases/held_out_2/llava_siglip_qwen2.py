"""LLaVA-style training in two stages: SigLIP (frozen) -> MLP projector -> Qwen2.

Stage 1 trains the projector alone, stage 2 the projector and the language model.
"""
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

IGNORE = -100


class LlavaQwen(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.vision_tower = SiglipVisionModel(SiglipVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=args.vision_layers, num_attention_heads=12,
            image_size=args.image_size, patch_size=16))
        self.language_model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=args.vocab_size, hidden_size=896, intermediate_size=4864, num_hidden_layers=args.layers,
            num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
            use_cache=False))
        self.projector = nn.Sequential(nn.Linear(768, 896), nn.GELU(), nn.Linear(896, 896))
        self.vision_tower.requires_grad_(False)

    def encode_images(self, pixel_values):
        with torch.no_grad():
            features = self.vision_tower(pixel_values, output_hidden_states=True).hidden_states[-2]
        return self.projector(features)

    def forward(self, pixel_values, input_ids, labels):
        images = self.encode_images(pixel_values)
        text = self.language_model.get_input_embeddings()(input_ids)
        inputs_embeds = torch.cat([images.to(text.dtype), text], dim=1)
        no_label = torch.full(images.shape[:2], IGNORE, dtype=labels.dtype, device=labels.device)
        labels = torch.cat([no_label, labels], dim=1)
        return self.language_model(inputs_embeds=inputs_embeds, labels=labels).loss


class ImageText(Dataset):
    def __init__(self, size, image_size, length, vocab_size, prompt_length):
        self.size, self.image_size, self.length = size, image_size, length
        self.vocab_size, self.prompt_length = vocab_size, prompt_length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pixels = torch.rand(3, self.image_size, self.image_size, generator=generator) * 2 - 1
        ids = torch.randint(0, self.vocab_size, (self.length,), generator=generator)
        labels = ids.clone()
        labels[: self.prompt_length] = IGNORE
        return {"pixel_values": pixels, "input_ids": ids, "labels": labels}


def train_stage(model, name, trainable, data, batch_size, lr, device):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in trainable:
        module.requires_grad_(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"{name}: {sum(p.numel() for p in parameters) / 1e6:.1f}M trainable parameters")

    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=2, drop_last=True,
                        pin_memory=device.type == "cuda")
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    model.train()
    model.vision_tower.eval()
    for step, batch in enumerate(loader):
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        batch["pixel_values"] = batch["pixel_values"].to(torch.bfloat16)
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"  {name} step {step}: loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vision_layers", type=int, default=12)
    parser.add_argument("--vocab_size", type=int, default=151936)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--text_length", type=int, default=128)
    parser.add_argument("--pretrain_batch_size", type=int, default=6)
    parser.add_argument("--finetune_batch_size", type=int, default=4)
    parser.add_argument("--pretrain_steps", type=int, default=2)
    parser.add_argument("--finetune_steps", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlavaQwen(args).to(device, dtype=torch.bfloat16)

    pretrain = ImageText(args.pretrain_steps * args.pretrain_batch_size, args.image_size, args.text_length // 2,
                         args.vocab_size, prompt_length=4)
    finetune = ImageText(args.finetune_steps * args.finetune_batch_size, args.image_size, args.text_length,
                         args.vocab_size, prompt_length=32)
    train_stage(model, "pretrain", [model.projector], pretrain, args.pretrain_batch_size, 1e-3, device)
    train_stage(model, "finetune", [model.projector, model.language_model], finetune, args.finetune_batch_size, 2e-5,
                device)


if __name__ == "__main__":
    main()
