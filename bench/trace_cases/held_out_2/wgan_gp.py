"""WGAN-GP with a DCGAN-like generator and critic on 64x64 images."""
import argparse

import torch
import torch.nn as nn


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=128)
    p.add_argument("--z", type=int, default=128)
    p.add_argument("--ngf", type=int, default=128)
    p.add_argument("--ndf", type=int, default=128)
    p.add_argument("--n_critic", type=int, default=2)
    p.add_argument("--iters", type=int, default=4, help="critic iterations")
    p.add_argument("--gp", type=float, default=10.0)
    p.add_argument("--lr", type=float, default=1e-4)
    return p.parse_args()


class Generator(nn.Module):
    def __init__(self, z, ngf):
        super().__init__()

        def up(cin, cout, stride=2, padding=1):
            return [nn.ConvTranspose2d(cin, cout, 4, stride, padding, bias=False),
                    nn.BatchNorm2d(cout), nn.ReLU(True)]

        self.net = nn.Sequential(
            *up(z, ngf * 8, 1, 0),       # 4x4
            *up(ngf * 8, ngf * 4),       # 8x8
            *up(ngf * 4, ngf * 2),       # 16x16
            *up(ngf * 2, ngf),           # 32x32
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1),
            nn.Tanh())                   # 64x64

    def forward(self, z):
        return self.net(z.view(z.size(0), -1, 1, 1))


class Critic(nn.Module):
    def __init__(self, ndf):
        super().__init__()

        def down(cin, cout, norm=True):
            layers = [nn.Conv2d(cin, cout, 4, 2, 1, bias=not norm)]
            if norm:
                layers.append(nn.InstanceNorm2d(cout, affine=True))
            layers.append(nn.LeakyReLU(0.2))
            return layers

        self.net = nn.Sequential(
            *down(3, ndf, norm=False),   # 32x32
            *down(ndf, ndf * 2),         # 16x16
            *down(ndf * 2, ndf * 4),     # 8x8
            *down(ndf * 4, ndf * 8),     # 4x4
            nn.Conv2d(ndf * 8, 1, 4, 1, 0))

    def forward(self, x):
        return self.net(x).view(-1)


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, (nn.BatchNorm2d, nn.InstanceNorm2d)):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mixed)
    grads, = torch.autograd.grad(outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score),
                                 create_graph=True, retain_graph=True)
    return ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def main():
    args = get_args()
    torch.manual_seed(2)
    device = "cuda:0"
    G = Generator(args.z, args.ngf).to(device)
    D = Critic(args.ndf).to(device)
    G.apply(init_weights)
    D.apply(init_weights)
    opt_g = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=args.lr, betas=(0.0, 0.9))
    fixed_noise = torch.randn(64, args.z, device=device)

    for it in range(1, args.iters + 1):
        # critic
        real = torch.rand(args.batch_size, 3, 64, 64).mul_(2).sub_(1).to(device)
        with torch.no_grad():
            fake = G(torch.randn(args.batch_size, args.z, device=device))
        opt_d.zero_grad()
        d_real, d_fake = D(real).mean(), D(fake).mean()
        gp = gradient_penalty(D, real, fake)
        d_loss = d_fake - d_real + args.gp * gp
        d_loss.backward()
        opt_d.step()

        # generator, once every n_critic critic iterations
        if it % args.n_critic == 0:
            for p in D.parameters():
                p.requires_grad_(False)
            opt_g.zero_grad()
            g_loss = -D(G(torch.randn(args.batch_size, args.z, device=device))).mean()
            g_loss.backward()
            opt_g.step()
            for p in D.parameters():
                p.requires_grad_(True)
            print(f"iter {it}: critic {d_loss.item():.3f} (gp {gp.item():.3f}), generator {g_loss.item():.3f}")

    G.eval()
    with torch.no_grad():
        samples = G(fixed_noise).add(1).div(2).cpu()
    print("samples", tuple(samples.shape))
    print(f"max reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
