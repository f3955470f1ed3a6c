"""What must fit on a device? A model of 7 billion parameters with Adam in fp32, and the bubble of a pipeline."""

gigabytes = {"parameters": 28, "gradients": 28, "Adam's two averages": 56}  # 7e9 x 4 bytes, and twice that
print("whole on each device:", " + ".join(f"{size} GB {name}" for name, size in gigabytes.items()))
total = sum(gigabytes.values())
for devices in (1, 2, 4, 8):
    print(f"{devices} devices: {total:3} GB on each under ddp, {total / devices:5.1f} GB under fsdp")

print("bubble, (stages - 1) / (stages - 1 + micro-batches):")
for stages in (2, 4, 8):
    shares = [f"{(stages - 1) / (stages - 1 + k):.2f} with {k}" for k in (1, 4, 8, 32)]
    print(f"{stages} stages: {', '.join(shares)}")
