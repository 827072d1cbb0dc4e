"""ResNet-50 on synthetic ImageNet: channels_last, cudnn.benchmark, bf16 autocast, SGD with momentum."""
import argparse
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--image-size", default=224, type=int)
parser.add_argument("--num-classes", default=1000, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--iters", default=5, type=int)
parser.add_argument("-j", "--workers", default=2, type=int)


def conv(cin, cout, k, stride=1):
    return nn.Conv2d(cin, cout, k, stride=stride, padding=k // 2, bias=False)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, cin, width, stride):
        super().__init__()
        cout = width * self.expansion
        self.conv1, self.bn1 = conv(cin, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, cout, 1), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(conv(cin, cout, 1, stride), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64),
                                  nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
        blocks, cin = [], 64
        for i, n in enumerate(layers):
            width = 64 * 2 ** i
            stage = []
            for j in range(n):
                stage.append(Bottleneck(cin, width, 2 if i > 0 and j == 0 else 1))
                cin = width * Bottleneck.expansion
            blocks.append(nn.Sequential(*stage))
        self.layers = nn.ModuleList(blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(cin, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, Bottleneck):
                nn.init.zeros_(m.bn3.weight)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(self.pool(x), 1))


class FakeImageNet(Dataset):
    def __init__(self, n, size, classes):
        self.n, self.size, self.classes = n, size, classes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        img = torch.randint(0, 256, (3, self.size, self.size), dtype=torch.uint8)
        return img, i % self.classes


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), dim=1)
        correct = pred.t().eq(target.view(1, -1))
        return [correct[:k].reshape(-1).float().sum().mul_(100.0 / target.size(0)) for k in topk]


def main():
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    model = ResNet([3, 4, 6, 3], args.num_classes).cuda().to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 1e-4}, {"params": rest, "weight_decay": 0.0}],
                                lr=args.lr, momentum=0.9, nesterov=True)
    loader = DataLoader(FakeImageNet(args.batch_size * args.iters, args.image_size, args.num_classes),
                        batch_size=args.batch_size, num_workers=args.workers, pin_memory=True, drop_last=True)
    mean = torch.tensor([0.485, 0.456, 0.406], device="cuda").view(1, 3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225], device="cuda").view(1, 3, 1, 1) * 255

    model.train()
    for i, (images, target) in enumerate(loader):
        end = time.time()
        images = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        target = target.cuda(non_blocking=True)
        images = images.float().sub_(mean).div_(std)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            output = model(images)
            loss = criterion(output, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        acc1, acc5 = accuracy(output, target)
        torch.cuda.synchronize()
        print(f"[{i}] loss {loss.item():.3f} acc@1 {acc1.item():.2f} acc@5 {acc5.item():.2f} "
              f"{args.batch_size / (time.time() - end):.0f} img/s")
    print(f"peak reserved: {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
