"""Built-in models, published weights, and the choice of what is trained."""

from lockstep.models.digits import digits_net
from lockstep.models.freeze import freeze
from lockstep.models.lstm import lstm
from lockstep.models.perceptron import perceptron
from lockstep.models.resnet import ResNet, resnet18, resnet34, resnet50
from lockstep.models.transformer import transformer
from lockstep.models.weights import WeightsReport, load_weights

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
