"""A vision transformer of timm with mixup, label smoothing and drop path."""
import timm
import torch
import torch.nn as nn

model = timm.create_model("deit3_small_patch16_224", num_classes=100, drop_path_rate=0.1).to("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
model.train()
for step in range(5):
    images = torch.rand(48, 3, 224, 224, device="cuda")
    targets = torch.randint(0, 100, (48,), device="cuda")
    lam = 0.3
    mixed = lam * images + (1 - lam) * images.flip(0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(mixed)
        loss = lam * criterion(out, targets) + (1 - lam) * criterion(out, targets.flip(0))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"[{step}] loss {loss.item():.3f} mem {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")
