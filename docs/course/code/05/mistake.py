"""On two processes the accuracy of this script is not that of the model. Why?"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
val_set = TensorDataset(torch.randn(11, 4), torch.randint(2, (11,)))
val_loader = DataLoader(val_set, batch_size=4, sampler=DistributedSampler(val_set, shuffle=False))
model = DistributedDataParallel(nn.Linear(4, 2))
model.eval()
correct = torch.zeros(1)
with torch.no_grad():
    for inputs, targets in val_loader:
        correct += (model(inputs).argmax(1) == targets).sum()
dist.all_reduce(correct)
if rank == 0:
    print(f"accuracy {correct.item() / len(val_set):.4f}")
dist.destroy_process_group()
