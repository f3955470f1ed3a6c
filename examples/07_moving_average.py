"""Chapter 7: mixed precision, clipping, a moving average of the weights, and a forward pass of your own.

    lockstep run --devices 2 examples/07_moving_average.py

The model is a denoising autoencoder. Its noise is drawn on the device, in ``forward``. Such draws are keyed by step and
micro-batch, so they are the same on any number of devices.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep.data import Digits


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = lockstep.init(global_batch=64, precision="bf16")
    model, optimizer, average = run.prepare(model, optimizer, average)  # the average is kept in checkpoints, too

    def denoised(data):
        images = data[0].flatten(1)
        return model(images + 0.3 * torch.randn_like(images))

    def denoised_by_average(data):
        return average(data[0].flatten(1))

    def error(output, data):
        return (output.float() - data[0].flatten(1)).square().mean()

    train_set, test_set = Digits("train"), Digits("validation")
    for _ in run.epochs(3):
        for batch in run.batches(train_set):
            run.backward(batch, error, forward=denoised)
            run.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    trained = run.evaluate(test_set, error, forward=denoised)
    averaged = run.evaluate(test_set, error, model=average, forward=denoised_by_average)
    run.print(f"error {trained:.4f}, of the average {averaged:.4f}  fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
