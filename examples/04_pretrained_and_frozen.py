"""Chapter 4: a network begins with the weights of another task. Its body is frozen, and a new head is trained.

    lockstep run --devices 2 examples/04_pretrained_and_frozen.py --weights five.safetensors

The other task is to recognise the digits 0 to 4. It is learned here first, so that nothing is downloaded. Files
published for torchvision's ResNets load into ``lockstep.models.resnet18`` and the other ResNets there in the same way.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.checkpoint import export
from lockstep.data import Digits
from lockstep.models import digits_net, freeze, load_weights


def correct(output, labels):
    return output.argmax(1) == labels


def learn_five_digits(weights):
    """Plain PyTorch; whoever has a file of weights does without."""
    torch.manual_seed(0)
    digits = Digits("train")
    few = torch.tensor([int(label) < 5 for label in digits.labels])
    images, labels = digits.images[few], digits.labels[few]
    model = digits_net(num_classes=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for part in torch.arange(len(labels)).split(64) * 3:
        nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    export(weights, model.state_dict())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    weights = parser.parse_args().weights

    run = lockstep.init(global_batch=64)
    torch.manual_seed(1)
    model = digits_net(num_classes=10)
    if run.is_main:  # a file is read once; run.prepare gives what was read to every rank
        if not weights.exists():
            learn_five_digits(weights)
        print(load_weights(model, weights).describe())
    trained = freeze(model, ["*", "!11", "!14"])
    run.print(f"trained: {', '.join(trained)}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = run.prepare(model, optimizer, values_from_main=True)

    train_set, test_set = Digits("train"), Digits("validation")
    for _ in run.epochs(4):
        for batch in run.batches(train_set):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    accuracy = run.evaluate(test_set, correct)
    run.print(f"accuracy {accuracy:.4f}  fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
