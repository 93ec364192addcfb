"""Weights with noise of their own; those that are mostly noise are zero: sparse variational dropout.

    w ~ N(theta, sigma^2)    log alpha = log sigma^2 - log theta^2    after training: theta where log alpha < 3, else 0
    KL = k1 - k1 sigmoid(k2 + k3 log alpha) + log(1 + 1 / alpha) / 2        k1, k2, k3 = 0.63576, 1.87320, 1.48695

The KL of posterior and prior is an approximation, with the constant for which it is 0 at infinite alpha. Of a linear layer or a 2d
convolution the noise is drawn for what comes out, with the layer's product of x^2 and sigma^2 as its variance (local reparameterisation:
gradients with less variance than by a draw of the weights, which all other layers get).
Molchanov, Ashukha, Vetrov 2017, Variational Dropout Sparsifies Deep Neural Networks, arXiv 1701.05369.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.sparse.gate import TrainedGate
from shoestring.core.errors import Mistake

K1, K2, K3 = 0.63576, 1.87320, 1.48695
THRESHOLD = 3.0  # log alpha from which on a weight is zero
QUIET = -10.0  # log sigma^2 at first
MOST = 10.0  # log alpha is taken as at most this far from 0
TINY = 1e-8  # added to squares, of which a logarithm or a root follows


def kl(log_alpha: Tensor) -> Tensor:
    """The approximate KL of each weight.

    >>> kl(torch.tensor([-4.0, 0.0, 3.0]))
    tensor([2.6342, 0.4312, 0.0254])
    """
    return K1 - K1 * torch.sigmoid(K2 + K3 * log_alpha) + 0.5 * nn.functional.softplus(-log_alpha)


class Variational(TrainedGate):
    """Noise for every number of a weight: log sigma^2 is trained. Of a `layer`, it is drawn for what comes out."""

    noise: Tensor

    def __init__(self, weight: Tensor, pace: float, layer: nn.Module | None) -> None:
        super().__init__(weight, pace, QUIET)
        self.local = layer is not None
        self.hook = None if layer is None else layer.register_forward_hook(self.noisy_output)
        self.read = self.noised = False  # since the last draw: the weight was used, noise was added to what came of it
        if layer is None:
            self.register_buffer("noise", torch.zeros_like(weight), persistent=False)

    def draw(self) -> None:
        self.read = self.noised = False
        if not self.local:
            self.noise.normal_()

    def forward(self, weight: Tensor) -> Tensor:
        self.read = True
        if not self.training:
            return self.settled(weight)
        if not self.noisy:
            return weight * self.mask
        return weight if self.local else weight + self.deviation * self.noise

    @property
    def deviation(self) -> Tensor:
        return torch.exp(0.5 * self.trained)

    def log_alpha(self, weight: Tensor) -> Tensor:
        return (self.trained - torch.log(weight.square() + TINY)).clamp(-MOST, MOST)

    def rule(self, weight: Tensor) -> Tensor:
        return (self.log_alpha(weight) < THRESHOLD).to(weight.dtype)

    def scores(self, weight: Tensor) -> Tensor:
        return THRESHOLD - self.log_alpha(weight).detach()

    def penalty(self, weight: Tensor) -> Tensor:
        return kl(self.log_alpha(weight)).sum()

    def leave(self) -> None:
        if self.hook is not None:
            self.hook.remove()

    def check_used(self, name: str) -> None:
        if self.local and self.noisy and self.read and not self.noised:
            raise Mistake(
                f"the model uses {name} without calling its layer, so that no noise is added and nothing would say how "
                f"much of it is needed: use method='l0' or 'magnitude', or leave it out with skip={name!r}"
            )

    def noisy_output(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """A hook after the layer: its output with noise of the variance that its weights' noise would give."""
        if not (self.training and self.noisy):
            return output
        self.noised = True
        variance = with_weight(layer, inputs[0].square(), self.trained.exp())
        return output + (variance + TINY).sqrt() * torch.randn_like(output)


def with_weight(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What a linear layer or a 2d convolution without bias gives, with another weight."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight)
    assert isinstance(layer, nn.Conv2d), "only these have local noise"
    return nn.functional.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def has_local_noise(layer: nn.Module) -> bool:
    """Whether a layer does to its input what `with_weight` does; a subclass may do more, and other padding pads with numbers."""
    return type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.padding_mode == "zeros")
