# Simple CLIP: an image encoder and a text encoder with projection heads, after the well-known Kaggle notebook.
import argparse
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DistilBertConfig, DistilBertModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel


class CFG:
    batch_size = 32
    num_workers = 2
    head_lr = 1e-3
    image_encoder_lr = 1e-4
    text_encoder_lr = 1e-5
    weight_decay = 1e-3
    patience = 1
    factor = 0.8
    epochs = 2
    steps_per_epoch = 3
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    image_encoder = "resnet"
    text_embedding = 768
    max_length = 64
    size = 224
    temperature = 1.0
    projection_dim = 256
    dropout = 0.1


class AvgMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, count=1):
        self.count += count
        self.sum += val * count

    @property
    def avg(self):
        return self.sum / self.count


class CLIPDataset(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        rng = np.random.default_rng(seed)
        self.images = rng.integers(0, 256, (size, CFG.size, CFG.size, 3), dtype=np.uint8)
        self.captions = rng.integers(5, 30522, (size, CFG.max_length))
        self.lengths = rng.integers(8, CFG.max_length, size)

    def __getitem__(self, idx):
        mask = (np.arange(CFG.max_length) < self.lengths[idx]).astype(np.int64)
        image = torch.from_numpy(self.images[idx]).permute(2, 0, 1).float().div(255).sub(0.45).div(0.225)
        return {"image": image, "input_ids": torch.from_numpy(self.captions[idx] * mask),
                "attention_mask": torch.from_numpy(mask)}

    def __len__(self):
        return len(self.images)


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        if CFG.image_encoder == "resnet":
            self.model, self.dim = ResNetModel(ResNetConfig()), 2048
        else:
            self.model, self.dim = ViTModel(ViTConfig(image_size=CFG.size)), 768

    def forward(self, x):
        return self.model(x).pooler_output.flatten(1)


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = DistilBertModel(DistilBertConfig())

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0, :]


class ProjectionHead(nn.Module):
    def __init__(self, embedding_dim):
        super().__init__()
        self.projection = nn.Linear(embedding_dim, CFG.projection_dim)
        self.gelu = nn.GELU()
        self.fc = nn.Linear(CFG.projection_dim, CFG.projection_dim)
        self.dropout = nn.Dropout(CFG.dropout)
        self.layer_norm = nn.LayerNorm(CFG.projection_dim)

    def forward(self, x):
        projected = self.projection(x)
        x = self.dropout(self.fc(self.gelu(projected)))
        return self.layer_norm(x + projected)


class CLIPModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_encoder = ImageEncoder()
        self.text_encoder = TextEncoder()
        self.image_projection = ProjectionHead(self.image_encoder.dim)
        self.text_projection = ProjectionHead(CFG.text_embedding)

    def forward(self, batch):
        image_embeddings = self.image_projection(self.image_encoder(batch["image"]))
        text_embeddings = self.text_projection(self.text_encoder(batch["input_ids"], batch["attention_mask"]))
        logits = (text_embeddings @ image_embeddings.T) / CFG.temperature
        images_similarity = image_embeddings @ image_embeddings.T
        texts_similarity = text_embeddings @ text_embeddings.T
        targets = F.softmax((images_similarity + texts_similarity) / 2 * CFG.temperature, dim=-1)
        texts_loss = cross_entropy(logits, targets, reduction="none")
        images_loss = cross_entropy(logits.T, targets.T, reduction="none")
        return ((images_loss + texts_loss) / 2.0).mean()


def cross_entropy(preds, targets, reduction="none"):
    loss = (-targets * nn.LogSoftmax(dim=-1)(preds)).sum(1)
    return loss if reduction == "none" else loss.mean()


def train_epoch(model, loader, optimizer):
    meter = AvgMeter()
    for batch in loader:
        batch = {k: v.to(CFG.device) for k, v in batch.items()}
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), batch["image"].size(0))
    return meter


def valid_epoch(model, loader):
    meter = AvgMeter()
    for batch in loader:
        batch = {k: v.to(CFG.device) for k, v in batch.items()}
        meter.update(model(batch).item(), batch["image"].size(0))
    return meter


def main():
    parser = argparse.ArgumentParser()
    for name in ("batch_size", "epochs", "steps_per_epoch", "size"):
        parser.add_argument(f"--{name}", type=int, default=getattr(CFG, name))
    parser.add_argument("--image_encoder", default=CFG.image_encoder, choices=["resnet", "vit"])
    for name, value in vars(parser.parse_args()).items():
        setattr(CFG, name, value)

    torch.manual_seed(0)
    options = dict(batch_size=CFG.batch_size, num_workers=CFG.num_workers)
    train_loader = torch.utils.data.DataLoader(CLIPDataset(CFG.batch_size * CFG.steps_per_epoch, 0), shuffle=True, **options)
    valid_loader = torch.utils.data.DataLoader(CLIPDataset(CFG.batch_size + CFG.batch_size // 2, 1), **options)
    model = CLIPModel().to(CFG.device)
    optimizer = torch.optim.AdamW([
        {"params": model.image_encoder.parameters(), "lr": CFG.image_encoder_lr},
        {"params": model.text_encoder.parameters(), "lr": CFG.text_encoder_lr},
        {"params": itertools.chain(model.image_projection.parameters(), model.text_projection.parameters()),
         "lr": CFG.head_lr, "weight_decay": CFG.weight_decay},
    ], weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", patience=CFG.patience, factor=CFG.factor)

    best_loss = float("inf")
    for epoch in range(CFG.epochs):
        model.train()
        train_loss = train_epoch(model, train_loader, optimizer)
        model.eval()
        with torch.no_grad():
            valid_loss = valid_epoch(model, valid_loader)
        if valid_loss.avg < best_loss:
            best_loss = valid_loss.avg
            torch.save(model.state_dict(), "/tmp/simple_clip_best.pt")
            print("Saved best model!")
        scheduler.step(valid_loss.avg)
        print(f"Epoch {epoch + 1}: train loss {train_loss.avg:.4f}, valid loss {valid_loss.avg:.4f}, "
              f"lr {optimizer.param_groups[0]['lr']:.1e}")


if __name__ == "__main__":
    main()
