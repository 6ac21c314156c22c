"""The small networks that the lessons train on images."""

import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """The network of PyTorch's MNIST example: 1,199,882 parameters.

    Takes images, float32 (batch, 1, 28, 28); returns log-probabilities, float32 (batch,
    10), to go with `F.nll_loss`.
    dropout: switch it off to compare runs number by number, since each rank draws its
    own dropout.
    """

    def __init__(self, dropout=True):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.fc1 = nn.Linear(9216, 128)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class MLP(nn.Sequential):
    """A stack of linear layers and ReLUs: quick to compute, many parameters to send, so
    communication shows.

    Takes float32 (batch, 1, 28, 28) or (batch, 784); returns log-probabilities, float32
    (batch, 10).
    """

    def __init__(self, width=512, depth=4):
        layers = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, 10), nn.LogSoftmax(dim=1))


class TwoHeads(nn.Module):
    """A network with a second head that is never called: its parameters get no
    gradient.

    Takes images, float32 (batch, 1, 28, 28) or (batch, 784); returns log-probabilities,
    (batch, 10).
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(784, 64)
        self.head = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10)

    def forward(self, images):
        return F.log_softmax(self.head(self.body(images.flatten(1))), dim=1)


class NormNet(nn.Sequential):
    """A small network with a normalisation after each layer but the last: BatchNorm, or
    what takes its place.

    Takes images, float32 (batch, 1, 28, 28); returns log-probabilities, float32 (batch,
    10). 44,906 parameters.
    norm2d, norm1d: make a layer out of a number of channels, for images (batch,
    channels, height, width) and for features (batch, channels).
    """

    def __init__(self, norm2d=nn.BatchNorm2d, norm1d=nn.BatchNorm1d):
        super().__init__(
            nn.Conv2d(
                1, 8, kernel_size=3, stride=2, bias=False
            ),  # the norm takes any bias out again
            norm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, stride=2, bias=False),
            norm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 6 * 6, 64, bias=False),
            norm1d(64),
            nn.ReLU(),
            nn.Linear(64, 10),
            nn.LogSoftmax(dim=1),
        )
