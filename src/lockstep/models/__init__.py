"""Built-in models, published weights, and the choice of what is trained."""

from lockstep.models.resnet import ResNet, resnet18, resnet34, resnet50
from lockstep.models.small_networks import digits_net, lstm, perceptron
from lockstep.models.transformer import transformer
from lockstep.models.weights import WeightsReport, freeze, load_weights

__all__ = [
    "ResNet",
    "WeightsReport",
    "digits_net",
    "freeze",
    "load_weights",
    "lstm",
    "perceptron",
    "resnet18",
    "resnet34",
    "resnet50",
    "transformer",
]
