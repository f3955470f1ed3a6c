"""Chapter 5: a program starts training runs of a function on several processes, and gets their results back.

    python examples/05_launch_from_python.py

Here it compares two learning rates, each on 1, 2 and 3 processes.
"""

import torch
from torch import nn

import lockstep
from lockstep.data import Digits


def correct(output, labels):
    return output.argmax(1) == labels


def train(lr, epochs):
    """Runs on every rank; what it returns must fit into JSON."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    run = lockstep.init(global_batch=96, micro_batches=6)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    train_set = Digits("train")
    for _ in run.epochs(epochs):
        for batch in run.batches(train_set):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    return {"accuracy": run.evaluate(Digits("validation"), correct), "fingerprint": run.fingerprint()}


def main():
    for lr in (0.05, 0.2):
        results = [lockstep.launch(train, lr, epochs=3, devices=f"cpu:{ranks}")[0] for ranks in (1, 2, 3)]
        same = len({result["fingerprint"] for result in results}) == 1
        print(f"lr {lr}: accuracy {results[0]['accuracy']:.4f}, {'one result' if same else 'DIFFERENT RESULTS'}")


if __name__ == "__main__":
    main()
