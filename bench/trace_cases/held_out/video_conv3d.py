"""A small 3-D convolutional network on video clips, float32, SGD."""
import torch
from torch import nn


def conv_bn(i, o, stride=1):
    conv = nn.Conv3d(i, o, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(o), nn.ReLU(inplace=True))


class R3D(nn.Module):
    def __init__(self, classes=101):
        super().__init__()
        self.stem = conv_bn(3, 64, (1, 2, 2))
        self.layer1 = nn.Sequential(conv_bn(64, 64), conv_bn(64, 64))
        self.layer2 = nn.Sequential(conv_bn(64, 128, 2), conv_bn(128, 128))
        self.layer3 = nn.Sequential(conv_bn(128, 256, 2), conv_bn(256, 256))
        self.pool, self.fc = nn.AdaptiveAvgPool3d(1), nn.Linear(256, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.layer1(x)
        return self.fc(self.pool(self.layer3(self.layer2(x))).flatten(1))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = R3D().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
for _epoch_step in range(5):
    clips, labels = torch.randn(8, 3, 16, 112, 112).to(device), torch.randint(0, 101, (8,)).to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(clips), labels)
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
