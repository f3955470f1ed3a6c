"""Declares the C++ operators that torchvision cannot load beside another build of torch; no script calls them."""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
