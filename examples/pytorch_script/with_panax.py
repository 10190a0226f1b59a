"""Digits by a small residual network: the same script with its loop left to Panax."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import panax
from panax.adapters.torch.optimizers import from_torch

EPOCHS = 12


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu_()
        return torch.relu(self.norm2(self.conv2(y)) + x)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        Residual(32),
        nn.MaxPool2d(2),
        Residual(32),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def loaders():
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y))
    train, test = torch.utils.data.random_split(data, [1472, 325], torch.Generator().manual_seed(0))
    order = torch.Generator().manual_seed(0)
    return DataLoader(train, batch_size=64, shuffle=True, generator=order), DataLoader(test, batch_size=325)


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).float().mean().item() for x, y in loader) / len(loader)


def main():
    model = network()
    train, test = loaders()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    task = panax.adapters.torch.task(model, criterion, next(iter(train)))
    steps = EPOCHS * len(train)
    run = panax.Experiment(task=task, data=train, optimizer=from_torch(optimizer, model), num_steps=steps)
    task.trained(panax.fit(run).state)
    print(f"accuracy {accuracy(model, test):.3f}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
